"""Entry point of a learner worker's process on this machine, and its connections: rings, sockets, shared memory."""

import importlib
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from qfleet.data.wire_format import Arrays, Facts, Parts
from qfleet.distributed.actors.main import MAX_ERROR_CHARACTERS
from qfleet.distributed.learners.worker import LearnerSetup, LearnerWorker, join_group
from qfleet.distributed.parameter_server.driver import ShardPort
from qfleet.distributed.parameter_server.shard import mailbox_bytes
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.gradient_rule import shard_bounds
from qfleet.sync.served import ShardConnection
from qfleet.sync.shared_memory_comm import SharedComm, region_bytes
from qfleet.system.child_process import limit_log
from qfleet.system.ring import Ring
from qfleet.system.shared_memory import SharedMemory, shared_memory_from_descriptor

POLL_SECONDS = 1.0
SLEEP_SECONDS = 0.0001
MESSAGE_SECONDS = 5.0
BELL = b"!"


@dataclass
class LearnerProcessSetup:
    """Everything that a learner worker's process is started with."""

    learner_setup: LearnerSetup
    into: Ring
    out: Ring
    bell: Connection


class RingTransport:
    """One end of the connection of driver and learner worker: messages in rings, announced by a byte in a pipe."""

    def __init__(self, out: Ring, into: Ring, bell: Connection) -> None:
        self.out = out
        self.into = into
        self.bell = bell

    def send(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Send a message; the receiver is lost if the ring is full of unread ones."""
        try:
            if not self.out.put(facts, arrays or {}):
                raise CommLost("earlier messages are still unread")
            self.bell.send_bytes(BELL)
        except (OSError, ValueError) as error:  # closed, or never to be read
            raise CommLost(str(error)) from error

    def receive(self, timeout_seconds: float) -> Parts | None:
        """The next message; None if none came in time."""
        try:
            if not self.bell.poll(timeout_seconds):
                return None
            self.bell.recv_bytes(len(BELL))
        except (OSError, EOFError) as error:
            raise CommLost(str(error)) from error
        until = time.monotonic() + MESSAGE_SECONDS
        while (parts := self.into.get()) is None:
            if time.monotonic() > until:
                raise CommLost("a message was announced but did not arrive")
            time.sleep(SLEEP_SECONDS)
        return parts

    def poll(self, timeout_seconds: float) -> bool:
        """Is a message waiting, or the connection broken?"""
        try:
            return self.bell.poll(timeout_seconds)
        except OSError:
            return True


def learner_main(setup: LearnerProcessSetup) -> None:
    """Run a learner worker until the driver is gone."""
    transport = RingTransport(setup.out, setup.into, setup.bell)
    parent = os.getppid()
    with suppress(CommLost):
        try:
            worker = LearnerWorker(
                setup.learner_setup, lambda plan: SocketConnections(plan, setup.bell), transport.send
            )
            transport.send({"kind": "ready"})
            busy = False
            while os.getppid() == parent:
                if (parts := transport.receive(0.0 if busy else POLL_SECONDS)) is not None:
                    worker.handle_request(parts)
                    limit_log()
                busy = worker.act_when_idle()
        except Exception as error:
            transport.send({"kind": "failed", "cause": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]})
            raise


class SocketConnections:
    """Connections by shared memory and sockets that the driver sends, or by gloo or NCCL if the plan says so."""

    def __init__(self, plan: Plan, bell: Connection) -> None:
        self.plan = plan
        self.bell = bell
        self.ports: list[ShardPort] = []
        if plan.learners.backend in ("gloo", "nccl"):
            importlib.import_module("torch.distributed")  # now, while no group waits for this process

    def join(self, facts: Facts) -> Comm:
        """Join the process group that a `form` request describes."""
        if int(facts["port"]) > 0:  # type: ignore[arg-type]
            return join_group(self.plan, facts)
        size = int(facts["size"])  # type: ignore[arg-type]
        slot_bytes = int(facts["slot_bytes"])  # type: ignore[arg-type]
        region, sock = self.receive_region(region_bytes(size, slot_bytes))
        limit = self.plan.learners.timeout_seconds
        rank = int(facts["rank"])  # type: ignore[arg-type]
        return SharedComm(region, [sock], rank, size, slot_bytes=slot_bytes, timeout_seconds=limit)

    def receive_region(self, num_bytes: int) -> tuple[SharedMemory, socket.socket]:
        """Receive a shared memory region and a socket from the driver."""
        fds = []
        for _ in range(2):
            if not self.bell.poll(self.plan.learners.timeout_seconds):
                raise CommLost("the driver sent no shared memory in time")
            fds.append(recv_handle(self.bell))
        return shared_memory_from_descriptor(fds[0], num_bytes), socket.socket(fileno=fds[1])

    def connect_shards(self, sync_plan: Serving, learner: Learner, facts: Facts) -> Sequence[ShardConnection]:
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
