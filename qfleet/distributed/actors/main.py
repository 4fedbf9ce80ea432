"""What an actor does in a process of its own, and the setup it is started with."""

import time
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from select import select as wait_for
from typing import Any

import msgspec
import torch
from torch import nn

from qfleet.act import Explore, run_actor
from qfleet.audit.history import History
from qfleet.build.make import join_policies, make_actor, make_policy
from qfleet.build.worlds import EnvMaker, make_own_world
from qfleet.data import Channel, Rollout, count_steps
from qfleet.data import WeightsBoard as BoardLike
from qfleet.distributed.actors.weights_board import SharedWeightsBoard
from qfleet.plan.schema import InlineRuntime, Plan
from qfleet.system.child_process import limit_log
from qfleet.system.ring import RolloutRing, SharedCounters
from qfleet.system.timers import Stopwatch
from qfleet.system.worker_process import TEXT_BYTES, shortened

NAP_SECONDS = 0.0005
TICK_SECONDS = 0.5
WEIGHTS_SECONDS = 60.0  # the first weights come right after the start
MAX_ERROR_CHARACTERS = 2_000  # of an error in a message: a pipe must hold several


@dataclass
class ActorSetup:
    """The arguments of an actor process."""

    plan: bytes  # as JSON
    worker: int
    incarnation: int
    channel: RolloutRing
    board: SharedWeightsBoard
    counters: SharedCounters
    reports: Connection  # environment faults, to the driver
    make: EnvMaker | None = None
    torso: nn.Module | None = None
    explore: Explore | None = None
    log: str | None = None
    history: str | None = None


class EnvFaultMessage(msgspec.Struct, tag=True):
    """An environment failed; the actor goes on."""

    fault: dict[str, Any]


def report(setup: ActorSetup, message: EnvFaultMessage) -> None:
    """Send a message to the driver, unless the pipe is full because the driver has not read it for a while."""
    if wait_for([], [setup.reports], [], 0)[1]:
        setup.reports.send_bytes(msgspec.msgpack.encode(message))


def act_until_stopped(setup: ActorSetup) -> None:
    """Act until the board says stop."""
    torch.set_num_threads(1)
    plan = msgspec.json.decode(setup.plan, type=Plan)
    board = setup.board
    if isinstance(plan.runtime, InlineRuntime):
        raise TypeError("an inline run has no actor processes")
    device = board.device
    members = range(plan.population.num)
    log = None if setup.log is None else Path(setup.log)
    with closing(make_own_world(plan, setup.worker, setup.incarnation, setup.make, log)) as world:
        policy = join_policies([make_policy(plan, world.spec, device, setup.torso, member) for member in members])
        identity = {"worker": setup.worker, "incarnation": setup.incarnation}
        actor = make_actor(
            plan, world, policy, setup.explore, **identity, exploration_step=lambda: board.numbers()["env_steps"]
        )
        actor.start()
        wait_for_weights(setup)
        channel, weights_board = channels_of(setup)
        watch = Stopwatch()
        for tick in run_actor(actor, channel, weights_board, plan.runtime.chunk_rows, watch):
            report_progress(setup, tick.busy, watch)
            if tick.stats:  # a rollout was sent
                report_times(setup, watch)
                limit_log()
            for fault in tick.stats.get("faults", ()):
                report(setup, EnvFaultMessage({**fault, "cause": shortened(fault["cause"], -2 * TEXT_BYTES)}))
            if board.numbers()["stop"]:
                return


class RecordedChannels:
    """The rollout channel and the weights board of an actor, with their use recorded in a history."""

    def __init__(self, setup: ActorSetup, history: History) -> None:
        self.setup = setup
        self.history = history
        self.identity = {"worker": setup.worker, "incarnation": setup.incarnation}
        self.last_sequence = -1  # recorded last
        self.ticked_at = 0.0

    def tick(self) -> None:
        """Record a sign of life every TICK_SECONDS."""
        if (now := time.monotonic()) - self.ticked_at >= TICK_SECONDS:
            self.ticked_at = now
            self.history.note("actor", "ticked", **self.identity)

    def put(self, rollout: Rollout) -> bool:
        """Send a rollout; False when there is no room."""
        self.tick()
        if rollout.source[2] > self.last_sequence:
            self.last_sequence = rollout.source[2]
            self.history.note("actor", "sent", source=rollout.source, steps=count_steps(rollout))
        return self.setup.channel.put(rollout)

    def get(self) -> Rollout | None:
        """Not used by an actor."""
        return None

    def read(self, newer_than: int) -> tuple[int, Any] | None:
        """The newest weights."""
        self.tick()
        found = self.setup.board.read(newer_than)
        if found is not None:
            self.history.note("actor", "loaded", **self.identity, version=found[0])
        return found

    def publish(self, version: int, weights: Any) -> None:
        """Not used by an actor."""


def channels_of(setup: ActorSetup) -> tuple[Channel, BoardLike]:
    """The channel for rollouts and the board with weights."""
    if setup.history is None:
        return setup.channel, setup.board
    recorded = RecordedChannels(setup, History(Path(setup.history)))
    return recorded, recorded


def report_progress(setup: ActorSetup, busy: bool, watch: Stopwatch) -> None:
    """Count a tick; sleep a moment if it was idle."""
    setup.counters.add(setup.worker, progress=1)
    if not busy:
        setup.counters.add(setup.worker, waits=1)
        with watch.idle:
            time.sleep(NAP_SECONDS)
        report_times(setup, watch)


def report_times(setup: ActorSetup, watch: Stopwatch) -> None:
    """Write the times per stage and compression counts for the driver."""
    stages = {"env_ns": watch.env, "infer_ns": watch.infer, "sync_ns": watch.sync, "wait_ns": watch.idle}
    times = {name: timer.total_ns for name, timer in stages.items()}
    setup.counters.set(setup.worker, **times, **asdict(setup.channel.compression_stats))


def wait_for_weights(setup: ActorSetup) -> None:
    """Wait for the first published weights, at most WEIGHTS_SECONDS."""
    deadline = time.monotonic() + WEIGHTS_SECONDS
    while setup.board.read(0) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no weights were published within {WEIGHTS_SECONDS:g} seconds")
        report_progress(setup, busy=False, watch=Stopwatch())
