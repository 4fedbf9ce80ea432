"""`Comm` between processes: torch's process groups (gloo; NCCL on accelerators) and MPI.

Groups are made without torch's global state: a run may form one group after another as learners come and go, each with
a number of its own in the keys of the rendezvous store. Gloo sums in an order of its own, the same for every rank.
"""

import importlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from qfleet.errors import UsageError
from qfleet.sync.comm import CommLost

STORE_SECONDS = 60.0
BACKLOG = 128
POLL_SECONDS = 5e-5


class ProcessGroupComm:
    """One of torch's process groups, with a timeout for every operation."""

    def __init__(self, group: Any, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.group = group
        self.rank = rank
        self.world_size = world_size
        self.sent_bytes = 0
        self.timeout = timedelta(seconds=timeout_seconds)

    def wait_for(self, begin: Callable[[], Any], sent: Tensor) -> None:
        """Begin an operation and wait for it; any failure means that a rank is lost."""
        self.sent_bytes += sent.nbytes
        with failures_as_lost():
            begin().wait(self.timeout)

    def begin_sum(self, values: Tensor) -> Callable[[], None]:
        """Begin an all-reduce, which runs in the group's own threads."""
        with failures_as_lost():
            work = self.group.allreduce([values])
        return lambda: self.wait_for(lambda: work, values)

    def sum(self, values: Tensor) -> None:
        """All-reduce in place."""
        self.wait_for(lambda: self.group.allreduce([values]), values)

    def gather(self, values: Tensor) -> list[Tensor]:
        """All-gather."""
        found = [torch.empty_like(values) for _ in range(self.world_size)]
        self.wait_for(lambda: self.group.allgather([found], [values.contiguous()]), values)
        return found

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """Overwrite the values with those of the root."""
        self.wait_for(lambda: self.group.broadcast(values, root), values)

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """Send, then receive: gloo buffers a message until its receiver takes it."""
        found = torch.empty_like(values)
        with failures_as_lost():
            send = self.group.send([values.contiguous()], to, 0)
        self.wait_for(lambda: self.group.recv([found], source, 0), values)
        self.wait_for(lambda: send, values[:0])
        return found

    def close(self) -> None:
        """Leave; operations of the other ranks fail from now on."""
        self.group = None


@contextmanager
def failures_as_lost() -> Iterator[None]:
    """Raise torch's errors as `CommLost`."""
    try:
        yield
    except RuntimeError as error:
        raise CommLost(str(error).splitlines()[0]) from error


def connect_store(address: str, port: int, number: int) -> tuple[Any, Any]:
    """Torch's module, which takes long to import, and the run's rendezvous store with the keys of group `number`."""
    dist: Any = importlib.import_module("torch.distributed")
    store = dist.TCPStore(address, port, None, False, timedelta(seconds=STORE_SECONDS))
    return dist, dist.PrefixStore(f"group-{number}", store)


def make_rendezvous_store(address: str) -> Any:
    """The store where the groups of a run form: a server in this process that listens at this address only."""
    dist: Any = importlib.import_module("torch.distributed")
    # Left to itself the store would listen on every network that the machine is in.
    listening = socket.socket()
    listening.bind((address, 0))
    listening.listen(BACKLOG)
    port = listening.getsockname()[1]
    timeout = timedelta(seconds=STORE_SECONDS)
    options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listening.detach()}
    return dist.TCPStore(address, port, None, True, timeout, **options)


def make_gloo(
    address: str, port: int, rank: int, world_size: int, *, number: int, timeout_seconds: float, own: str | None = None
) -> ProcessGroupComm:
    """Group `number` of a run, formed at rank 0's store (host and port); `own` is this machine's address."""
    dist, store = connect_store(address, port, number)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    try:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own or address)]
        group = dist.ProcessGroupGloo(store, rank, world_size, options)
    except RuntimeError as error:
        raise CommLost(f"group {number} did not form: {str(error).splitlines()[0]}") from error
    return ProcessGroupComm(group, rank, world_size, timeout_seconds)


def make_nccl(
    address: str, port: int, rank: int, world_size: int, *, number: int, timeout_seconds: float
) -> ProcessGroupComm:
    """Group `number` of a run between accelerators. Not run on hardware here."""
    dist, store = connect_store(address, port, number)
    if not dist.is_nccl_available():
        raise UsageError("NCCL cannot be used", "This torch has none.", "Use gloo, or a CUDA build of torch.")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    return ProcessGroupComm(group, rank, world_size, timeout_seconds)


class MpiComm:
    """MPI by mpi4py, for clusters that have it. A rank that is lost, or does not answer in time, ends the job."""

    def __init__(self, mpi_comm: Any, timeout_seconds: float) -> None:
        self.mpi_comm = mpi_comm
        self.rank = mpi_comm.Get_rank()
        self.world_size = mpi_comm.Get_size()
        self.sent_bytes = 0
        self.timeout_seconds = timeout_seconds

    def wait_for(self, request: Any) -> None:
        """Wait for an operation. After a timeout it cannot be cancelled and no new group can form: abort the job."""
        until = time.monotonic() + self.timeout_seconds
        while not request.Test():
            if time.monotonic() > until:
                abort_job(self.mpi_comm, self.rank, self.timeout_seconds)
            time.sleep(POLL_SECONDS)

    def sum(self, values: Tensor) -> None:
        """All-reduce in place."""
        mpi: Any = importlib.import_module("mpi4py.MPI")
        self.sent_bytes += values.nbytes
        self.wait_for(self.mpi_comm.Iallreduce(mpi.IN_PLACE, values.numpy(), op=mpi.SUM))

    def gather(self, values: Tensor) -> list[Tensor]:
        """All-gather, as bytes: MPI has no half precision."""
        self.sent_bytes += values.nbytes
        sent = values.contiguous().view(torch.uint8) if values.dim() else values.reshape(1).view(torch.uint8)
        found = torch.empty((self.world_size, *sent.shape), dtype=torch.uint8)
        self.wait_for(self.mpi_comm.Iallgather(sent.numpy(), found.numpy()))
        return [each.view(values.dtype).view(values.shape) for each in found]

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """Overwrite the values with those of the root."""
        self.sent_bytes += values.nbytes
        self.wait_for(self.mpi_comm.Ibcast(values.numpy(), root))

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """Send and receive at the same time."""
        self.sent_bytes += values.nbytes
        found = torch.empty_like(values)
        send = self.mpi_comm.Isend(values.numpy(), to)
        receive = self.mpi_comm.Irecv(found.numpy(), source)
        self.wait_for(receive)
        self.wait_for(send)
        return found

    def close(self) -> None:
        """Free the communicator: MPI can hold only a limited number of them."""
        self.mpi_comm.Free()


def abort_job(mpi_comm: Any, rank: int, timeout_seconds: float) -> None:
    """Report that the other ranks did not answer in time, and abort the job."""
    sys.stderr.write(f"rank {rank}: the other ranks did not answer within {timeout_seconds:g} seconds\n")
    mpi_comm.Abort(1)
