"""`Comm` between processes of one machine: vectors in shared memory, and sockets that say when they may be read.

Every rank has a slot of its own to write, and there is one for results. To add up, each rank sums one part of all
slots, in the order of ranks, so that everybody has the same bits. A word through a socket before every change of roles
keeps writers and readers apart, and the kernel's locks keep memory in order on every CPU. Slots are not read any more
when an operation ends; the result may be, until the next one has met for the first time.
"""

import socket
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from qfleet.sync.comm import BlockingComm, CommLost
from qfleet.system.shared_memory import SharedMemory

WORD = b"."
ALIGN = 64


class SharedComm(BlockingComm):
    """One rank's end. Rank 0 has a line to every other rank, in their order; each of those has one to rank 0."""

    def __init__(
        self,
        region: SharedMemory,
        lines: list[socket.socket],
        rank: int,
        size: int,
        *,
        slot_bytes: int,
        limit_seconds: float,
    ) -> None:
        self.region = region
        self.lines = lines
        self.rank = rank
        self.size = size
        self.sent_bytes = 0
        whole = torch.from_numpy(np.frombuffer(region.view, np.uint8, (size + 1) * slot_bytes))
        *self.slots, self.result = whole.view(size + 1, slot_bytes)
        self.slot_bytes = slot_bytes
        for line in lines:
            line.settimeout(limit_seconds)

    def meet(self) -> None:
        """Return when everybody is here."""
        try:
            if self.rank:
                self.lines[0].sendall(WORD)
                self.hear(self.lines[0])
                return
            for line in self.lines:
                self.hear(line)
            for line in self.lines:
                line.sendall(WORD)
        except OSError as error:
            raise CommLost(f"rank {self.rank} waited for the others in vain: {error}") from error

    def hear(self, line: socket.socket) -> None:
        """A word."""
        if line.recv(1) != WORD:
            raise CommLost(f"rank {self.rank}: somebody has left")

    def pieces(self, values: Tensor) -> Iterator[Tensor]:
        """A tensor's numbers in pieces that fit into a slot, as they lie in memory."""
        yield from torch.split(values.view(-1), self.slot_bytes // values.element_size())

    def sum(self, values: Tensor) -> None:
        """In place the sum over all ranks, in their order."""
        own = values.contiguous()
        for piece in self.pieces(own):
            self.sent_bytes += piece.nbytes
            seen = [numbers(slot, piece) for slot in self.slots]
            seen[self.rank].copy_(piece)
            self.meet()
            begin = len(piece) * self.rank // self.size
            end = len(piece) * (self.rank + 1) // self.size
            part = numbers(self.result, piece)[begin:end]
            torch.add(seen[0][begin:end], seen[1][begin:end], out=part)
            for other in seen[2:]:
                part += other[begin:end]
            self.meet()
            piece.copy_(numbers(self.result, piece))
        if own.data_ptr() != values.data_ptr():
            values.copy_(own)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Everybody's values in the order of ranks."""
        own = values.contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        for pieces in zip(self.pieces(own), *(self.pieces(each) for each in found), strict=True):
            self.sent_bytes += pieces[0].nbytes
            numbers(self.slots[self.rank], pieces[0]).copy_(pieces[0])
            self.meet()
            for slot, into in zip(self.slots, pieces[1:], strict=True):
                into.copy_(numbers(slot, into))
            self.meet()  # nobody writes the next thing before all have seen this one
        return found

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """In place what the root has."""
        own = values.contiguous()
        for piece in self.pieces(own):
            if self.rank == root:
                self.sent_bytes += piece.nbytes
                numbers(self.slots[root], piece).copy_(
                    piece
                )  # not the result: somebody may still be reading the last one
            self.meet()
            piece.copy_(numbers(self.slots[root], piece))
            self.meet()
        if own.data_ptr() != values.data_ptr():
            values.copy_(own)

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """All meet, and each takes one."""
        return self.gather(values)[source]

    def close(self) -> None:
        """Leave; who waits for us finds out."""
        for line in self.lines:
            line.close()


def numbers(slot: Tensor, like: Tensor) -> Tensor:
    """The beginning of a slot as numbers of the kind and count of another tensor."""
    return slot[: like.nbytes].view(like.dtype)


def region_bytes(size: int, slot_bytes: int) -> int:
    """Memory that so many ranks need."""
    return (size + 1) * slot_bytes


def slot_bytes_for(num_bytes: int, most_bytes: int = 1 << 24) -> int:
    """A slot for vectors of so many bytes; longer ones go through in pieces."""
    return min(most_bytes, max(1 << 12, -(-num_bytes // ALIGN) * ALIGN))
