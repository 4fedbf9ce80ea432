"""`Comm` between processes of one machine: vectors in shared memory, and sockets as a barrier.

Every rank writes to a slot of its own, and there is one slot for results. In an all-reduce each rank sums one part of
all slots, in the order of ranks, so that all ranks get the same bits. A barrier through sockets separates writing from
reading, and the kernel's locks order memory accesses on every CPU. When an operation ends no slot is read any more; the
result may still be read until the first barrier of the next operation.
"""

import socket
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

from qfleet.sync.comm import CommLost
from qfleet.system.shared_memory import SharedMemory, round_to_cache_lines

SIGNAL = b"."


@dataclass(eq=False)
class SharedComm:
    """One rank's end. Rank 0 has a socket to every other rank, in their order; each of those has one to rank 0."""

    region: SharedMemory
    sockets: list[socket.socket]
    rank: int
    world_size: int
    _: KW_ONLY
    slot_bytes: int
    timeout_seconds: float
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        size = region_bytes(self.world_size, self.slot_bytes)
        whole = torch.from_numpy(np.frombuffer(self.region.view, np.uint8, size))
        *self.slots, self.result = whole.view(self.world_size + 1, self.slot_bytes)
        for sock in self.sockets:
            sock.settimeout(self.timeout_seconds)

    def barrier(self) -> None:
        """Return when all ranks are here."""
        try:
            if self.rank:
                self.sockets[0].sendall(SIGNAL)
                self.receive_signal(self.sockets[0])
                return
            for sock in self.sockets:
                self.receive_signal(sock)
            for sock in self.sockets:
                sock.sendall(SIGNAL)
        except OSError as error:
            raise CommLost(f"rank {self.rank} waited for the others in vain: {error}") from error

    def receive_signal(self, sock: socket.socket) -> None:
        """Wait for the signal of another rank."""
        if sock.recv(1) != SIGNAL:
            raise CommLost(f"rank {self.rank}: another rank has left")

    def chunks(self, values: Tensor) -> Iterator[Tensor]:
        """A contiguous tensor's numbers in chunks that fit into a slot."""
        yield from torch.split(values.view(-1), self.slot_bytes // values.element_size())

    def sum(self, values: Tensor) -> None:
        """All-reduce in place, in the order of ranks."""
        own = values.contiguous()
        for chunk in self.chunks(own):
            self.sent_bytes += chunk.nbytes
            slots = [view_like(slot, chunk) for slot in self.slots]
            slots[self.rank].copy_(chunk)
            self.barrier()
            begin = len(chunk) * self.rank // self.world_size
            end = len(chunk) * (self.rank + 1) // self.world_size
            part = view_like(self.result, chunk)[begin:end]
            torch.add(slots[0][begin:end], slots[1][begin:end], out=part)
            for other in slots[2:]:
                part += other[begin:end]
            self.barrier()
            chunk.copy_(view_like(self.result, chunk))
        if own.data_ptr() != values.data_ptr():
            values.copy_(own)

    def gather(self, values: Tensor) -> list[Tensor]:
        """All-gather."""
        own = values.contiguous()
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        for chunk, *found_chunks in zip(self.chunks(own), *(self.chunks(each) for each in found), strict=True):
            self.sent_bytes += chunk.nbytes
            view_like(self.slots[self.rank], chunk).copy_(chunk)
            self.barrier()
            for slot, part in zip(self.slots, found_chunks, strict=True):
                part.copy_(view_like(slot, part))
            self.barrier()  # no rank overwrites its slot before all have read it
        return found

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """Overwrite the values with those of the root."""
        own = values.contiguous()
        for chunk in self.chunks(own):
            if self.rank == root:
                self.sent_bytes += chunk.nbytes
                # Not into the result: another rank may still be reading the last one.
                view_like(self.slots[root], chunk).copy_(chunk)
            self.barrier()
            chunk.copy_(view_like(self.slots[root], chunk))
            self.barrier()
        if own.data_ptr() != values.data_ptr():
            values.copy_(own)

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """All-gather, and take those of one rank."""
        return self.gather(values)[source]

    def close(self) -> None:
        """Leave; operations of the other ranks fail from now on."""
        for sock in self.sockets:
            sock.close()


def view_like(slot: Tensor, like: Tensor) -> Tensor:
    """The beginning of a slot as a tensor of the dtype and length of another."""
    return slot[: like.nbytes].view(like.dtype)


def region_bytes(world_size: int, slot_bytes: int) -> int:
    """Bytes of shared memory: a slot for each rank, and one for results."""
    return (world_size + 1) * slot_bytes


def slot_bytes_for(num_bytes: int, max_bytes: int = 1 << 24) -> int:
    """The slot for vectors of `num_bytes`; longer ones are sent in chunks."""
    return min(max_bytes, max(1 << 12, round_to_cache_lines(num_bytes)))
