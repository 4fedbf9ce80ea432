"""The process of a learner worker on this machine, and its connections to other learners and shards."""

import importlib
import socket
from collections.abc import Sequence
from contextlib import suppress

from qfleet.distributed.learners.messages import FormGroup
from qfleet.distributed.learners.worker import LearnerSetup, LearnerWorker, join_group
from qfleet.distributed.parameter_server.driver import ShardPort
from qfleet.distributed.parameter_server.shard import mailbox_bytes
from qfleet.distributed.worker.serve import serve
from qfleet.distributed.worker.transport import RingTransport
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.gradient_rule import shard_bounds
from qfleet.sync.served import ShardConnection
from qfleet.sync.shared_memory_comm import SharedComm, region_bytes
from qfleet.system.shared_memory import SharedMemory, shared_memory_from_descriptor


def learner_main(setup: LearnerSetup, transport: RingTransport) -> None:
    """Run a learner worker until the driver is gone."""
    worker = LearnerWorker(setup, lambda plan: SocketConnections(plan, transport))
    with suppress(ConnectionError):  # the driver is gone
        serve(worker, transport)


class SocketConnections:
    """Connections by shared memory and sockets that the driver sends, or by gloo or NCCL if the plan says so."""

    def __init__(self, plan: Plan, transport: RingTransport) -> None:
        self.plan = plan
        self.transport = transport
        self.ports: list[ShardPort] = []
        if plan.learners.backend in ("gloo", "nccl"):
            importlib.import_module("torch.distributed")  # now, while no group waits for this process

    def join(self, request: FormGroup) -> Comm:
        """Join the process group that the request describes."""
        if request.port > 0:
            return join_group(self.plan, request)
        region, sock = self.receive_region(region_bytes(request.size, request.slot_bytes))
        sizes = {"slot_bytes": request.slot_bytes}
        limit = self.plan.learners.timeout_seconds
        return SharedComm(region, [sock], request.rank, request.size, **sizes, timeout_seconds=limit)

    def receive_region(self, num_bytes: int) -> tuple[SharedMemory, socket.socket]:
        """Receive a shared memory region and a socket from the driver."""
        try:
            fds = [self.transport.receive_descriptor(self.plan.learners.timeout_seconds) for _ in range(2)]
        except TimeoutError as error:
            raise CommLost("the driver sent no shared memory in time") from error
        return shared_memory_from_descriptor(fds[0], num_bytes), socket.socket(fileno=fds[1])

    def connect_shards(self, sync_plan: Serving, learner: Learner, request: FormGroup) -> Sequence[ShardConnection]:
        """Connect to all shards of the parameter server."""
        limit = self.plan.learners.timeout_seconds
        for begin, end in shard_bounds(sum(weight.numel() for weight in learner.parameters), sync_plan.shards):
            self.ports.append(ShardPort(*self.receive_region(mailbox_bytes(end - begin)), end - begin, limit))
        return self.ports

    def disconnect_shards(self) -> None:
        """Close the connections to the shards."""
        for port in self.ports:
            port.close()
        self.ports = []
