"""An actor's post: what it is told when it starts in a process of its own, and what it does there."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import current_process
from multiprocessing.connection import Connection
from pathlib import Path
from select import select as wait_for
from typing import Any

import msgspec
import torch
from torch import nn

from qfleet.act import Explore, run_actor
from qfleet.audit.history import History
from qfleet.build.components import EnvMaker, make_actor, make_own_world, make_policy, one_policy
from qfleet.data import Channel, Rollout, count_steps
from qfleet.data import WeightsBoard as BoardLike
from qfleet.distributed.actors.weights_board import SharedWeightsBoard
from qfleet.errors import QfleetError
from qfleet.files import open_log
from qfleet.plan.schema import InlineRuntime, Plan
from qfleet.system.child_process import StopRequested, bound_log, die_with_parent
from qfleet.system.descendants import adopt_orphans, end_descendants
from qfleet.system.ring import RolloutRing, SharedCounters
from qfleet.system.timers import Stopwatch

DESCENDANTS_SECONDS = 0.3  # for what environments have started
NAP_SECONDS = 0.0005
TICK_SECONDS = 0.5
WEIGHTS_SECONDS = 60.0  # the first weights come right after the start
MAX_ERROR_CHARACTERS = 2_000  # of a traceback: a pipe is to hold several
# Of each part of a message: a pipe takes up to 4,096 bytes whole or not at all, so nobody stops in the middle of one.
MAX_PART_BYTES = 1_200


@dataclass
class ActorSetup:
    """Everything an actor needs to know."""

    plan: bytes  # as JSON
    worker: int
    incarnation: int
    channel: RolloutRing
    board: SharedWeightsBoard
    counters: SharedCounters
    reports: Connection  # for its last words
    make: EnvMaker | None = None
    torso: nn.Module | None = None
    explore: Explore | None = None
    log: str | None = None
    history: str | None = None
    variables: dict[str, str] = field(default_factory=dict, repr=False)  # those that `env.secrets` names


class EnvFaultMessage(msgspec.Struct, tag=True):
    """An environment of the actor's failed; the actor goes on."""

    fault: dict[str, Any]


class FinalError(msgspec.Struct, tag=True):
    """Why an actor ended by itself: the parts of the error and its exit code; its log has the traceback."""

    what: str
    why: str
    fix: str
    exit_code: int


def report(setup: ActorSetup, reports: EnvFaultMessage | FinalError) -> None:
    """Tell the driver, if there is room: nobody may have listened for a while."""
    if wait_for([], [setup.reports], [], 0)[1]:
        setup.reports.send_bytes(msgspec.msgpack.encode(reports))


def actor_main(setup: ActorSetup) -> None:
    """The life of an actor's process."""
    die_with_parent()
    os.environ.update(setup.variables)
    with suppress(OSError):
        os.setpgid(0, 0)  # what an environment starts is ended with it
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everyone in the terminal; the driver decides
    signal.signal(signal.SIGTERM, on_sigterm)
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have environment workers
    with redirect_output(setup.log):
        try:
            act_until_stopped(setup)
        except Exception as error:
            report(setup, final_error_of(error))
            raise
        finally:
            end_descendants(DESCENDANTS_SECONDS, grace_seconds=0.0)


def on_sigterm(number: int, frame: object) -> None:
    """Asked to end: environments are closed first, and asking again does not disturb that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StopRequested(0)


def act_until_stopped(setup: ActorSetup) -> None:
    """Act until told to stop, or until nobody is left to act for."""
    torch.set_num_threads(1)
    plan = msgspec.json.decode(setup.plan, type=Plan)
    board = setup.board
    if isinstance(plan.runtime, InlineRuntime):
        raise TypeError("an actor with a process of its own has no place in an inline run")
    device = board.device
    members = range(plan.population.num)
    log = None if setup.log is None else Path(setup.log)
    with closing(make_own_world(plan, setup.worker, setup.incarnation, setup.make, log)) as world:
        policy = one_policy([make_policy(plan, world.spec, device, setup.torso, member) for member in members])
        identity = {"worker": setup.worker, "incarnation": setup.incarnation}
        actor = make_actor(plan, world, policy, setup.explore, **identity, elapsed=lambda: board.numbers()["env_steps"])
        actor.start()
        wait_for_weights(setup)
        (channel, shown) = channels_of(setup)
        watch = Stopwatch()
        for tick in run_actor(actor, channel, shown, plan.runtime.chunk_rows, watch):
            report_progress(setup, tick.busy, watch)
            if tick.stats:  # a rollout was handed over
                report_times(setup, watch)
                bound_log()
            for fault in tick.stats.get("faults", ()):
                report(setup, EnvFaultMessage({**fault, "cause": truncated(fault["cause"], -2 * MAX_PART_BYTES)}))
            if board.numbers()["stop"]:
                return


class RecordedChannels:
    """A belt and a board whose use is written down."""

    def __init__(self, setup: ActorSetup, history: History) -> None:
        self.setup = setup
        self.history = history
        self.identity = {"worker": setup.worker, "incarnation": setup.incarnation}
        # the last sequence written down, and when it last said that it lives
        self.noted = -1
        self.ticked_at = 0.0

    def tick(self) -> None:
        """Say about once a second that it lives."""
        if (now := time.monotonic()) - self.ticked_at >= TICK_SECONDS:
            self.ticked_at = now
            self.history.note("actor", "ticked", **self.identity)

    def put(self, rollout: Rollout) -> bool:
        """Hand one over."""
        self.tick()
        if rollout.source[2] > self.noted:
            self.noted = rollout.source[2]
            self.history.note("actor", "sent", source=rollout.source, steps=count_steps(rollout))
        return self.setup.channel.put(rollout)

    def get(self) -> Rollout | None:
        """What an actor never does."""
        return None

    def read(self, newer_than: int) -> tuple[int, Any] | None:
        """The newest weights."""
        self.tick()
        found = self.setup.board.read(newer_than)
        if found is not None:
            self.history.note("actor", "loaded", **self.identity, version=found[0])
        return found

    def publish(self, version: int, weights: Any) -> None:
        """What an actor never does."""


def channels_of(setup: ActorSetup) -> tuple[Channel, BoardLike]:
    """What an actor's rollouts leave by and its weights come by."""
    if setup.history is None:
        return setup.channel, setup.board
    noted = RecordedChannels(setup, History(Path(setup.history)))
    return noted, noted


def report_progress(setup: ActorSetup, busy: bool, watch: Stopwatch) -> None:
    """Between two ticks: a sign of life, and a nap if there was nothing to do."""
    setup.counters.add(setup.worker, progress=1)
    if not busy:
        setup.counters.add(setup.worker, waits=1)
        with watch.idle:
            time.sleep(NAP_SECONDS)
        report_times(setup, watch)


def report_times(setup: ActorSetup, watch: Stopwatch) -> None:
    """Where the time went so far, for the driver to read."""
    stages = {"env_ns": watch.env, "infer_ns": watch.infer, "sync_ns": watch.sync, "wait_ns": watch.idle}
    setup.counters.set(setup.worker, **{name: lap.spent for name, lap in stages.items()}, **asdict(setup.channel.compression_stats))


def wait_for_weights(setup: ActorSetup) -> None:
    """Nobody acts by weights that nobody learned; the wait has a limit."""
    limit = time.monotonic() + WEIGHTS_SECONDS
    while setup.board.read(0) is None:
        if time.monotonic() > limit:
            raise TimeoutError(f"no weights were published within {WEIGHTS_SECONDS:g} seconds")
        report_progress(setup, busy=False, watch=Stopwatch())


def final_error_of(error: BaseException) -> FinalError:
    """What an error has to say to the driver."""
    if isinstance(error, QfleetError):
        return FinalError(truncated(error.what), truncated(error.why), truncated(error.fix), error.exit_code)
    return FinalError(truncated(f"{type(error).__name__}: {error}"), "", "", 1)


def truncated(text: str, most: int = MAX_PART_BYTES) -> str:
    """The first bytes of a text, or the last ones if `most` is negative."""
    said = text.encode(errors="replace")
    return (said[:most] if most > 0 else said[most:]).decode(errors="ignore")


@contextmanager
def redirect_output(file: str | None) -> Iterator[None]:
    """What an environment prints goes to a log, not over the screen."""
    target = open_log(file or os.devnull)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    yield
