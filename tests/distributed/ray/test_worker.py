"""A worker's host on Ray, without a cluster: what it returns when its worker fails."""

from typing import Any

import msgspec
import pytest

from qfleet.data.wire_format import Arrays, Message, Parts, to_bytes, unpack
from qfleet.distributed.worker.messages import Failed, Ready
from qfleet.errors import UsageError
from qfleet.system.worker_errors import FinalError

ray_worker = pytest.importorskip("qfleet.distributed.ray.worker")


@pytest.fixture(autouse=True)
def _named_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.distributed.ray.nodes.this_node", lambda: "n1")


class Ask(Message):
    """A request."""


class FailingWorker:
    """A worker that fails in one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def handle(self, message: Ask, arrays: Arrays) -> Parts:
        self.fail("handle")
        return Ready(), {}

    def work_when_idle(self) -> bool:
        self.fail("work_when_idle")
        return False

    def close(self) -> None: ...

    def fail(self, method: str) -> None:
        if method == self.method:
            raise UsageError("wrong", "because", "do this")


def started(make_worker: Any, setup: Any) -> tuple[Any, Any]:
    host = ray_worker.WorkerHost()
    reply, _ = unpack(
        host.start(make_worker, setup, Ask, (), False, ray_worker.versions_here("")),
        Ready | Failed,
        limit_bytes=1 << 16,
    )
    return host, reply


def test_an_error_while_idle_is_reported_and_every_request_after_it_fails() -> None:
    host, reply = started(FailingWorker, "work_when_idle")
    assert reply == Ready()
    report = msgspec.msgpack.decode(host.run(), type=FinalError)
    assert (report.what, report.exit_code) == ("on node n1: wrong", UsageError.exit_code)
    failed, _ = unpack(host.handle(to_bytes(Ask())), Ready | Failed, limit_bytes=1 << 16)
    assert failed.report == report


def test_an_error_in_a_request_is_its_reply_from_then_on() -> None:
    host, _ = started(FailingWorker, "handle")
    replies = [unpack(host.handle(to_bytes(Ask())), Ready | Failed, limit_bytes=1 << 16)[0] for _ in range(2)]
    assert [reply.report.what for reply in replies] == ["on node n1: wrong", "on node n1: wrong"]


def test_an_error_of_the_start_is_its_reply() -> None:
    def broken(setup: Any) -> Any:
        raise ValueError("cannot start")

    _, reply = started(broken, None)
    assert reply.report.what == "on node n1: ValueError: cannot start"


class FakeRay:
    """Calls that end when a test says so; counts how often Ray is asked."""

    def __init__(self) -> None:
        self.ended = set[str]()
        self.asked = 0

    def wait(self, calls: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        self.asked += 1
        assert (num_returns, timeout) == (len(calls), 0)
        return [call for call in calls if call in self.ended], [call for call in calls if call not in self.ended]

    def kill(self, host: Any, no_restart: bool) -> None:
        self.ended.add(host)


def test_ray_is_asked_once_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setattr(ray_worker, "ray", fake)
    monkeypatch.setattr(ray_worker.time, "monotonic", lambda: 100.0)
    watch = ray_worker.ResultWatch()
    workers = [ray_worker.RayWorker(f"host {i}", f"call {i}", watch) for i in range(500)]
    fake.ended.add("call 7")
    alive = [worker.is_alive() for worker in workers]
    assert fake.asked == 1
    assert [number for number, each in enumerate(alive) if not each] == [7]
    workers[8].stop()
    assert not workers[8].is_alive()
    monkeypatch.setattr(ray_worker.time, "monotonic", lambda: 101.0)
    fake.ended.add("call 9")
    assert [number for number, worker in enumerate(workers) if not worker.is_alive()] == [7, 8, 9]
    assert fake.asked == 2


def test_a_worker_is_pending_until_ray_has_found_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["PENDING_CREATION", "DEPENDENCIES_UNREADY", "ALIVE"])
    monkeypatch.setattr(ray_worker, "actor_record", lambda host: {"State": next(states)})
    now = [100.0]
    monkeypatch.setattr(ray_worker.time, "monotonic", lambda: now[0])
    worker = ray_worker.RayWorker("host", "call")
    found = []
    for _ in range(12):
        found.append(worker.is_pending())
        now[0] += 0.5  # Ray is asked every second
    assert found == [True] * 4 + [False] * 8
