"""Bundles: learners with environments and a replay of their own. Real processes."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import resume, train
from qfleet.errors import UsageError
from qfleet.plan import make_plan, updates_per_step
from qfleet.plan.places import bundled
from qfleet.plan.schema import Plan, Replay
from qfleet.run.audit import check_history
from qfleet.run.mate import Mate
from qfleet.run.quarters import OwnQuarters
from qfleet.watch import read_rows
from tests.run.parts import SMALL, process_of
from tests.run.test_together import ends, events, saved

pytestmark = pytest.mark.timeout(110)
TWO = {**SMALL, "learners.num": 2, "learners.bundles": True, "learners.timeout_seconds": 5.0, "until.steps": 600}
PRIORITIES = {"replay.sampler.type": "prioritized"}
GORILA = {"sync.type": "server", "sync.shards": 2, "sync.max_staleness": None}


def two(**more: Any) -> Plan:
    named = {name.replace("__", "."): value for name, value in more.items()}
    return make_plan("CartPole-v1", overrides={**TWO, **named})


def files_of(folder: Path, number: int) -> list[str]:
    newest = max((folder / "checkpoints").iterdir())
    return sorted(str(path.relative_to(newest)) for path in newest.glob(f"bundles/{number}-*/**/*") if path.is_file())


def test_a_bundle_has_its_part_of_everything() -> None:
    plan = two(learners__num=4, env__num=8, algo__batch_size=64, replay__capacity=1000, algo__learn_start_steps=30)
    part = bundled(plan)
    assert isinstance(part.replay, Replay)
    assert (part.env.num, part.algo.batch_size, part.replay.capacity, part.algo.learn_start_steps) == (2, 16, 250, 8)
    assert updates_per_step(part) == 4 * updates_per_step(plan)  # of its own steps: of everybody's, as many
    assert bundled(make_plan("CartPole-v1")) == make_plan("CartPole-v1")


@pytest.mark.parametrize("more", [{}, PRIORITIES], ids=["uniform", "prioritized"])
def test_a_run_of_bundles_repeats_and_resumes_exactly(tmp_path: Path, more: dict[str, Any]) -> None:
    plan = make_plan("CartPole-v1", overrides={**TWO, **more, "log.history": True})
    whole = train(plan, out=tmp_path / "whole")
    half = train(make_plan("CartPole-v1", overrides={**TWO, **more, "until.steps": 304}), out=tmp_path / "half")
    names = files_of(half.path, 1)
    assert any(name.endswith("state.json") for name in names)
    assert any("/replay/rows_" in name for name in names)
    resumed = resume(half.path, steps=600)
    one, other = saved(whole.path), saved(resumed.path)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert whole.status["exact"]
    assert resumed.status["exact"]
    assert whole.status["env_steps"] == resumed.status["env_steps"]
    assert check_history(whole.path / "history") == []


def test_everybodys_steps_and_episodes_count(tmp_path: Path) -> None:
    plan = two(until__steps=2_000, log__every_steps=100)
    found = train(plan, out=tmp_path)
    end = ends(found.path)
    assert 2_000 <= end["env_steps"] < 2_000 + 8 * plan.env.num
    part = bundled(plan)
    own = end["env_steps"] // 2  # both make as many
    due = int((own - part.algo.learn_start_steps) * updates_per_step(part))
    assert abs(end["updates"] - due) <= 2
    rows = [row for row in read_rows(found.path / "metrics.jsonl") if row["kind"] == "progress"]
    # CartPole by chance takes about twenty steps: half of the episodes would be missing if one bundle's were.
    lengths = rows[-1]["return_mean"]
    assert rows[-1]["episodes"] * lengths > 0.6 * end["env_steps"]


def test_a_bundle_killed_in_the_middle_is_replaced_and_begins_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mates: list[Mate] = []
    hire = OwnQuarters.hire

    def watched(quarters: OwnQuarters, number: int, incarnation: int) -> Mate:
        mates.append(hire(quarters, number, incarnation))
        return mates[-1]

    def strike(row: dict[str, Any]) -> None:
        if row["kind"] == "progress" and len(mates) == 1:
            os.kill(process_of(mates[0]).pid or 0, signal.SIGKILL)

    monkeypatch.setattr(OwnQuarters, "hire", watched)
    more = {"until.steps": 3_000, "log.every_steps": 400, "log.history": True, **PRIORITIES}
    found = train(make_plan("CartPole-v1", overrides={**TWO, **more}), out=tmp_path, callbacks=[strike])
    assert found.status["state"] == "done"
    (lost,) = events(found.path, "learner_lost")
    assert lost["replaced"]
    assert not found.status["exact"]
    assert check_history(found.path / "history") == []
    assert all(not mate.life.is_alive() for mate in mates)
    assert len(events(found.path, "group_formed")) == 2  # the new one was there again before the end


def test_gorila_learns_asynchronously_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    small = {name: value for name, value in TWO.items() if not name.startswith("learners.num")}
    plan = make_plan("CartPole-v1", "gorila", {**small, "log.history": True, "until.steps": 400})
    found = train(plan, out=tmp_path)
    before = ends(found.path)["updates"]
    assert not found.status["exact"]
    again = resume(found.path, steps=900)
    assert again.status["env_steps"] >= 900
    assert again.status["updates"] > before > 0
    assert check_history(again.path / "history") == []
    (told,) = {tuple(event["versions"]) for event in events(again.path, "server")[-1:]}
    assert len(told) == 2  # shards
    assert told[0] > again.status["updates"] - before  # the other bundle's gradients are steps too


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"env.num": 5}, "env.num=5"),
        ({"algo.batch_size": 15}, "algo.batch_size=15"),
        ({"env.workers": 3}, "env.workers=3"),
    ],
)
def test_parts_that_are_not_equal_are_refused(words: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make_plan("CartPole-v1", overrides={**TWO, **words})
