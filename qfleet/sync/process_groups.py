"""Carriers of `Comm` between processes: torch's process groups (gloo; NCCL on accelerators) and MPI.

Groups are made by hand, without torch's global state: a run may form one group after another as learners come and go,
each with a number of its own in the keys of the store. Gloo adds in an order of its own, the same for every rank.
"""

import importlib
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from qfleet.errors import UsageError
from qfleet.sync.comm import BlockingComm, CommLost

STORE_SECONDS = 60.0
BACKLOG = 128
NAP_SECONDS = 5e-5


class GroupComm:
    """A process group of torch's, with a time limit for every operation."""

    overlaps = True

    def __init__(self, group: Any, rank: int, size: int, limit_seconds: float) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.sent_bytes = 0
        self.limit = timedelta(seconds=limit_seconds)

    def done(self, begin: Callable[[], Any], sent: Tensor) -> None:
        """Begin an operation and wait for it; whatever goes wrong on the way means that somebody is gone."""
        self.sent_bytes += sent.nbytes
        try:
            begin().wait(self.limit)
        except RuntimeError as error:
            raise CommLost(str(error).splitlines()[0]) from error

    def begin(self, values: Tensor) -> Callable[[], None]:
        """Begin a sum, which goes on in threads of the group's own."""
        started = list[Any]()
        try:
            started.append(self.group.allreduce([values]))
        except RuntimeError as error:
            raise CommLost(str(error).splitlines()[0]) from error
        return lambda: self.done(started.pop, values)

    def sum(self, values: Tensor) -> None:
        """In place the sum over all ranks."""
        self.done(lambda: self.group.allreduce([values]), values)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Everybody's values in the order of ranks."""
        found = [torch.empty_like(values) for _ in range(self.size)]
        self.done(lambda: self.group.allgather([found], [values.contiguous()]), values)
        return found

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """In place what the root has."""
        self.done(lambda: self.group.broadcast(values, root), values)

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """Send first, then receive: gloo keeps what was sent until somebody wants it."""
        found = torch.empty_like(values)
        begun = list[Any]()
        self.done(lambda: self.begun(begun, values, to, found, source), values)
        self.done(lambda: begun[0], values[:0])
        return found

    def begun(self, sends: list[Any], values: Tensor, to: int, found: Tensor, source: int) -> Any:
        """Begin both; the send is kept, to be waited for later."""
        sends.append(self.group.send([values.contiguous()], to, 0))
        return self.group.recv([found], source, 0)

    def close(self) -> None:
        """Leave; who waits for us finds out."""
        self.group = None


def met(address: str, port: int, number: int) -> tuple[Any, Any]:
    """Torch's module, which takes its time to import, and the shelf of group `number` in the run's store."""
    dist: Any = importlib.import_module("torch.distributed")
    store = dist.TCPStore(address, port, None, False, timedelta(seconds=STORE_SECONDS))
    return dist, dist.PrefixStore(f"group-{number}", store)


def make_store(address: str) -> Any:
    """Where the groups of a run meet: a small server in this process, reached at this address and no other."""
    dist: Any = importlib.import_module("torch.distributed")
    # Left to itself the store would listen on every network that the machine is in.
    listening = socket.socket()
    listening.bind((address, 0))
    listening.listen(BACKLOG)
    port = listening.getsockname()[1]
    limit = timedelta(seconds=STORE_SECONDS)
    return dist.TCPStore(address, port, None, True, limit, wait_for_workers=False, master_listen_fd=listening.detach())


def make_gloo(
    address: str, port: int, rank: int, size: int, *, number: int, limit_seconds: float, own: str | None = None
) -> GroupComm:
    """Group `number` of a run, met at the store of rank 0 (host and port); `own` is this machine's address."""
    dist, shelf = met(address, port, number)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=limit_seconds)
    try:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own or address)]
        group = dist.ProcessGroupGloo(shelf, rank, size, options)
    except RuntimeError as error:
        raise CommLost(f"group {number} did not form: {str(error).splitlines()[0]}") from error
    return GroupComm(group, rank, size, limit_seconds)


def make_nccl(address: str, port: int, rank: int, size: int, *, number: int, limit_seconds: float) -> GroupComm:
    """The same between accelerators. Not run on hardware here."""
    dist, shelf = met(address, port, number)
    if not dist.is_nccl_available():
        raise UsageError("NCCL cannot be used", "This torch has none.", "Use gloo, or a CUDA build of torch.")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=limit_seconds)
    return GroupComm(dist.ProcessGroupNCCL(shelf, rank, size, options), rank, size, limit_seconds)


class MpiComm(BlockingComm):
    """MPI by mpi4py, for clusters that have it. A rank that is lost, or does not come in time, ends the job."""

    def __init__(self, world: Any, limit_seconds: float) -> None:
        self.world = world
        self.rank = world.Get_rank()
        self.size = world.Get_size()
        self.sent_bytes = 0
        self.limit_seconds = limit_seconds

    def done(self, request: Any) -> None:
        """Wait for an operation. One that is never done cannot be taken back: nobody could form another group."""
        until = time.monotonic() + self.limit_seconds
        while not request.Test():
            if time.monotonic() > until:
                end_all(self.world, self.rank, self.limit_seconds)
            time.sleep(NAP_SECONDS)

    def sum(self, values: Tensor) -> None:
        """In place the sum over all ranks."""
        mpi: Any = importlib.import_module("mpi4py.MPI")
        self.sent_bytes += values.nbytes
        self.done(self.world.Iallreduce(mpi.IN_PLACE, values.numpy(), op=mpi.SUM))

    def gather(self, values: Tensor) -> list[Tensor]:
        """Everybody's values in the order of ranks, as bytes: MPI knows no half precision."""
        self.sent_bytes += values.nbytes
        sent = values.contiguous().view(torch.uint8) if values.dim() else values.reshape(1).view(torch.uint8)
        found = torch.empty((self.size, *sent.shape), dtype=torch.uint8)
        self.done(self.world.Iallgather(sent.numpy(), found.numpy()))
        return [each.view(values.dtype).view(values.shape) for each in found]

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """In place what the root has."""
        self.sent_bytes += values.nbytes
        self.done(self.world.Ibcast(values.numpy(), root))

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """Both at once."""
        self.sent_bytes += values.nbytes
        found = torch.empty_like(values)
        sent = self.world.Isend(values.numpy(), to)
        coming = self.world.Irecv(found.numpy(), source)
        self.done(coming)
        self.done(sent)
        return found

    def close(self) -> None:
        """Leave; an MPI has room for so many groups at a time."""
        self.world.Free()


def end_all(world: Any, rank: int, limit_seconds: float) -> None:
    """Somebody did not come in time: say so, and end the job."""
    sys.stderr.write(f"rank {rank}: the others did not come within {limit_seconds:g} seconds\n")
    world.Abort(1)
