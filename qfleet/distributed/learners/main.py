"""The inside of a partner's process on this machine: a partner, and the rings and handles by which it is reached."""

import importlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from qfleet.data.wire_format import Arrays, Facts, Parts
from qfleet.distributed.actors.main import MOST_CHARACTERS, logging_to
from qfleet.distributed.learners.worker import LearnerSetup, LearnerWorker, join_group
from qfleet.distributed.parameter_server.driver import ShardPort
from qfleet.distributed.parameter_server.shard import pair_bytes
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.served import ShardConnection
from qfleet.sync.shard import cuts_of
from qfleet.sync.shared_memory_comm import SharedComm, region_bytes
from qfleet.system.child_process import bound_log, die_with_parent
from qfleet.system.ring import Ring
from qfleet.system.shared_memory import SharedMemory, region_of

LISTEN_SECONDS = 1.0
NAP_SECONDS = 0.0001
SEEN_SECONDS = 5.0
BELL = b"!"


@dataclass
class LearnerProcessSetup:
    """What a partner's process is given."""

    orders: LearnerSetup
    into: Ring
    out: Ring
    bell: Connection


class RingTransport:
    """One end of what connects the driver and a partner: parcels through rings, and a bell that says so."""

    def __init__(self, out: Ring, into: Ring, bell: Connection) -> None:
        self.out = out
        self.into = into
        self.bell = bell

    def say(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Hand a parcel over; somebody who does not take what was said before is lost."""
        try:
            if not self.out.put(facts, arrays or {}):
                raise CommLost("what was said before is still waiting")
            self.bell.send_bytes(BELL)
        except (OSError, ValueError) as error:  # closed, or never to be read
            raise CommLost(str(error)) from error

    def hear(self, limit_seconds: float) -> Parts | None:
        """What was said, within the limit; None if nothing was."""
        try:
            if not self.bell.poll(limit_seconds):
                return None
            self.bell.recv_bytes(len(BELL))
        except (OSError, EOFError) as error:
            raise CommLost(str(error)) from error
        until = time.monotonic() + SEEN_SECONDS
        while (parts := self.into.get()) is None:
            if time.monotonic() > until:
                raise CommLost("a bell without a parcel")
            time.sleep(NAP_SECONDS)
        return parts

    def waits(self, limit_seconds: float) -> bool:
        """Has something been said that was not heard yet, or is somebody gone?"""
        try:
            return self.bell.poll(limit_seconds)
        except OSError:
            return True


def learn_beside(post: LearnerProcessSetup) -> None:
    """The life of a partner's process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a bundle may have environment workers
    talk = RingTransport(post.out, post.into, post.bell)
    parent = os.getppid()
    with logging_to(None), suppress(CommLost):
        try:
            partner = LearnerWorker(post.orders, lambda plan: SocketConnections(plan, post.bell), talk.say)
            talk.say({"kind": "ready"})
            busy = False
            while os.getppid() == parent:
                if (parts := talk.hear(0.0 if busy else LISTEN_SECONDS)) is not None:
                    partner.obey(parts)
                    bound_log()
                busy = partner.idle()
        except Exception as error:
            talk.say({"kind": "failed", "what": f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]})
            raise


class SocketConnections:
    """Memory and lines that the driver hands over; sockets if the plan asks for them."""

    def __init__(self, plan: Plan, bell: Connection) -> None:
        self.plan = plan
        self.bell = bell
        self.ports: list[ShardPort] = []
        if plan.learners.backend in ("gloo", "nccl"):
            importlib.import_module("torch.distributed")  # now, while nobody waits for us in a group

    def join(self, facts: Facts) -> Comm:
        """The group that an order names."""
        if int(facts["port"]) > 0:  # type: ignore[arg-type]
            return join_group(self.plan, facts)
        size = int(facts["size"])  # type: ignore[arg-type]
        slot = int(facts["slot_bytes"])  # type: ignore[arg-type]
        region, line = self.handed(region_bytes(size, slot))
        how = {"slot_bytes": slot, "limit_seconds": self.plan.learners.timeout_seconds}
        return SharedComm(region, [line], int(facts["rank"]), size, **how)  # type: ignore[arg-type]

    def handed(self, num_bytes: int) -> tuple[SharedMemory, socket.socket]:
        """Memory and a line that the driver hands over."""
        handles = []
        for _ in range(2):
            if not self.bell.poll(self.plan.learners.timeout_seconds):
                raise CommLost("nothing was handed over")
            handles.append(recv_handle(self.bell))
        return region_of(handles[0], num_bytes), socket.socket(fileno=handles[1])

    def seats(self, agreement: Serving, learner: Learner, facts: Facts) -> Sequence[ShardConnection]:
        """The ways to all shards."""
        limit = self.plan.learners.timeout_seconds
        for begin, end in cuts_of(sum(weight.numel() for weight in learner.parameters), agreement.shards):
            self.ports.append(ShardPort(*self.handed(pair_bytes(end - begin)), end - begin, limit))
        return self.ports

    def leave(self) -> None:
        """Close the lines to the shards."""
        for port in self.ports:
            port.close()
        self.ports = []
