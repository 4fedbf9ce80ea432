"""Learners that MPI has started: `mpirun -n 3 qfleet train ... learners.num=3 learners.backend=mpi`.

All ranks run the same command. Rank 0 is the driver; the others become learner workers when the run begins. MPI cannot
restart a process: one that is lost, fails or does not come in time ends all of them, and the run continues from its
last checkpoint when it is resumed.
"""

import atexit
import importlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from qfleet.build.custom_parts import CustomParts
from qfleet.build.make import make_policy, policy_spec
from qfleet.build.worlds import EnvMaker
from qfleet.data import Spec
from qfleet.data.wire_format import Arrays, Message, Parts, to_bytes, unpack
from qfleet.distributed.learners.launcher import ShardGroup, make_setup
from qfleet.distributed.learners.messages import FormGroup, LearnerReply, LearnerRequest
from qfleet.distributed.learners.worker import LearnerWorker
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.messages import PeerLost, Ready, Stop
from qfleet.distributed.worker.serve import serve
from qfleet.envs import TRAIN, make_world
from qfleet.errors import QfleetError, UsageError
from qfleet.install import install_command
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.process_groups import MpiComm, abort_job
from qfleet.sync.served import ShardConnection
from qfleet.system.worker_errors import WorkerDied, WorkerHung, WorkerLost

START_SECONDS = 600.0
LEARNER_SECONDS = 120.0  # for a rank to become a learner
SLEEP_SECONDS = 0.0001
TAG = 77
MAX_MESSAGE_BYTES = 1 << 31
STOPPED_RANKS: set[int] = set()  # ranks that rank 0 has sent `Stop`


def mpi() -> Any:
    """mpi4py's module, which initialises MPI when it is imported."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            "learners.backend=mpi, but MPI cannot be used",
            f"mpi4py said: {str(error).splitlines()[0]}",
            f"It is an extra, and needs an MPI of the system: {install_command('mpi')}",
        ) from error


class BeginRun(Message):
    """A run begins, by this plan (as JSON): the rank becomes a learner worker."""

    plan: bytes


class MpiTransport:
    """Messages to and from one rank."""

    def __init__(self, world: Any, other: int, kind: Any) -> None:
        self.world = world
        self.other = other
        self.kind = kind  # of the messages received
        self.sent: list[tuple[Any, bytes]] = []  # buffers that MPI may still be reading

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message without waiting for its receipt."""
        self.sent = [(request, data) for request, data in self.sent if not request.Test()]
        data = to_bytes(message, arrays)
        self.sent.append((self.world.Isend(np.frombuffer(data, np.uint8), self.other, TAG), data))

    def receive(self, timeout_seconds: float) -> Parts | None:
        """The next message; None if none came in time."""
        if not self.poll(timeout_seconds):
            return None
        status = mpi().Status()
        self.world.Probe(self.other, TAG, status)
        data = np.empty(status.Get_count(mpi().BYTE), np.uint8)
        self.world.Recv(data, self.other, TAG)
        return unpack(data.tobytes(), self.kind, limit_bytes=MAX_MESSAGE_BYTES)

    def poll(self, timeout_seconds: float) -> bool:
        """Is a message waiting?"""
        until = time.monotonic() + timeout_seconds
        while not self.world.Iprobe(self.other, TAG):
            if time.monotonic() >= until:
                return False
            time.sleep(SLEEP_SECONDS)
        return True

    def close(self) -> None:
        """Nothing to free: MPI ends with the process."""


class MpiWorker:
    """Another rank's process, which is alive while this one is: MPI ends all ranks if one ends."""

    def __init__(self, transport: MpiTransport) -> None:
        self.transport = transport
        self.stopped = False

    def is_alive(self) -> bool:
        """True until it is stopped here."""
        return not self.stopped

    def is_pending(self) -> bool:
        """Never: its rank runs."""
        return False

    def why_lost(self) -> WorkerLost:
        """Not known."""
        return WorkerDied("it was stopped") if self.stopped else WorkerHung("its rank does not answer")

    def request_stop(self) -> None:
        """Send `Stop`, once."""
        if not self.stopped:
            send_stop(self.transport)
        self.stopped = True

    def stop(self) -> None:
        """MPI has no other way to end a rank than to ask it."""
        self.request_stop()


class MpiLearnerLauncher:
    """Gives learners to the ranks that MPI has started."""

    replaces = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = mpi().COMM_WORLD
        self.launched: set[int] = set()

    def launch(self, number: int, incarnation: int) -> WorkerHandle:
        """Send the plan to a rank, which becomes a learner worker."""
        if number in self.launched or number >= self.world.Get_size():
            raise UsageError(
                f"learner {number} cannot be started",
                "MPI starts processes once, and a learner that was stopped cannot be started again.",
                "Start the run with the largest number of learners it shall have.",
            )
        self.launched.add(number)
        transport = MpiTransport(self.world, number, LearnerReply | Ready | PeerLost)
        transport.send(BeginRun(msgspec.json.encode(self.plan)))
        return WorkerHandle(number, transport, MpiWorker(transport), start_seconds=LEARNER_SECONDS)

    def form_group(self, members: Sequence[WorkerHandle], request: FormGroup, learner: Learner) -> Comm:
        """Request the members to create the group, and create it together with them."""
        ranks = (0, *(handle.number for handle in members))
        for rank, handle in enumerate(members, 1):
            handle.ask(msgspec.structs.replace(request, rank=rank, ranks=ranks))
        return create_group(self.world, ranks, self.plan)

    def start_server(self, sync_plan: Serving, learner: Learner) -> ShardGroup:
        """Not supported; plans with a parameter server are refused earlier."""
        raise CommLost("a parameter server does not live among MPI's ranks")


def create_group(world: Any, ranks: Sequence[int], plan: Plan) -> Comm:
    """Create a group of these ranks, in this order. MPI has no timeout for that, so that a thread watches the clock."""
    limit = plan.learners.timeout_seconds
    watchdog = threading.Timer(limit, abort_job, (world, world.Get_rank(), limit))
    watchdog.daemon = True
    watchdog.start()
    try:
        return MpiComm(world.Create_group(world.Get_group().Incl(list(ranks))), limit)
    finally:
        watchdog.cancel()


class MpiPeerConnections:
    """A learner worker's connections by MPI."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = mpi().COMM_WORLD

    def join(self, request: FormGroup) -> Comm:
        """Join the process group that the request describes."""
        return create_group(self.world, request.ranks, self.plan)

    def connect_shards(self, sync_plan: Serving, learner: Learner, request: FormGroup) -> Sequence[ShardConnection]:
        """Not supported; plans with a parameter server are refused earlier."""
        raise CommLost("a parameter server does not live among MPI's ranks")

    def disconnect_shards(self) -> None:
        """There are no connections to shards."""


def is_driver_rank(plan: Plan) -> bool:
    """Is this process the driver of the run? All other ranks of MPI are learner workers, and print nothing."""
    if plan.learners.backend != "mpi" or plan.learners.num == 1:
        return True
    return int(mpi().COMM_WORLD.Get_rank()) == 0


def is_worker_rank(plan: Plan) -> bool:
    """Is this process a learner worker? Raises if MPI has started fewer processes than the plan has learners."""
    world = mpi().COMM_WORLD
    if (size := world.Get_size()) < plan.learners.num:
        raise UsageError(
            f"learners.num={plan.learners.num}, but MPI has started {size} process{'es' if size > 1 else ''}",
            "With learners.backend=mpi every learner is a process that MPI starts.",
            f"Start as many: mpirun -n {plan.learners.num} qfleet train ...",
        )
    if world.Get_rank() == 0:
        atexit.register(stop_all_ranks)
    return bool(world.Get_rank())


def send_stop(transport: MpiTransport) -> None:
    """Ask a rank to stop."""
    STOPPED_RANKS.add(transport.other)
    transport.send(Stop())


def stop_all_ranks() -> None:
    """Stop all other ranks when rank 0 exits: MPI does not let it exit before they do."""
    world = mpi().COMM_WORLD
    for rank in range(1, world.Get_size()):
        if rank not in STOPPED_RANKS:
            send_stop(MpiTransport(world, rank, Ready))


def rank_main(custom_parts: CustomParts) -> None:
    """Run a rank other than 0. If it fails it aborts all ranks, because MPI would wait for it."""
    world = mpi().COMM_WORLD
    try:
        serve_rank(world, custom_parts)
    except QfleetError as error:
        sys.stderr.write(f"rank {world.Get_rank()}: {error}\n")
        world.Abort(error.exit_code)
    except BaseException:
        traceback.print_exc()
        world.Abort(1)


def probe_env_spec(plan: Plan, make: EnvMaker | None) -> Spec:
    """The spec of this plan's environments, from one that is made and closed."""
    world = make_world(plan.env, seed=plan.seed, stream=TRAIN, num=1, make=make)
    world.close()
    return world.spec


def serve_rank(world: Any, custom_parts: CustomParts) -> None:
    """Wait for the run to begin, and handle requests until rank 0 sends `Stop`; signals are left to rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transport = MpiTransport(world, 0, LearnerRequest | BeginRun | Stop)
    parts = transport.receive(START_SECONDS)
    if parts is None:
        raise QfleetError(
            f"no run began within {START_SECONDS:g} seconds",
            "Rank 0 sends the plan to all other ranks when its run begins.",
            "See what rank 0 printed; is it still making its environment?",
        )
    if not isinstance(parts[0], BeginRun):
        return  # rank 0 has ended, or its run has fewer learners than there are ranks
    plan = msgspec.json.decode(parts[0].plan, type=Plan)
    env_spec = probe_env_spec(plan, custom_parts.env)
    spec = policy_spec(env_spec, make_policy(plan, env_spec, torch.device("cpu"), custom_parts))
    setup = make_setup(plan, env_spec, spec, world.Get_rank(), 0, custom_parts)
    serve(LearnerWorker(setup, MpiPeerConnections), transport)
