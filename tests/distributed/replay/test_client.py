"""A replay in a process of its own: its replies, and its loss."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import resume, train
from qfleet.build.components import ReplayLost
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_train_world
from qfleet.distributed.actors.process import fork_server
from qfleet.distributed.replay.client import RemoteReplay
from qfleet.distributed.replay.process import SharedReplayConnection, make_shared_replay
from qfleet.errors import EnvError
from qfleet.plan import make_plan
from qfleet.plan.schema import ProcessesRuntime
from tests.replay.streams import random_stream, rollout
from tests.support.runs import LOCAL, SMALL, status

pytestmark = pytest.mark.timeout(110)


def make_remote(**settings: Any) -> RemoteReplay:
    more = {**LOCAL, "runtime.type": "processes", "runtime.replay_process": True, "runtime.hung_seconds": 1, **settings}
    plan = make_plan("CartPole-v1", overrides={**SMALL, **more})
    spec = make_train_world(plan).spec
    plan = resolve(plan, spec)
    assert isinstance(plan.runtime, ProcessesRuntime)
    made = make_shared_replay(plan, spec, fork_server(), plan.runtime)
    made.start()
    return made


def connection_of(replay: RemoteReplay) -> SharedReplayConnection:
    assert isinstance(replay.connection, SharedReplayConnection)
    return replay.connection


def process_of(replay: RemoteReplay) -> BaseProcess:
    process = connection_of(replay).process
    assert process is not None
    return process.process


@pytest.fixture
def replay() -> Iterator[RemoteReplay]:
    made = make_remote()
    yield made
    made.close()


@pytest.fixture
def filled() -> Iterator[RemoteReplay]:
    """A hundred items with priorities."""
    made = make_remote(**{"replay.sampler.type": "prioritized", "runtime.hung_seconds": 20})
    rows = random_stream(np.random.default_rng(0), made.spec, made.lanes, 26, 0.0)
    for begin in range(0, 26, 2):
        made.add(rollout(rows, begin, begin + 2))
    yield made
    made.close()


def test_a_replay_stopped_in_the_middle_of_a_message_is_lost(replay: RemoteReplay) -> None:
    assert len(replay) == 0
    process = process_of(replay)
    os.kill(process.pid or 0, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(ReplayLost, match="its process was ended by SIGKILL"):  # far more than a pipe holds
        replay.read_batch(np.zeros(1 << 20, np.int64), np.zeros(0, np.float32))
    assert 0.9 < time.monotonic() - begun < 10
    process.join(10)  # its exit code is known a moment after the end of the pipe
    assert not process.is_alive()


def test_a_lost_replay_is_restarted_as_often_as_allowed(replay: RemoteReplay) -> None:
    for at in range(5):
        assert replay.budget.charge(float(at))
    assert not replay.budget.charge(5.0)
    replay.start()
    assert len(replay) == 0


def test_a_replay_that_fails_reports_its_error_but_prints_nothing(
    replay: RemoteReplay, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(replay) == 0
    replay.connection.send({"kind": "nonsense"})
    with pytest.raises(ReplayLost, match="the replay is lost: KeyError: 'nonsense'"):
        replay.flush()
    assert capfd.readouterr() == ("", "")


def test_a_killed_replay_is_lost_with_its_exit_code(replay: RemoteReplay) -> None:
    assert len(replay) == 0
    kill_replay()
    with pytest.raises(ReplayLost, match="its process was ended by SIGKILL"):
        replay.flush()


def test_a_learner_stopped_together_with_the_replay_does_not_find_it_hung(
    replay: RemoteReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(replay) == 0
    connection = connection_of(replay)
    connection.hung_seconds = 5.0
    jumps, clock = iter([0.0, 3600.0]), time.monotonic
    monkeypatch.setattr("qfleet.distributed.replay.process.time.monotonic", lambda: clock() + next(jumps, 3600.0))
    replies = iter([None, None, "there"])
    assert connection.wait(lambda: next(replies)) == "there"


def test_a_draw_from_an_empty_replay_returns_none(replay: RemoteReplay) -> None:
    replay.connection.send({"kind": "draw", "size": 4})  # before any item
    replay.batches_requested = 2
    replay.connection.send({"kind": "draw", "size": 4})
    assert replay.sample(4) is None
    assert len(replay) == 0  # it still runs


def test_a_new_priority_decides_the_draws_requested_after_it(filled: RemoteReplay) -> None:
    first = filled.sample(16)
    assert first is not None
    chosen = filled.head - 7
    filled.update(np.array([chosen]), np.array([1e9]))
    shares = [float((batch.ids == chosen).mean()) for _ in range(4) if (batch := filled.sample(16)) is not None]
    assert shares[0] < 0.5  # it was requested before
    assert shares[1:] == [1.0] * 3  # 250,000 against one for each of the others, one draw per equal slice


def test_the_next_batch_is_requested_ahead(filled: RemoteReplay) -> None:
    assert filled.sample(16) is not None
    connection = connection_of(filled)
    assert connection.wait(connection.has_batch)
    assert len(connection.received) == 1
    next_one = connection.received[0]
    assert filled.sample(16) is next_one


def kill_replay(row: dict[str, Any] | None = None) -> None:
    for child in multiprocessing.active_children():
        if child.name == "qfleet-replay" and child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)


REMOTE: dict[str, Any] = {
    **SMALL,
    **LOCAL,
    "runtime.type": "processes",
    "runtime.replay_process": True,
    "replay.filter.type": "duplicates",
    "runtime.hung_seconds": 5,
}


def test_a_replay_that_is_lost_too_often_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    plan = make_plan("CartPole-v1", overrides={**REMOTE, "runtime.restarts": 0, "until.steps": 100_000})
    with pytest.raises(EnvError, match=r"more often than runtime\.restarts allows"):
        train(plan, out=tmp_path, callbacks=[kill_replay])
    found = status(next(tmp_path.iterdir()))
    assert (found["state"], found["exit_code"]) == ("failed", 4)
    assert "more often than runtime.restarts allows" in found["reason"]


def test_a_replay_lost_during_resume_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("CartPole-v1", overrides={**REMOTE, "until.steps": 400})
    run = train(plan, out=tmp_path)
    flush, kills = RemoteReplay.flush, [1]

    def killing_flush(replay: RemoteReplay) -> None:
        if kills:
            kills.pop()
            kill_replay()
            process_of(replay).join(10)
        flush(replay)

    monkeypatch.setattr(RemoteReplay, "flush", killing_flush)
    again = resume(run.path, steps=800)
    assert not kills
    assert again.status["state"] == "done"
    assert again.status["env_steps"] >= 800
