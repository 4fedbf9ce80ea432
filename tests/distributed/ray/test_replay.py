"""A replay on Ray: it returns the same as a local one, and its loss, silence or failure is reported."""

import os
import signal
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qfleet.build import memory_check
from qfleet.build.make import own_replay
from qfleet.build.memory_check import require_memory, stored_spec
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_train_world
from qfleet.data import Spec
from qfleet.distributed.replay.server import history_in
from qfleet.distributed.worker.messages import Stop
from qfleet.errors import UsageError
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.replay import NStepReturn, Replay
from qfleet.save import pack_state
from qfleet.system.worker_errors import WorkerDied, WorkerFailed, WorkerHung, WorkerLost
from tests.distributed.ray.test_driver import family, wait_for
from tests.replay.streams import random_stream, read_rows, restore_rows, rollout
from tests.support.runs import LSTM, SMALL, Settings

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
PLACE: Settings = {"runtime.type": "ray", "runtime.replay_process": True, "runtime.hung_seconds": 20}
PRIORITIZED: Settings = {"replay.sampler.type": "prioritized", "algo.n_step": 3}


@pytest.fixture(autouse=True)
def _ray_is_there() -> None:
    pytest.importorskip("ray")


def plan_of(**changes: Any) -> tuple[Plan, Spec]:
    plan = make_plan("CartPole-v1", overrides={**SMALL, **PLACE, **changes})
    spec = make_train_world(plan).spec
    plan = resolve(plan, spec)
    return plan, stored_spec(plan, spec)


def make(**changes: Any) -> Any:
    from qfleet.distributed.ray.replay import make_ray_replay

    plan, spec = plan_of(**changes)
    assert isinstance(plan.runtime, RayRuntime)
    return make_ray_replay(plan, spec, plan.runtime)


def fill(replays: list[Any], begin: int = 0, end: int = 96) -> None:
    """Add the same rollouts of two actors to each replay."""
    values = replays[0].template.actor_priority
    rows = random_stream(np.random.default_rng(1), replays[0].spec, 4, 200, 0.05, values=values)
    for at in range(begin, end, 8):
        for lanes in (slice(0, 2), slice(2, 4)):
            part = {name: column[:, lanes] for name, column in rows.items()}
            for replay in replays:
                replay.add(rollout(part, at, at + 8), None, lanes)


class Ahead:
    """Batches of a local replay, drawn as early as a remote one's are."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.drawn = replay, deque[Any]()

    def sample(self, size: int) -> dict[str, Any]:
        while len(self.drawn) < 2:
            self.drawn.append(arrays_of(self.replay.sample(size)))  # copies: the replay writes over its batches
        found: dict[str, Any] = self.drawn.popleft()
        return found


def arrays_of(batch: Any) -> dict[str, Any]:
    return {name: array.copy() for name in batch.__slots__ if (array := getattr(batch, name)) is not None}


def require_same(there: dict[str, Any], here: dict[str, Any]) -> None:
    assert there.keys() == here.keys()
    for name, array in here.items():
        assert there[name].dtype == array.dtype
        np.testing.assert_array_equal(there[name], array)


def require_same_batches(remote: Any, local: Replay, num: int = 5) -> None:
    ahead, rng = Ahead(local), np.random.default_rng(2)
    for _ in range(num):
        there, here = remote.sample(16), ahead.sample(16)
        require_same(arrays_of(there), here)
        priority = rng.random(16).astype(np.float32)
        remote.update(there.ids, priority)
        local.update(here["ids"], priority)
    # Both have drawn as often now.
    assert pack_state(remote.state_dict()) == pack_state(local.state_dict())


def require_same_memory(remote: Any, local: Replay) -> None:
    assert (remote.head, remote.tail, remote.items_added, len(remote)) == (
        local.head,
        local.tail,
        local.items_added,
        len(local),
    )
    assert (remote.capacity, remote.lanes, remote.spans()) == (local.capacity, local.lanes, local.spans())
    rules = ("rows", "lanes", "row_bytes", "spec")
    assert [getattr(remote.store, name) for name in rules] == [getattr(local.store, name) for name in rules]
    for (span, there), (same, here) in zip(read_rows(remote), read_rows(local), strict=True):
        assert span == same
        require_same(there, here)
    serials = np.arange(local.tail, local.head)[::7]
    weight = np.ones(len(serials), np.float32)
    require_same(arrays_of(remote.read_batch(serials, weight)), arrays_of(local.read_batch(serials, weight)))


# Without Ray: calls are handled at once, by a host in this process


class Call:
    """A call and its result."""

    def __init__(self, result: bytes, *, ready: bool = True) -> None:
        self.result, self.ready = result, ready
        self.taken, self.error = False, None


class FakeHost:
    """A worker's host whose methods are called at once, in this process; its `run` never returns."""

    def __init__(self, ray: "FakeRay", kind: type) -> None:
        self.ray, self.host = ray, kind()
        self.run = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: Call(b"", ready=False)))
        self.start = SimpleNamespace(remote=partial(self.call, self.host.start))
        self.handle = SimpleNamespace(remote=partial(self.call, self.host.handle))

    def call(self, method: Any, *arguments: Any) -> Call:
        self.ray.calls.append(Call(method(*arguments), ready=self.ray.ready))
        return self.ray.calls[-1]


class FakeRay:
    """Replaces the ray module, and the clock of the modules that wait for it."""

    def __init__(self) -> None:
        self.calls, self.ended, self.now = list[Call](), 0, 0.0
        self.hosts = list[FakeHost]()
        self.options: dict[str, Any] = {}
        self.ready = True  # are the results of new calls ready?

    def remote(self, **options: Any) -> Any:
        self.options.update(options)
        return lambda kind: SimpleNamespace(options=lambda **more: self.options.update(more) or self.started(kind))

    def started(self, kind: type) -> Any:
        assert kind.__name__ == "ReplayHost"
        self.hosts.append(FakeHost(self, kind))
        return SimpleNamespace(remote=lambda: self.hosts[-1])

    def wait(self, calls: list[Call], timeout: float, num_returns: int = 1) -> tuple[list[Call], list[Call]]:
        if calls[0].ready:
            return calls, []
        self.now += timeout
        return [], calls

    def get(self, call: Call, timeout: float) -> bytes:
        from ray.exceptions import GetTimeoutError

        assert timeout > 0
        call.taken = True
        if call.error is not None:
            raise call.error
        if not call.ready:
            raise GetTimeoutError
        return call.result

    def kill(self, host: Any, no_restart: bool) -> None:
        self.ended += 1

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    from qfleet.distributed.ray import worker
    from qfleet.distributed.worker import handle

    made = FakeRay()
    monkeypatch.setattr(worker, "ray", made)
    monkeypatch.setattr(worker, "time", made)
    monkeypatch.setattr(handle, "time", made)
    return made


def calls_of(replay: Any) -> list[Any]:
    """The calls whose result was not taken yet."""
    return list(replay.connection.handle.transport.calls)


def test_calls_under_way_are_limited_and_all_are_checked(fake: FakeRay) -> None:
    from qfleet.distributed.ray.worker import MAX_CALLS

    replay = make()
    replay.start()
    # With more than one at a time Ray would not keep the order of messages.
    assert (fake.options["max_concurrency"], fake.options["max_restarts"]) == (1, 0)
    assert (fake.options["num_cpus"], fake.options["scheduling_strategy"]) == (1.0, "SPREAD")
    fill([replay])
    assert [call.taken for call in fake.calls] == [True] * (len(fake.calls) - MAX_CALLS) + [False] * MAX_CALLS
    replay.flush()
    assert not calls_of(replay)


@pytest.mark.parametrize("waits_for", ["room", "a reply"])
def test_a_replay_that_does_not_reply_is_lost(fake: FakeRay, waits_for: str) -> None:
    replay = make(**{"runtime.hung_seconds": 3})
    replay.start()
    replay.flush()
    fake.ready, begun = False, fake.now
    wait = (lambda: fill([replay])) if waits_for == "room" else replay.flush
    with pytest.raises(WorkerHung, match="it did not answer for 3 s"):
        wait()
    assert 3 < fake.now - begun < 3.6
    assert fake.ended == 1


def test_the_first_reply_has_a_longer_timeout(fake: FakeRay) -> None:
    for use in (lambda replay: replay.flush(), lambda replay: fill([replay])):
        replay = make(**{"runtime.hung_seconds": 3})
        fake.ready = False
        replay.start()
        with pytest.raises(WorkerHung, match="did not answer for 120 s"):
            use(replay)


def test_a_failed_message_fails_everything_after_it(fake: FakeRay) -> None:
    replay = make()
    replay.start()
    fill([replay])
    replay.connection.send(Stop())  # not a message of a replay
    message = "ValueError: the message's table: Invalid value 'Stop'"
    with pytest.raises(WorkerFailed, match=message):
        replay.flush()
    with pytest.raises(WorkerFailed, match=message):
        fill([replay])
    with pytest.raises(WorkerFailed, match=message):
        replay.connection.draw(4)
    replay.start()
    assert len(replay) == 0


def test_a_failed_replay_has_no_more_effects(fake: FakeRay) -> None:
    replay = make()
    replay.start()
    fill([replay], end=8)
    before = fake.hosts[0].host.worker.replay.head
    replay.connection.send(Stop())
    fill([replay], 8, 16)
    assert fake.hosts[0].host.worker.replay.head == before
    with pytest.raises(WorkerFailed):
        replay.sample(4)


def test_an_error_of_ray_is_a_lost_replay(fake: FakeRay) -> None:
    from ray.exceptions import GetTimeoutError, RayActorError

    for error, kind, message in (
        (RayActorError(), WorkerDied, "its process on Ray is lost: "),
        (GetTimeoutError(), WorkerHung, "did not answer for 30 s"),
    ):
        replay = make()
        replay.start()
        fill([replay])
        calls_of(replay)[0].error = error
        with pytest.raises(kind, match=message):
            fill([replay], end=8 * 9)


def test_a_damaged_reply_is_a_lost_replay(fake: FakeRay) -> None:
    replay = make()
    replay.start()
    fill([replay])
    assert replay.sample(4) is not None
    calls_of(replay)[0].result = calls_of(replay)[0].result[:-16]
    with pytest.raises(WorkerDied, match="a message of"):
        replay.sample(4)


def test_a_stopped_replay_is_lost(fake: FakeRay) -> None:
    replay = make()
    with pytest.raises(WorkerDied, match="was stopped"):
        replay.flush()
    replay.start()
    replay.start()
    replay.close()
    replay.close()
    assert fake.ended == 2
    with pytest.raises(WorkerDied, match="was stopped"):
        fill([replay])


def test_a_draw_from_an_empty_replay_returns_none(fake: FakeRay) -> None:
    replay = make()
    replay.start()
    for _ in range(2):
        replay.connection.draw(4)  # before any item
    assert replay.sample(4) is None
    assert replay.sample(4) is None


def test_the_node_of_the_replay_must_have_the_memory(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, spec = plan_of(**{"runtime.address": "127.0.0.1:6379"})
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 1_000)
    require_memory(plan, spec)  # the node is not known yet
    with pytest.raises(UsageError, match="does not fit into memory"):
        require_memory(*plan_of())
    replay = make()
    replay.start()
    with pytest.raises(UsageError, match=r"replay\.capacity=150 does not fit into memory"):
        replay.flush()


def test_a_restart_without_enough_memory_yet_can_be_repeated(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = make()
    replay.start()
    replay.flush()
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 1_000)
    replay.start()  # the lost one may still hold its memory
    with pytest.raises(WorkerFailed, match="does not fit into memory"):
        replay.flush()


def test_a_message_that_ray_refuses_is_a_lost_replay(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayError

    def full(message: bytes) -> Call:
        raise RayError("the object store is full")

    replay = make()
    replay.start()
    replay.flush()
    fake.hosts[0].handle.remote = full
    with pytest.raises(WorkerDied, match="is lost: the object store is full"):
        replay.flush()


def test_a_history_is_kept_only_where_the_run_directory_exists(fake: FakeRay, tmp_path: Path) -> None:
    replay = make(**{"log.history": True})
    replay.start()
    replay.use_run_folder(tmp_path / "elsewhere")
    fill([replay])
    replay.flush()
    assert not list(tmp_path.iterdir())
    replay.use_run_folder(tmp_path)
    fill([replay], 96, 104)
    replay.flush()
    replay.start()
    fill([replay], 0, 8)
    replay.flush()
    assert len((tmp_path / "history" / "replay.jsonl").read_text().splitlines()) == 4
    history_in(None).note("replay", "stored")


VARIANTS: dict[str, Settings] = {
    "uniform": {},
    "prioritized": PRIORITIZED,
    "actor": {**PRIORITIZED, "replay.sampler.initial": "actor"},
    "filter": {"replay.filter.type": "duplicates"},
    "sequences": {**PRIORITIZED, **LSTM},
    "compressed": {**PRIORITIZED, "replay.compress": True, "runtime.compress": True},
}


def test_each_variant_returns_the_same_as_a_local_replay(fake: FakeRay) -> None:
    for changes in VARIANTS.values():
        check_variant(changes)


def check_variant(changes: Settings) -> None:
    """Compare a remote and a local replay over the same rollouts and draws, also after restoring a checkpoint."""
    remote, local = make(**changes), own_replay(*plan_of(**changes))
    remote.start()
    try:
        fill([remote, local])
        require_same_memory(remote, local)
        require_same_batches(remote, local)
        kept, state = read_rows(remote), remote.state_dict()
        assert remote.seal(slice(0, 2)) == local.seal(slice(0, 2))
        remote.n_step = local.n_step = NStepReturn(1, 0.5)
        assert remote.n_step == local.n_step
        fill([remote, local], 96, 136)
        fill([remote, local], 120, 136)  # duplicates, for the filter
        require_same_memory(remote, local)
        if remote.filter is not None and local.filter is not None:
            assert remote.filter.share == local.filter.share > 0
        assert (remote.store.compression_savings() is None) == (local.store.compression_savings() is None)
        remote.start()  # a new, empty process
        fresh = own_replay(*plan_of(**changes))
        for replay in (remote, fresh):
            restore_rows(replay, kept)
            replay.load_state_dict(state)
            replay.reseed(np.random.Generator(np.random.Philox(3)))
        require_same_memory(remote, fresh)
        require_same_batches(remote, fresh)
        for replay in (remote, fresh):
            replay.clear()
        assert len(remote) == len(fresh) == 0
        assert remote.sample(4) is None
    finally:
        remote.close()


# On Ray


@pytest.fixture(scope="module")
def on_ray() -> Iterator[None]:
    pytest.importorskip("ray")
    from qfleet.distributed.ray.session import session

    with session(plan_of()[0]):
        yield


def work(replay: Any) -> None:
    for _ in range(50):
        fill([replay])
        replay.sample(16)


def hosts() -> list[int]:
    return sorted(pid for pid, line in family(os.getpid()).items() if "ray::ReplayHost" in line)


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_replay_on_ray_returns_the_same_as_a_local_one(on_ray: None, changes: Settings) -> None:
    check_variant(changes)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("how", "message"),
    [(signal.SIGKILL, "is lost"), (signal.SIGSTOP, "did not answer for 2 s")],
    ids=["killed", "stopped"],
)
def test_a_replay_lost_on_ray_is_reported_and_restarted(on_ray: None, how: signal.Signals, message: str) -> None:
    replay = make(**{"runtime.hung_seconds": 2})
    try:
        replay.start()
        fill([replay])
        assert len(replay) > 0
        [victim] = wait_for(hosts, 10)
        os.kill(victim, how)
        with pytest.raises(WorkerLost, match=message):
            work(replay)
        replay.start()
        assert len(replay) == 0
        fill([replay])
        assert replay.sample(16) is not None
    finally:
        replay.close()
    wait_for(lambda: not hosts())
