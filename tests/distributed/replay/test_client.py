"""A replay in a process of its own: its replies, and its loss."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import resume, train
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_train_world
from qfleet.distributed.replay import server
from qfleet.distributed.replay.client import RemoteReplay
from qfleet.distributed.replay.messages import BatchReply
from qfleet.distributed.replay.process import make_shared_replay
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.local import LocalWorker
from qfleet.distributed.worker.messages import Stop
from qfleet.distributed.worker.transport import RingTransport
from qfleet.errors import EnvError, UsageError
from qfleet.plan import make_plan
from qfleet.plan.schema import ProcessesRuntime
from qfleet.system.child_process import fork_server
from qfleet.system.worker_errors import WorkerDied, WorkerFailed, WorkerHung, WorkerLost
from qfleet.system.worker_process import WorkerProcess
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


def handle_of(replay: RemoteReplay) -> WorkerHandle:
    assert replay.connection.handle is not None
    return replay.connection.handle


def rings_of(replay: RemoteReplay) -> RingTransport:
    transport = handle_of(replay).transport
    assert isinstance(transport, RingTransport)
    return transport


def process_of(replay: RemoteReplay) -> WorkerProcess:
    control = handle_of(replay).control
    assert isinstance(control, LocalWorker)
    return control.process


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
    with pytest.raises(WorkerHung, match="it did not answer for 1 s"):  # far more than the ring holds
        replay.read_batch(np.zeros(1 << 20, np.int64), np.zeros(0, np.float32))
    assert 0.9 < time.monotonic() - begun < 10
    assert not process.is_alive()  # it was ended at once
    with pytest.raises(WorkerHung, match="it did not answer for 1 s"):
        replay.flush()
    replay.start()
    assert len(replay) == 0


def test_a_replay_that_does_not_reply_is_lost(replay: RemoteReplay) -> None:
    assert len(replay) == 0
    process = process_of(replay)
    os.kill(process.pid or 0, signal.SIGSTOP)
    with pytest.raises(WorkerHung, match="it did not answer for 1 s"):
        replay.flush()
    assert not process.is_alive()


def test_states_larger_than_the_rings_are_sent_in_pieces(replay: RemoteReplay) -> None:
    state = {**replay.state_dict(), "ballast": np.arange(1 << 20)}
    replay.load_state_dict(state)  # what is not known is not read
    rings = rings_of(replay)
    assert rings.sending.written.last_value > (8 << 20) // rings.sending.slot_bytes
    serials = np.zeros(100_000, np.int64)
    rows = random_stream(np.random.default_rng(0), replay.spec, replay.lanes, 26, 0.0)
    for begin in range(0, 26, 2):
        replay.add(rollout(rows, begin, begin + 2))
    before = rings.receiving.taken.last_value
    batch = replay.read_batch(serials, np.ones(100_000, np.float32))
    assert len(batch.ids) == 100_000
    assert rings.receiving.taken.last_value > before + 10


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
    replay.connection.send(Stop())  # not a message of a replay
    with pytest.raises(WorkerFailed, match="ValueError: the message's table: Invalid value 'Stop'"):
        replay.flush()
    assert capfd.readouterr() == ("", "")


def test_a_killed_replay_is_lost_with_its_exit_code(replay: RemoteReplay) -> None:
    assert len(replay) == 0
    kill_replay()
    with pytest.raises(WorkerDied, match="its process was ended by SIGKILL"):
        replay.flush()


def test_a_learner_stopped_together_with_the_replay_does_not_find_it_hung(
    replay: RemoteReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(replay) == 0
    replay.connection.hung_seconds = 5.0
    handle = handle_of(replay)
    clock = time.monotonic
    receive = handle.receive
    jumps = iter([0.0, 0.0, 3600.0])

    def stopped_meanwhile(timeout_seconds: float) -> Any:
        ahead = next(jumps, None)
        if ahead is None:
            return receive(timeout_seconds)
        monkeypatch.setattr("qfleet.distributed.worker.handle.time.monotonic", lambda: clock() + ahead)
        return None

    monkeypatch.setattr(handle, "receive", stopped_meanwhile)
    assert len(replay) == 0
    assert next(jumps, None) is None


@pytest.mark.chaos
def test_a_learner_stopped_in_the_middle_of_a_message_does_not_lose_the_replay(replay: RemoteReplay) -> None:
    """The replay waits for the rest of a message however long that takes."""
    assert len(replay) == 0
    rings = rings_of(replay)
    put = rings.put
    puts = []

    def slow_put(message: Any, arrays: Any) -> None:
        put(message, arrays)
        puts.append(message)
        if len(puts) == 3:
            time.sleep(6.0)  # longer than any limit of the replay's process

    rings.put = slow_put  # type: ignore[method-assign]
    replay.load_state_dict({**replay.state_dict(), "ballast": np.arange(1 << 18)})
    assert len(puts) > 3
    assert len(replay) == 0


def test_a_draw_from_an_empty_replay_returns_none(replay: RemoteReplay) -> None:
    replay.connection.draw(4)  # before any item
    replay.connection.draw(4)
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
    assert filled.connection.num_due == 1
    assert rings_of(filled).poll(20)
    assert len(rings_of(filled).receiving) == 1
    assert len(filled) > 0  # the batch came before this reply
    next_one = filled.connection.received[0]
    assert filled.sample(16) is next_one


def test_an_invalid_reply_to_a_read_is_a_loss(filled: RemoteReplay, monkeypatch: pytest.MonkeyPatch) -> None:
    serials = np.arange(filled.tail, filled.tail + 3)
    assert len(filled.read_batch(serials, np.ones(3, np.float32)).ids) == 3
    monkeypatch.setattr(filled.connection, "request", lambda *_: (BatchReply("steps"), {}))
    with pytest.raises(WorkerDied, match="it sent an invalid batch"):
        filled.read_batch(serials, np.ones(3, np.float32))
    assert isinstance(filled.connection.lost, WorkerDied)


def test_a_batch_that_does_not_fit_is_a_loss(filled: RemoteReplay) -> None:
    connection = filled.connection
    batch = filled.sample(16)
    assert batch is not None
    arrays = {name: array for name in batch.__slots__ if (array := getattr(batch, name)) is not None}
    assert connection.checked_batch(BatchReply("steps"), arrays).ids is batch.ids
    with pytest.raises(WorkerDied, match="it sent an invalid batch: action: expected"):
        connection.checked_batch(BatchReply("steps"), {**arrays, "action": batch.action + 100})
    connection.batch_limit_bytes = 100
    with pytest.raises(WorkerDied, match="expected 100 at most"):
        filled.sample(16)
    with pytest.raises(WorkerDied, match="expected 100 at most"):  # until the next start
        filled.flush()


def refuse(setup: Any, transport: Any) -> None:
    """A replay's process that the user's plan does not allow."""
    raise UsageError("too little memory", "Because.", "Buy some.")


def test_a_mistake_of_the_user_ends_the_run_only_at_the_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    process = "qfleet.distributed.replay.process.replay_main"
    monkeypatch.setattr(process, refuse)
    first = make_remote()
    with pytest.raises(UsageError, match="too little memory"):
        first.flush()
    first.close()
    monkeypatch.setattr(process, server.replay_main)
    later = make_remote()
    later.flush()
    monkeypatch.setattr(process, refuse)
    later.start()  # the lost one may still hold its memory
    with pytest.raises(WorkerFailed, match="too little memory"):
        later.flush()
    later.close()


def test_a_stopped_replay_is_lost(replay: RemoteReplay) -> None:
    replay.close()
    with pytest.raises(WorkerLost, match="it was stopped"):
        replay.flush()


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
