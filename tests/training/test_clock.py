"""The wall clock jumps by a day, forward and back: nothing but what is shown depends on it."""

import itertools
import time
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from qfleet import resume, train
from qfleet.watch.run_listing import list_runs
from tests.support.run_fixtures import Reference
from tests.support.runs import checkpoints, same, small, status, until

DAYS = itertools.cycle([0, 1, -1, 400, -400])


class Jumping(datetime):
    """A clock that is a day or a year off, another way at each look."""

    looks = 0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        cls.looks += 1
        return datetime.now(tz) + timedelta(days=next(DAYS))


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> type[Jumping]:
    Jumping.looks = 0
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400 * next(DAYS))
    for module in (
        "qfleet.watch.run_files",
        "qfleet.save.lock",
        "qfleet.watch.run_directory",
        "qfleet.watch.provenance",
    ):
        monkeypatch.setattr(f"{module}.datetime", Jumping, raising=False)
    return Jumping


def test_a_run_under_a_jumping_clock_is_the_same_run(
    tmp_path: Path, reference: Reference, jumping: type[Jumping]
) -> None:
    whole = reference()
    run = train(until(small(), 150), out=tmp_path)
    run = resume(run.path, steps=small().until.steps)
    assert jumping.looks > 5, "the clock was looked at"
    assert same(run.path, whole.path)
    kept = [each.name for each in checkpoints(run.path)]
    assert kept == sorted(kept), "what is newest is decided by steps"
    assert len(kept) >= 2
    assert 0 <= status(run.path)["seconds"] < 600
    assert [each["state"] for each in list_runs(tmp_path)] == ["done"]
    assert list_runs(tmp_path)[0]["age_seconds"] >= 0


@pytest.mark.timeout(100)
def test_a_jumping_clock_does_not_make_actors_look_hung(tmp_path: Path, jumping: type[Jumping]) -> None:
    asked = {"runtime.type": "processes", "runtime.inference": "local", "actors.num": 2, "env.num": 2}
    run = train(small({**asked, "runtime.hung_seconds": 30.0}), out=tmp_path)
    assert run.exit_code == 0
    assert "actor_hung" not in (run.path / "events.jsonl").read_text()
    assert datetime.now(UTC) > datetime(2020, 1, 1, tzinfo=UTC)
