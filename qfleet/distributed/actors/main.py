"""What an actor does in a process of its own, and the setup it is started with."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from qfleet.act import run_actor
from qfleet.audit.history import History
from qfleet.build.custom_parts import unpack_parts
from qfleet.build.make import join_policies, make_actor, make_policy
from qfleet.build.worlds import make_own_world
from qfleet.data import Channel, Rollout, WeightsBoard, count_steps
from qfleet.data.array_messages import CompressionStats
from qfleet.distributed.actors.messages import EnvFaultMessage
from qfleet.envs.workers.pool import EnvFault
from qfleet.plan.schema import InlineRuntime, Plan
from qfleet.system.child_process import limit_log
from qfleet.system.timers import Stopwatch
from qfleet.system.worker_process import TEXT_BYTES, shortened

NAP_SECONDS = 0.0005
TICK_SECONDS = 0.5
WEIGHTS_SECONDS = 60.0  # the first weights come right after the start


@dataclass
class ActorSetup:
    """The arguments of an actor, wherever it runs."""

    plan: bytes  # as JSON
    worker: int
    incarnation: int
    custom_parts: bytes  # packed by `pack_parts`
    log: str | None = None
    history: str | None = None


class SentRollouts(Channel, Protocol):
    """The actor's end of the channel for rollouts."""

    @property
    def compression_stats(self) -> CompressionStats:
        """Bytes saved and time spent by compression."""


class ReadBoard(WeightsBoard, Protocol):
    """The actor's view of the weights and the step count that the learner publishes."""

    device: torch.device

    def numbers(self) -> dict[str, int]:
        """`env_steps`: of all actors."""


class ReportedCounters(Protocol):
    """The counters of actors, which the learner reads."""

    def add(self, worker: int, **values: int) -> None:
        """Increase some of the worker's counters."""

    def set(self, worker: int, **values: int) -> None:
        """Set some of the worker's counters."""


@dataclass
class LearnerLinks:
    """How an actor reaches the learner: in shared memory, or by calls on Ray."""

    rollouts: SentRollouts
    board: ReadBoard
    counters: ReportedCounters
    report_fault: Callable[[EnvFaultMessage], object]


def act_until_signalled(arguments: tuple[ActorSetup, LearnerLinks]) -> None:
    """Act in a process of this machine, until SIGTERM."""
    with closing(act(*arguments)) as ticks:
        for _ in ticks:
            pass


def act(setup: ActorSetup, links: LearnerLinks) -> Generator[None, None, None]:
    """Act without an end, one step or wait at a time; the environments are closed with the generator."""
    torch.set_num_threads(1)
    plan = msgspec.json.decode(setup.plan, type=Plan)
    board = links.board
    if isinstance(plan.runtime, InlineRuntime):
        raise TypeError("an inline run has no actor processes")
    parts = unpack_parts(setup.custom_parts)
    members = range(plan.population.num)
    log = None if setup.log is None else Path(setup.log)
    with closing(make_own_world(plan, setup.worker, setup.incarnation, parts.env, log)) as world:
        policy = join_policies([make_policy(plan, world.spec, board.device, parts, member) for member in members])
        identity = {"worker": setup.worker, "incarnation": setup.incarnation}
        actor = make_actor(
            plan, world, policy, parts.explore, **identity, exploration_step=lambda: board.numbers()["env_steps"]
        )
        actor.start()
        yield from wait_for_weights(setup.worker, links)
        channel, weights_board = channels_of(setup, links)
        watch = Stopwatch()
        for tick in run_actor(actor, channel, weights_board, plan.runtime.chunk_rows, watch):
            report_progress(setup.worker, links, tick.busy, watch)
            if tick.stats:  # a rollout was sent
                report_times(setup.worker, links, watch)
                limit_log()
            for fault in tick.stats.get("faults", ()):
                cause = shortened(fault["cause"], -2 * TEXT_BYTES)  # the end of its traceback
                links.report_fault(EnvFaultMessage(EnvFault(**fault | {"cause": cause})))
            yield


class RecordedChannels:
    """The rollout channel and the weights board of an actor, with their use recorded in a history."""

    def __init__(self, setup: ActorSetup, links: LearnerLinks, history: History) -> None:
        self.links = links
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
        return self.links.rollouts.put(rollout)

    def get(self) -> Rollout | None:
        """Not used by an actor."""
        return None

    def read(self, newer_than: int) -> tuple[int, Any] | None:
        """The newest weights."""
        self.tick()
        found = self.links.board.read(newer_than)
        if found is not None:
            self.history.note("actor", "loaded", **self.identity, version=found[0])
        return found

    def publish(self, version: int, weights: Any) -> None:
        """Not used by an actor."""


def channels_of(setup: ActorSetup, links: LearnerLinks) -> tuple[Channel, WeightsBoard]:
    """The channel for rollouts and the board with weights."""
    if setup.history is None:
        return links.rollouts, links.board
    recorded = RecordedChannels(setup, links, History(Path(setup.history)))
    return recorded, recorded


def report_progress(worker: int, links: LearnerLinks, busy: bool, watch: Stopwatch) -> None:
    """Count a tick; sleep a moment if it was idle."""
    links.counters.add(worker, progress=1)
    if not busy:
        with watch.idle:
            time.sleep(NAP_SECONDS)
        report_times(worker, links, watch)


def report_times(worker: int, links: LearnerLinks, watch: Stopwatch) -> None:
    """Write the times per stage and compression counts for the driver."""
    stages = {"env_ns": watch.env, "infer_ns": watch.infer, "sync_ns": watch.sync, "wait_ns": watch.idle}
    times = {name: timer.total_ns for name, timer in stages.items()}
    links.counters.set(worker, **times, **asdict(links.rollouts.compression_stats))


def wait_for_weights(worker: int, links: LearnerLinks) -> Generator[None, None, None]:
    """Wait for the first published weights, at most WEIGHTS_SECONDS."""
    deadline = time.monotonic() + WEIGHTS_SECONDS
    while links.board.read(0) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no weights were published within {WEIGHTS_SECONDS:g} seconds")
        report_progress(worker, links, busy=False, watch=Stopwatch())
        yield
