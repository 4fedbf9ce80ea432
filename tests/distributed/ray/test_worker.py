"""A worker's host on Ray, without a cluster: what it returns when its worker fails."""

from typing import Any

import msgspec
import pytest

from qfleet.data.wire_format import Arrays, Message, Parts, to_bytes, unpack
from qfleet.distributed.worker.messages import Failed, Ready
from qfleet.errors import UsageError
from qfleet.system.worker_errors import FinalError

ray_worker = pytest.importorskip("qfleet.distributed.ray.worker")


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
    reply, _ = unpack(host.start(make_worker, setup, Ask, (), False), Ready | Failed, limit_bytes=1 << 16)
    return host, reply


def test_an_error_while_idle_is_reported_and_every_request_after_it_fails() -> None:
    host, reply = started(FailingWorker, "work_when_idle")
    assert reply == Ready()
    report = msgspec.msgpack.decode(host.run(), type=FinalError)
    assert (report.what, report.exit_code) == ("wrong", UsageError.exit_code)
    failed, _ = unpack(host.handle(to_bytes(Ask())), Ready | Failed, limit_bytes=1 << 16)
    assert failed.report == report


def test_an_error_in_a_request_is_its_reply_from_then_on() -> None:
    host, _ = started(FailingWorker, "handle")
    replies = [unpack(host.handle(to_bytes(Ask())), Ready | Failed, limit_bytes=1 << 16)[0] for _ in range(2)]
    assert [reply.report.what for reply in replies] == ["wrong", "wrong"]


def test_an_error_of_the_start_is_its_reply() -> None:
    def broken(setup: Any) -> Any:
        raise ValueError("cannot start")

    _, reply = started(broken, None)
    assert reply.report.what == "ValueError: cannot start"
