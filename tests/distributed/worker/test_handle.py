"""A worker as its parent sees it: every loss has its kind and its cause."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from qfleet.data.wire_format import Message, Parts
from qfleet.distributed.worker import handle as handle_module
from qfleet.distributed.worker.handle import WorkerHandle, await_ready
from qfleet.distributed.worker.local import LocalWorker, RingSizes, launch_local
from qfleet.distributed.worker.messages import Failed, PeerLost, Ready, Stop
from qfleet.distributed.worker.serve import serve
from qfleet.distributed.worker.transport import RingTransport
from qfleet.errors import UsageError
from qfleet.sync.comm import CommLost
from qfleet.system.child_process import fork_server
from qfleet.system.worker_errors import (
    FinalError,
    WorkerDied,
    WorkerFailed,
    WorkerHung,
    WorkerLost,
    raise_usage_error,
)

pytestmark = pytest.mark.timeout(110)
SECONDS = 20.0


class Ask(Message):
    """A request that is answered with the same content."""

    n: int = 0


class Tell(Message):
    """A message without a reply."""

    n: int = 0


class Answer(Message):
    """The reply."""

    n: int = 0


class Unknown(Message):
    """A message that the worker does not know."""


# With a fake process and a fake connection


class FakeTransport:
    """Messages that a test puts there; an exception is raised."""

    def __init__(self, *messages: Any) -> None:
        self.messages: deque[Any] = deque(messages)
        self.sent: list[Message] = []
        self.closed = False

    def send(self, message: Message, arrays: Any = None) -> None:
        self.sent.append(message)

    def receive(self, timeout_seconds: float) -> Parts | None:
        if not self.messages:
            return None
        message = self.messages.popleft()
        if isinstance(message, Exception):
            raise message
        return None if message is None else (message, {})

    def poll(self, timeout_seconds: float) -> bool:
        return bool(self.messages)

    def close(self) -> None:
        self.closed = True


class FakeControl:
    """A process that a test ends."""

    def __init__(self, loss: WorkerLost | None = None) -> None:
        self.found = loss or WorkerHung("its process runs, but does not answer")
        self.alive = True
        self.stopped = False

    def is_alive(self) -> bool:
        return self.alive

    def is_pending(self) -> bool:
        return False

    def why_lost(self) -> WorkerLost:
        return self.found

    def request_stop(self) -> None:
        """Not used."""

    def stop(self) -> None:
        self.stopped = True


class FakeClock:
    """A clock that goes on by `step` seconds at each look."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


def fake_handle(*messages: Any, loss: WorkerLost | None = None) -> tuple[WorkerHandle, FakeTransport, FakeControl]:
    transport, control = FakeTransport(*messages), FakeControl(loss)
    return WorkerHandle(3, transport, control, start_seconds=30.0), transport, control


def test_a_request_has_one_reply_of_its_kind() -> None:
    handle, transport, control = fake_handle(Ready(), Answer(1), None, Answer(2))
    assert handle.request(Ask(1), Answer, 5.0)[0] == Answer(1)
    assert handle.ready
    handle.send(Tell(5))
    handle.ask(Ask(2))
    assert handle.num_outstanding == 1
    assert handle.reply(Answer | PeerLost, 5.0)[0] == Answer(2)
    assert handle.num_outstanding == 0
    assert transport.sent == [Ask(1), Tell(5), Ask(2)]
    handle.stop()
    assert (transport.closed, control.stopped) == (True, True)


def test_outstanding_replies_are_drained() -> None:
    handle, _, _ = fake_handle(Ready(), Answer(1), Answer(2), Answer(3))
    for n in range(3):
        handle.ask(Ask(n))
    assert [parts[0].n for parts in handle.drain(5.0)] == [1, 2, 3]
    assert list(handle.drain(5.0)) == []


def test_a_reply_of_another_kind_is_a_loss() -> None:
    handle, _, _ = fake_handle(Ready(), Answer(1))
    with pytest.raises(WorkerDied, match="its reply is a Answer"):
        handle.request(Ask(1), Ready, 5.0)


def test_a_lost_peer_is_reported_as_such() -> None:
    handle, _, _ = fake_handle(Ready(), PeerLost("rank 2 is gone"))
    with pytest.raises(CommLost, match="rank 2 is gone"):
        handle.request(Ask(1), Answer, 5.0)


def test_a_failure_has_the_cause_that_was_reported() -> None:
    report = FinalError("no room", "Because.", "Buy some.", UsageError.exit_code)
    handle, _, _ = fake_handle(Ready(), Failed(report))
    with pytest.raises(WorkerFailed, match="no room") as failed:
        handle.request(Ask(1), Answer, 5.0)
    with pytest.raises(UsageError, match="no room"):
        raise_usage_error(failed.value.report)
    raise_usage_error(FinalError("a defect"))
    with pytest.raises(WorkerLost):
        handle.check()


BROKEN: dict[str, tuple[Exception, WorkerLost | None, type[WorkerLost], str]] = {
    "it runs": (ConnectionError("closed"), None, WorkerDied, "^closed$"),
    "it ended": (
        ConnectionError("closed"),
        WorkerDied("its process was ended by SIGKILL"),
        WorkerDied,
        "^closed; its process was ended by SIGKILL$",
    ),
    "it reported": (ConnectionError("closed"), WorkerFailed(FinalError("KeyError: 1")), WorkerFailed, "^KeyError: 1$"),
    "a malformed message": (ValueError("the message's table: no"), None, WorkerDied, "table: no"),
    "half a message": (TimeoutError("the rest has not come"), None, WorkerHung, "the rest has not come"),
    "half a message, and it ended": (TimeoutError("the rest"), WorkerDied("exit code 3"), WorkerDied, "exit code 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_connection_is_a_loss_with_its_cause(name: str) -> None:
    error, loss, kind, match = BROKEN[name]
    handle, _, _ = fake_handle(Ready(), error, loss=loss)
    with pytest.raises(WorkerLost, match=match) as lost:
        handle.request(Ask(1), Answer, 5.0)
    assert type(lost.value) is kind
    with pytest.raises(WorkerLost, match=match):
        handle.check()


def test_a_worker_that_ends_without_a_reply_is_lost() -> None:
    handle, _, control = fake_handle(Ready(), loss=WorkerDied("its process ended with exit code 3"))
    handle.check()
    control.alive = False
    with pytest.raises(WorkerDied, match="exit code 3"):
        handle.request(Ask(1), Answer, 5.0)
    with pytest.raises(WorkerDied, match="exit code 3"):
        handle.check()


def test_a_worker_that_does_not_start_or_reply_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_module, "time", FakeClock(0.5))
    handle, transport, _ = fake_handle()
    with pytest.raises(WorkerHung, match="it did not start: it did not answer for 30 s"):
        handle.request(Ask(1), Answer, 5.0)
    transport.messages.append(Ready())
    with pytest.raises(WorkerHung, match="it does not reply: it did not answer for 5 s"):
        handle.reply(Answer, 5.0)


def test_the_time_to_start_is_not_counted_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_module, "time", FakeClock(1.0))
    handle, _, _ = fake_handle(*[None] * 20, Ready(), None, Answer(1))
    assert handle.request(Ask(1), Answer, 5.0)[0] == Answer(1)


def test_an_observer_that_was_stopped_itself_finds_no_worker_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(0.0)
    monkeypatch.setattr(handle_module, "time", clock)
    handle, transport, _ = fake_handle(Ready(), None, None, Answer(1))
    handle.check()
    receive = transport.receive

    def stopped_meanwhile(timeout_seconds: float) -> Parts | None:
        clock.now += 3600.0
        return receive(timeout_seconds)

    monkeypatch.setattr(transport, "receive", stopped_meanwhile)
    assert handle.request(Ask(1), Answer, 5.0)[0] == Answer(1)


# With a real process


class Echo:
    """What the process of these tests serves."""

    def handle(self, message: Message, arrays: Any) -> Parts | None:
        match message:
            case Ask(n):
                return Answer(n), arrays
            case Tell(-1):
                raise KeyError("nonsense")
            case Tell(-2):
                os._exit(3)
            case Tell(-3):
                raise UsageError("no room", "Because.", "Buy some.")
            case _:
                return None

    def work_when_idle(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to free."""


def echo_main(setup: Any, transport: RingTransport) -> None:
    serve(Echo(), transport)


def never_ready_main(setup: Any, transport: RingTransport) -> None:
    time.sleep(60)


def garbled_main(setup: Any, transport: RingTransport) -> None:
    transport.send(Ready())
    transport.send(Unknown())
    time.sleep(60)


def closing_main(setup: Any, transport: RingTransport) -> None:
    transport.send(Ready())
    assert transport.bell is not None
    transport.bell.close()
    time.sleep(0.1)
    os._exit(5)


def half_main(setup: Any, transport: RingTransport) -> None:
    transport.send(Ready())
    transport.on_full = lambda waited_seconds: os._exit(6)
    transport.send(Answer(1), {"a": np.zeros(1 << 20)})


Launch = Callable[..., WorkerHandle]


@pytest.fixture
def launch() -> Iterator[Launch]:
    made: list[WorkerHandle] = []

    def start(main: Any = echo_main, *, announced: bool = True, **options: Any) -> WorkerHandle:
        sizes = RingSizes(Ask | Tell | Stop, Answer, 100, 100, announced=announced)
        limits = {"start_seconds": SECONDS, "room_seconds": SECONDS, **options}
        made.append(launch_local(fork_server(), "echo", main, None, sizes, **limits))
        return made[-1]

    yield start
    for handle in made:
        handle.stop()


def process_of(handle: WorkerHandle) -> LocalWorker:
    assert isinstance(handle.control, LocalWorker)
    return handle.control


@pytest.mark.parametrize("announced", [False, True])
def test_a_process_replies_to_small_and_large_requests(launch: Launch, announced: bool) -> None:
    handle = launch(announced=announced)
    for size in (0, 10, 100_000):  # the last one is far larger than both rings
        content = np.arange(size)
        message, arrays = handle.request(Ask(size), Answer, SECONDS, {"a": content})
        assert message == Answer(size)
        assert np.array_equal(arrays["a"], content)
    handle.check()


@pytest.mark.parametrize("announced", [False, True])
def test_messages_wait_for_room_while_the_process_starts(launch: Launch, announced: bool) -> None:
    handle = launch(announced=announced, room_seconds=0.001)
    for n in range(20):
        handle.send(Tell(n))
    assert handle.request(Ask(1), Answer, SECONDS)[0] == Answer(1)


@pytest.mark.chaos
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_process_that_is_stopped_is_hung(launch: Launch, announced: bool, size: int) -> None:
    """It does not reply, or does not read the rest of a message."""
    handle = launch(announced=announced, room_seconds=0.5)
    await_ready([handle])
    os.kill(process_of(handle).process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerHung, match=r"it did not answer for 0\.5 s"):
        handle.request(Ask(1), Answer, 0.5, {"a": np.zeros(size, np.uint8)})


@pytest.mark.chaos
def test_a_process_killed_while_a_message_waits_for_room_is_lost_with_its_cause(launch: Launch) -> None:
    handle = launch(announced=False)
    await_ready([handle])
    os.kill(process_of(handle).process.pid, signal.SIGSTOP)
    on_full = handle.on_full
    waits: list[float] = []

    def kill_then_wait(waited_seconds: float) -> None:
        waits.append(waited_seconds)
        if len(waits) == 3:
            os.kill(process_of(handle).process.pid, signal.SIGKILL)
        on_full(waited_seconds)

    assert isinstance(handle.transport, RingTransport)
    handle.transport.on_full = kill_then_wait
    with pytest.raises(WorkerDied, match="its process was ended by SIGKILL"):
        handle.send(Tell(1), {"a": np.zeros(1 << 20)})
    assert len(waits) >= 3


@pytest.mark.parametrize("announced", [False, True])
def test_a_process_that_fails_reports_its_cause(launch: Launch, announced: bool) -> None:
    handle = launch(announced=announced)
    handle.send(Tell(-1))
    with pytest.raises(WorkerFailed, match="KeyError: 'nonsense'"):
        handle.request(Ask(1), Answer, SECONDS)
    other = launch(announced=announced)
    other.send(Tell(-3))
    with pytest.raises(WorkerFailed, match="no room") as failed:
        other.request(Ask(1), Answer, SECONDS)
    with pytest.raises(UsageError, match="no room"):
        raise_usage_error(failed.value.report)


@pytest.mark.parametrize("announced", [False, True])
def test_a_process_that_ends_is_lost_with_its_exit_code(launch: Launch, announced: bool) -> None:
    handle = launch(announced=announced)
    handle.send(Tell(-2))
    with pytest.raises(WorkerDied, match="its process ended with exit code 3"):
        handle.request(Ask(1), Answer, SECONDS)


def test_a_message_that_the_process_does_not_know_is_its_failure(launch: Launch) -> None:
    handle = launch()
    handle.send(Unknown())
    with pytest.raises(WorkerFailed, match="ValueError: the message's table: Invalid value 'Unknown'"):
        handle.request(Ask(1), Answer, SECONDS)


def test_a_malformed_reply_is_a_loss(launch: Launch) -> None:
    handle = launch(garbled_main)
    with pytest.raises(WorkerDied, match="Invalid value 'Unknown'"):
        handle.request(Ask(1), Answer, SECONDS)
    with pytest.raises(WorkerDied, match="Invalid value 'Unknown'"):
        handle.check()


def test_a_connection_broken_before_the_process_has_ended_is_a_loss_that_says_how_it_ended(launch: Launch) -> None:
    handle = launch(closing_main)
    await_ready([handle])
    with pytest.raises(WorkerDied, match=r"the connection is closed; its process ended with exit code 5"):
        handle.next_reply(SECONDS)


@pytest.mark.parametrize("announced", [False, True])
def test_half_a_reply_is_a_loss_that_says_how_the_process_ended(launch: Launch, announced: bool) -> None:
    handle = launch(half_main, announced=announced)
    with pytest.raises(WorkerDied, match="exit code 6"):
        handle.request(Ask(1), Answer, SECONDS)


def test_a_process_that_does_not_start_in_time_is_hung(launch: Launch) -> None:
    handle = launch(never_ready_main, start_seconds=0.3)
    handle.check()
    with pytest.raises(WorkerHung, match=r"it did not start: it did not answer for 0\.3 s"):
        handle.request(Ask(1), Answer, SECONDS)


def test_stop_ends_a_process_and_keeps_what_it_reported(launch: Launch) -> None:
    handle = launch()
    await_ready([handle])
    process = process_of(handle)
    assert process.is_alive()
    process.request_stop()
    process.process.process.join(SECONDS)
    assert not process.is_alive()
    with pytest.raises(WorkerDied, match="was ended by SIGTERM"):
        handle.check()
