"""Learners that MPI has started: `mpirun -n 3 qfleet train ... learners.num=3 learners.backend=mpi`.

Everybody runs the same command. Rank 0 has the run; the others find out who they are when it begins, and obey. MPI
knows no replacement: a process that is lost, fails or does not come in time ends them all, and the run goes on from its
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
from torch import nn

from qfleet.act import Explore
from qfleet.build.components import EnvMaker, make_policy, policy_spec
from qfleet.data import Spec
from qfleet.data.wire_format import Arrays, Facts, Parts, to_bytes, unpack
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.learners.launcher import ShardGroup, orders_for
from qfleet.distributed.learners.worker import LearnerWorker
from qfleet.envs import TRAIN, make_world
from qfleet.errors import QfleetError, UsageError
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.process_groups import MpiComm, end_all
from qfleet.sync.served import ShardConnection

BEGIN_SECONDS = 600.0
LISTEN_SECONDS = 1.0
NAP_SECONDS = 0.0001
TAG = 77
MOST_BYTES = 1 << 31
DISMISSED: set[int] = set()  # ranks that rank 0 has told to leave


def mpi() -> Any:
    """mpi4py's module, which begins MPI when it is imported."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            "learners.backend=mpi, but MPI cannot be used",
            f"mpi4py said: {str(error).splitlines()[0]}",
            'It is an extra, and needs an MPI of the system: pip install "qfleet[mpi]"',
        ) from error


class MpiTransport:
    """Parcels to and from one rank."""

    def __init__(self, world: Any, other: int) -> None:
        self.world = world
        self.other = other
        self.sent: list[tuple[Any, bytes]] = []  # what MPI may still be reading

    def say(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Hand a parcel over; it is on its way when this returns."""
        self.sent = [(request, parcel) for request, parcel in self.sent if not request.Test()]
        parcel = to_bytes(facts, arrays or {})
        self.sent.append((self.world.Isend(np.frombuffer(parcel, np.uint8), self.other, TAG), parcel))

    def hear(self, limit_seconds: float) -> Parts | None:
        """What was said, within the limit."""
        if not self.waits(limit_seconds):
            return None
        status = mpi().Status()
        self.world.Probe(self.other, TAG, status)
        parcel = np.empty(status.Get_count(mpi().BYTE), np.uint8)
        self.world.Recv(parcel, self.other, TAG)
        return unpack(parcel.tobytes(), limit_bytes=MOST_BYTES)

    def waits(self, limit_seconds: float) -> bool:
        """Has something been said that was not heard yet?"""
        until = time.monotonic() + limit_seconds
        while not self.world.Iprobe(self.other, TAG):
            if time.monotonic() >= until:
                return False
            time.sleep(NAP_SECONDS)
        return True


class MpiProcessControl:
    """Another rank's process: MPI ends all if it ends one, so whoever can ask finds it alive."""

    def __init__(self, talk: MpiTransport) -> None:
        self.talk = talk
        self.gone = False

    def is_alive(self) -> bool:
        """Was it not told to leave?"""
        return not self.gone

    def end(self) -> None:
        """Tell it to leave."""
        if not self.gone:
            dismiss(self.talk)
        self.gone = True


class MpiLearnerLauncher:
    """The ranks that MPI has started."""

    replaces = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = mpi().COMM_WORLD
        self.hired: set[int] = set()

    def hire(self, number: int, incarnation: int) -> LearnerHandle:
        """Tell a rank what the run is about."""
        if number in self.hired or number >= self.world.Get_size():
            raise UsageError(
                f"learner {number} cannot be had",
                "MPI starts processes once, and one that was let go does not come back.",
                "Start the run with as many as it shall have at most.",
            )
        self.hired.add(number)
        talk = MpiTransport(self.world, number)
        talk.say({"kind": "begin"}, {"plan": np.frombuffer(msgspec.json.encode(self.plan), np.uint8)})
        return LearnerHandle(number, talk, MpiProcessControl(talk), time.monotonic())

    def meet(self, group: Sequence[LearnerHandle], facts: Facts, learner: Learner) -> Comm:
        """Everybody in the group makes it together."""
        ranks = [0, *(mate.number for mate in group)]
        for rank, mate in enumerate(group, 1):
            mate.order({**facts, "rank": rank, "ranks": list(ranks)})
        return joined(self.world, ranks, self.plan)

    def serve(self, agreement: Serving, learner: Learner) -> ShardGroup:
        """Plans that ask for one are refused before."""
        raise CommLost("a parameter server does not live among MPI's ranks")


def joined(world: Any, ranks: list[int], plan: Plan) -> Comm:
    """A group of some ranks, in this order. MPI knows no limit for that, so that another thread looks at the clock."""
    limit = plan.learners.timeout_seconds
    watchdog = threading.Timer(limit, end_all, (world, world.Get_rank(), limit))
    watchdog.daemon = True
    watchdog.start()
    try:
        return MpiComm(world.Create_group(world.Get_group().Incl(ranks)), limit)
    finally:
        watchdog.cancel()


class MpiPeerConnections:
    """A partner's ways to the others."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = mpi().COMM_WORLD

    def join(self, facts: Facts) -> Comm:
        """The group that an order names."""
        return joined(self.world, [int(rank) for rank in facts["ranks"]], self.plan)  # type: ignore[arg-type, union-attr]

    def seats(self, agreement: Serving, learner: Learner, facts: Facts) -> Sequence[ShardConnection]:
        """Plans that ask for a server are refused before."""
        raise CommLost("a parameter server does not live among MPI's ranks")

    def leave(self) -> None:
        """There is nothing to close."""


def is_first(plan: Plan) -> bool:
    """Is this process the one that has the run, and speaks for it? The others of MPI's only learn beside it."""
    if plan.learners.backend != "mpi" or plan.learners.num == 1:
        return True
    return int(mpi().COMM_WORLD.Get_rank()) == 0


def is_partner(plan: Plan) -> bool:
    """Is this process one of the others? Everybody looks whether there are enough."""
    world = mpi().COMM_WORLD
    if (size := world.Get_size()) < plan.learners.num:
        raise UsageError(
            f"learners.num={plan.learners.num}, but MPI has started {size} process{'es' if size > 1 else ''}",
            "With learners.backend=mpi every learner is a process that MPI starts.",
            f"Start as many: mpirun -n {plan.learners.num} qfleet train ...",
        )
    if world.Get_rank() == 0:
        atexit.register(dismiss_all)
    return bool(world.Get_rank())


def dismiss(talk: MpiTransport) -> None:
    """Tell a rank to leave."""
    DISMISSED.add(talk.other)
    talk.say({"kind": "end"})


def dismiss_all() -> None:
    """However rank 0 ends, MPI lets it go only when the others have left too."""
    world = mpi().COMM_WORLD
    for rank in range(1, world.Get_size()):
        if rank not in DISMISSED:
            dismiss(MpiTransport(world, rank))


def learn_beside(make: EnvMaker | None, torso: nn.Module | None, explore: Explore | None) -> None:
    """The life of a rank that is not the first. MPI waits for one that fails: it has to end all others itself."""
    world = mpi().COMM_WORLD
    try:
        live(world, make, torso, explore)
    except QfleetError as error:
        sys.stderr.write(f"rank {world.Get_rank()}: {error}\n")
        world.Abort(error.exit_code)
    except BaseException:
        traceback.print_exc()
        world.Abort(1)


def shown_by(plan: Plan, make: EnvMaker | None) -> Spec:
    """What environments of this plan show: one is made to be looked at."""
    world = make_world(plan.env, seed=plan.seed, stream=TRAIN, num=1, make=make)
    world.close()
    return world.spec


def live(world: Any, make: EnvMaker | None, torso: nn.Module | None, explore: Explore | None) -> None:
    """From the beginning of a run to its end, which rank 0 decides: signals are for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    talk = MpiTransport(world, 0)
    parts = talk.hear(BEGIN_SECONDS)
    if parts is None or parts[0].get("kind") != "begin":
        return  # no run began, or it needs fewer of us
    plan = msgspec.json.decode(parts[1]["plan"].tobytes(), type=Plan)
    shown = shown_by(plan, make)
    spec = policy_spec(shown, make_policy(plan, shown, torch.device("cpu"), torso))
    orders = orders_for(plan, shown, spec, world.Get_rank(), 0, (make, torso, explore))
    partner = LearnerWorker(orders, MpiPeerConnections, talk.say)
    talk.say({"kind": "ready"})
    busy = False
    while True:
        parts = talk.hear(0.0 if busy else LISTEN_SECONDS)
        if parts is not None and parts[0].get("kind") == "end":
            partner.close()
            return
        if parts is not None:
            partner.obey(parts)
        busy = partner.idle()
