"""Messages through rings, announced or not: large ones come in pieces, and only whole ones are accepted."""

import os
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest

from qfleet.data import Array
from qfleet.data.wire_format import Message, to_bytes
from qfleet.distributed.worker import transport as transport_module
from qfleet.distributed.worker.local import call_main
from qfleet.distributed.worker.messages import Ready, Stop
from qfleet.distributed.worker.serve import serve
from qfleet.distributed.worker.transport import Piece, RingTransport
from qfleet.system.ring import Ring

SLOT_BYTES = 1_000
CLOCK = "qfleet.distributed.worker.transport.time.monotonic"
Ends = tuple[RingTransport, RingTransport]


class Note(Message):
    """A message of these tests."""

    n: int = 0


def make_ends(*, announced: bool, slots: int = 4) -> Ends:
    kind = Note | Ready | Stop | Piece
    there, back = (Ring(kind, slots, SLOT_BYTES) for _ in range(2))
    bells: tuple[Any, Any] = Pipe() if announced else (None, None)
    return RingTransport(there, back, bells[0]), RingTransport(back, there, bells[1])


@pytest.fixture(params=[False, True], ids=["polled", "announced"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = make_ends(announced=request.param, slots=6)
    yield made
    for end in made:
        end.close()


def numbers(size: int) -> dict[str, Array]:
    return {"a": np.arange(size, dtype=np.int64)}


def require_equal(parts: Any, n: int, size: int) -> None:
    assert parts is not None
    assert parts[0] == Note(n)
    assert np.array_equal(parts[1]["a"], np.arange(size))


def test_messages_arrive_in_order_both_ways(ends: Ends) -> None:
    one, other = ends
    assert one.receive(0.0) is None
    for n in range(3):
        one.send(Note(n), numbers(n))
        other.send(Note(10 + n), numbers(5))
    for n in range(3):
        assert other.poll(0.0)
        require_equal(other.receive(0.0), n, n)
        require_equal(one.receive(0.0), 10 + n, 5)
    assert not other.poll(0.0)
    assert other.receive(0.01) is None


@pytest.mark.parametrize("size", [120, 300])
def test_a_message_larger_than_a_slot_comes_in_pieces(ends: Ends, size: int) -> None:
    one, other = ends
    one.send(Note(1), numbers(size))
    one.send(Note(2), numbers(3))
    assert len(one.sending) > 2
    require_equal(other.receive(0.0), 1, size)
    require_equal(other.receive(0.0), 2, 3)
    assert other.receive(0.0) is None


def test_a_message_larger_than_the_whole_ring_waits_for_its_reader(ends: Ends) -> None:
    one, other = ends
    received: list[Array] = []

    def read_one(waited_seconds: float) -> None:
        received.append(transport_module.piece_bytes(other.next_part()))

    one.on_full = read_one
    one.send(Note(7), numbers(5_000))
    while len(other.receiving):
        read_one(0.0)
    assert b"".join(part.tobytes() for part in received) == to_bytes(Note(7), numbers(5_000))


def test_a_full_ring_is_an_error_unless_somebody_waits(ends: Ends) -> None:
    one, other = ends
    for n in range(6):
        one.send(Note(n))
    with pytest.raises(BlockingIOError, match="still unread"):
        one.send(Note(6))
    waited: list[float] = []

    def make_room(waited_seconds: float) -> None:
        waited.append(waited_seconds)
        if len(waited) == 3:
            other.receive(0.0)

    one.on_full = make_room
    one.send(Note(6))
    assert len(waited) == 3
    assert waited == sorted(waited)


def test_waiting_for_room_begins_again_with_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that reads along is not slow, however long the message is."""
    one, other = make_ends(announced=False)
    waits: list[float] = []
    seconds = iter(range(10_000))
    monkeypatch.setattr(CLOCK, lambda: next(seconds))

    def read_after_a_second(waited_seconds: float) -> None:
        waits.append(waited_seconds)
        other.receiving.get()

    one.on_full = read_after_a_second
    one.send(Note(7), numbers(5_000))
    assert len(waits) > 30
    assert max(waits) == 1.0


@pytest.mark.parametrize("late", ["message", "piece"])
def test_a_message_that_is_announced_but_does_not_arrive_is_an_error(
    monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    monkeypatch.setattr(transport_module, "PIECE_SECONDS", 0.05)
    one, other = make_ends(announced=True)
    if late == "piece":
        one.put(Piece(more=True), {"bytes": np.zeros(3, np.uint8)})
    one.ring_bell()
    with pytest.raises(TimeoutError, match="did not arrive"):
        other.receive(1.0)


def test_an_observer_that_was_stopped_itself_waits_for_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_ends(announced=False)
    one.put(Piece(more=True), {"bytes": np.zeros(3, np.uint8)})
    flat = np.frombuffer(to_bytes(Note(3), numbers(3)), np.uint8)
    ticks = iter([0.0, 0.0, 3600.0, 3600.1])
    monkeypatch.setattr(CLOCK, lambda: next(ticks, 3600.2))
    waits: list[float] = []

    def come_late(waited_seconds: float) -> None:
        waits.append(waited_seconds)
        transport_module.wait_for_piece(waited_seconds)
        if len(waits) == 3:
            one.put(Piece(more=False), {"bytes": flat})

    other.on_missing = come_late
    with pytest.raises(ValueError, match="not the message expected"):  # three zeros are not the start of a message
        other.receive(0.0)
    assert max(waits) < transport_module.PIECE_SECONDS


MALFORMED: dict[str, tuple[Message, dict[str, Any], str]] = {
    "a message between pieces": (Note(1), {}, "a Note where a piece"),
    "a piece without bytes": (Piece(more=False), {}, "a Piece where a piece"),
    "numbers instead of bytes": (Piece(more=False), {"bytes": np.zeros(3)}, "a Piece where a piece"),
    "half a message": (Piece(more=False), {"bytes": np.zeros(3, np.uint8)}, "too few"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pieces_are_refused(name: str) -> None:
    message, arrays, match = MALFORMED[name]
    one, other = make_ends(announced=False)
    one.put(Piece(more=True), {"bytes": np.zeros(8, np.uint8)})
    one.put(message, arrays)
    with pytest.raises(ValueError, match=match):
        other.receive(0.0)


def test_a_message_in_pieces_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "MAX_MESSAGE_BYTES", 1_500)
    one, other = make_ends(announced=False)
    one.send(Note(1), numbers(300))
    with pytest.raises(ValueError, match="more than 1500 bytes"):
        other.receive(0.0)


def test_a_closed_pipe_is_a_broken_connection() -> None:
    one, other = make_ends(announced=True)
    assert one.bell is not None
    one.bell.close()
    assert other.poll(0.0)
    with pytest.raises(ConnectionError, match="closed"):
        other.receive(0.0)
    with pytest.raises(OSError, match="Broken pipe"):
        other.send(Note(1))


# The worker's end


class Doubler:
    """Replies to even numbers with their double; works five times when idle."""

    def __init__(self) -> None:
        self.handled: list[int] = []
        self.idle = 0
        self.closed = False

    def handle(self, message: Any, arrays: Any) -> Any:
        self.handled.append(message.n)
        return (Note(2 * message.n), arrays) if message.n % 2 == 0 else None

    def work_when_idle(self) -> bool:
        self.idle += 1
        return self.idle < 5

    def close(self) -> None:
        self.closed = True


def test_serving_replies_to_each_request_until_it_is_told_to_stop(ends: Ends) -> None:
    parent, child = ends
    for n in (1, 2):
        parent.send(Note(n), numbers(3))
    parent.send(Stop())
    worker = Doubler()
    serve(worker, child)
    assert worker.handled == [1, 2]
    assert worker.closed
    assert parent.receive(0.0) == (Ready(), {})
    require_equal(parent.receive(0.0), 4, 3)
    assert parent.receive(0.0) is None


def test_idle_work_is_done_between_messages(monkeypatch: pytest.MonkeyPatch, ends: Ends) -> None:
    parent, child = ends
    worker = Doubler()
    receive = child.receive
    waits: list[float] = []

    def stop_when_nothing_is_left(timeout_seconds: float) -> Any:
        waits.append(timeout_seconds)
        if timeout_seconds and len(waits) > 1:
            parent.send(Stop())
        return receive(min(timeout_seconds, 0.05))

    monkeypatch.setattr(child, "receive", stop_when_nothing_is_left)
    serve(worker, child)
    assert worker.idle == 5
    assert waits == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_a_worker_waits_for_its_parent_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    _, child = make_ends(announced=False)

    def main(setup: Any, transport: RingTransport) -> None:
        transport.on_full(3600.0)
        transport.on_missing(3600.0)
        parent = os.getppid()
        monkeypatch.setattr(os, "getppid", lambda: parent + 1)
        begun = time.monotonic()
        for wait in (transport.on_full, transport.on_missing):
            with pytest.raises(BrokenPipeError, match="the parent process has ended"):
                wait(0.0)
        assert time.monotonic() - begun < 5

    call_main((main, None, child))
