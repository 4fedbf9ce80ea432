"""How messages travel between a worker and its parent, and what the parent knows of the worker's process.

Both ends of a transport have the same methods. A connection that is broken, or a message that does not arrive whole,
is an OSError.
"""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Protocol

import numpy as np

from qfleet.data import Array
from qfleet.data.wire_format import HEADER_BYTES, Arrays, Message, MessageTooLarge, Parts, to_bytes, unpack
from qfleet.system.ring import Ring
from qfleet.system.silence import SilenceTimer
from qfleet.system.worker_errors import WorkerLost

SLEEP_SECONDS = 0.0002
PIECE_SECONDS = 5.0  # for a message that was announced, and for each further piece of it, to arrive
PIECE_TABLE_BYTES = HEADER_BYTES + 256
MAX_MESSAGE_BYTES = 1 << 32
BELL = b"!"


class Transport(Protocol):
    """One end of the connection between a worker and its parent."""

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message."""

    def receive(self, timeout_seconds: float) -> Parts | None:
        """The next message and its arrays; None if none came in time."""

    def poll(self, timeout_seconds: float) -> bool:
        """Is a message waiting, or the connection broken?"""

    def close(self) -> None:
        """Free the connection."""


class WorkerControl(Protocol):
    """A worker's process, wherever it runs."""

    def is_alive(self) -> bool:
        """Is it running?"""

    def is_pending(self) -> bool:
        """Does it still wait for a place to run? Then its silence is no fault."""

    def why_lost(self) -> WorkerLost:
        """Why the process has ended: what it reported, or how it ended; WorkerHung if it still runs."""

    def request_stop(self) -> None:
        """Ask it to end, without waiting."""

    def stop(self) -> None:
        """End it, by force if need be, and free what belongs to it."""


class Piece(Message):
    """A part of a message that is larger than a slot of the ring."""

    more: bool  # do further pieces follow?


def no_room(waited_seconds: float) -> None:
    """The receiver has not read earlier messages, though it must have by the rules of its role."""
    raise BlockingIOError("earlier messages are still unread")


def wait_for_piece(waited_seconds: float) -> None:
    """Wait a moment for the rest of a message."""
    if waited_seconds > PIECE_SECONDS:
        raise TimeoutError("a message was announced but did not arrive")
    time.sleep(SLEEP_SECONDS)


class RingTransport:
    """Messages in two rings of shared memory; a byte in a pipe announces each, unless the receiver polls its ring."""

    def __init__(self, sending: Ring, receiving: Ring, bell: Connection | None = None) -> None:
        self.sending = sending
        self.receiving = receiving
        self.bell = bell
        # Called while the ring is full, or the rest of a message is missing, with the seconds so far; raise to give up.
        self.on_full: Callable[[float], None] = no_room
        self.on_missing: Callable[[float], None] = wait_for_piece

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message, in pieces if it is larger than a slot."""
        arrays = arrays or {}
        try:
            self.put(message, arrays)
            self.ring_bell()
        except MessageTooLarge:
            self.send_pieces(np.frombuffer(to_bytes(message, arrays), np.uint8))

    def send_pieces(self, flat: Array) -> None:  # [bytes] uint8
        """Send a message in pieces that fit into slots; the first is announced."""
        size = self.sending.slot_bytes - PIECE_TABLE_BYTES
        for begin in range(0, len(flat), size):
            self.put(Piece(begin + size < len(flat)), {"bytes": flat[begin : begin + size]})
            if begin == 0:
                self.ring_bell()

    def put(self, message: Message, arrays: Arrays) -> None:
        """Put a message into the ring, as soon as there is room."""
        if self.sending.put(message, arrays):
            return
        waiting = SilenceTimer(time.monotonic())
        while not self.sending.put(message, arrays):
            self.on_full(waiting.elapsed(time.monotonic()))

    def ring_bell(self) -> None:
        """Announce a message."""
        if self.bell is not None:
            self.bell.send_bytes(BELL)

    def receive(self, timeout_seconds: float) -> Parts | None:
        """The next message, put together from its pieces."""
        if not self.poll(timeout_seconds):
            return None
        if self.bell is not None:
            try:
                self.bell.recv_bytes(len(BELL))
            except EOFError as error:
                raise ConnectionError("the connection is closed") from error
        parts = self.next_part()
        return self.join_pieces(parts) if isinstance(parts[0], Piece) else parts

    def join_pieces(self, parts: Parts) -> Parts:
        """Receive the other pieces of the message that begins with this one."""
        pieces = [piece_bytes(parts)]
        num_bytes = len(pieces[0])
        while parts[0].more:
            parts = self.next_part()
            pieces.append(piece_bytes(parts))
            num_bytes += len(pieces[-1])
            if num_bytes > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        return unpack(np.concatenate(pieces).data, self.receiving.kind, limit_bytes=MAX_MESSAGE_BYTES)

    def next_part(self) -> Parts:
        """The next message or piece in the ring, which was announced or follows another."""
        if (parts := self.receiving.get()) is not None:
            return parts
        waiting = SilenceTimer(time.monotonic())
        while (parts := self.receiving.get()) is None:
            self.on_missing(waiting.elapsed(time.monotonic()))
        return parts

    def poll(self, timeout_seconds: float) -> bool:
        """Is a message waiting, or the connection broken?"""
        if self.bell is not None:
            try:
                return self.bell.poll(timeout_seconds)
            except OSError:
                return True
        until = time.monotonic() + timeout_seconds
        while not len(self.receiving):
            if time.monotonic() >= until:
                return False
            time.sleep(SLEEP_SECONDS)
        return True

    def fileno(self) -> int:
        """The descriptor that becomes readable with a message."""
        return -1 if self.bell is None else self.bell.fileno()

    def send_descriptors(self, *descriptors: int) -> None:
        """Send file descriptors to the process at the other end."""
        for descriptor in descriptors:
            send_handle(self.bell, descriptor, 0)  # type: ignore[arg-type]  # its process id is for Windows only

    def receive_descriptor(self, timeout_seconds: float) -> int:
        """Receive a file descriptor."""
        if not self.poll(timeout_seconds):
            raise TimeoutError("a file descriptor was announced but did not arrive")
        return int(recv_handle(self.bell))  # type: ignore[arg-type]

    def close(self) -> None:
        """Free the rings and the pipe."""
        if self.bell is not None:
            self.bell.close()
        self.sending.close()
        self.receiving.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return RingTransport, (self.sending, self.receiving, self.bell)


def piece_bytes(parts: Parts) -> Array:  # -> [bytes] uint8
    """The content of a piece, which must be one."""
    message, arrays = parts
    content = arrays.get("bytes")
    if not isinstance(message, Piece) or content is None or content.dtype != np.uint8 or content.ndim != 1:
        raise ValueError(f"a {type(message).__name__} where a piece of a message was expected")
    return content
