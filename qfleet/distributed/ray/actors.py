"""The processes that Ray keeps for a run: one in which the whole course runs, and one for each actor.

Ray only carries calls. What it carries of ours are flat parcels that are checked on arrival (`ray_mail`). Who lives,
who is heard and who is replaced is decided by the fleet inside the course, as in every other runtime.
"""

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch import nn

from qfleet.act import Explore
from qfleet.build.components import EnvMaker
from qfleet.data import Rollout, Spec
from qfleet.data.wire_format import lz4_block
from qfleet.distributed.actors.main import ActorSetup, EnvFaultMessage, FinalError, act, logging_to, words_of
from qfleet.distributed.actors.pool import COUNTS, IN_FLIGHT
from qfleet.distributed.actors.weights_board import WeightsLayout, layout_of
from qfleet.distributed.ray.rpc import (
    ActorCounters,
    FlatWeights,
    LearnerEndpoint,
    NoReply,
    RolloutInbox,
    RolloutMessage,
    RolloutReply,
    RolloutSender,
    WeightsView,
)
from qfleet.envs.workers.pool import CLOSE_SECONDS
from qfleet.errors import UsageError
from qfleet.plan.schema import Plan, RayRuntime

ANSWER_SECONDS = 30.0  # until a call counts as lost
WORDS_SECONDS = 2.0
# weights go out at most so often, and in at most this share of the time
SHOW_SECONDS = 0.02
SHOW_SHARE = 0.05
CLOSING_SECONDS = CLOSE_SECONDS + 1.0  # for an actor that was asked to end, to close its environments
USAGE = UsageError.exit_code


@dataclass
class RayActorSetup:
    """What an actor is told when it starts; Ray brings it there."""

    plan: bytes  # as JSON
    worker: int
    incarnation: int
    layout: WeightsLayout
    make: EnvMaker | None
    torso: nn.Module | None
    explore: Explore | None
    log: str | None
    history: str | None


class ActorHost:
    """One actor in a process of its own, on whatever node Ray chose."""

    def act(self, orders: RayActorSetup, learner: Any) -> bytes:
        """Act until told to stop; answers with last words."""
        # The folder of the run need not exist on this node; Ray keeps what is printed there, and nobody what is noted.
        if orders.log is not None and not Path(orders.log).parent.is_dir():
            orders = replace(orders, log=None, history=None)
        with nullcontext() if orders.log is None else logging_to(orders.log):
            try:
                self.serve(orders, learner)
            except BaseException as error:
                return msgspec.msgpack.encode(words_of(error))
        return b""

    def serve(self, orders: RayActorSetup, learner: Any) -> None:
        """The same life as in a process of ours; only the carriers are others."""
        window = WeightsView(orders.layout)
        tally = ActorCounters()
        line = LearnerCalls(learner, orders.worker, orders.incarnation)
        runtime = cast(RayRuntime, msgspec.json.decode(orders.plan, type=Plan).runtime)
        mine, theirs = Pipe(duplex=False)
        squeezed = IN_FLIGHT if runtime.compress else ()
        # One on its way: more of them wait at the other end, and every one that waits is acted by older weights.
        courier = RolloutSender(line.send, line.fetch, window, tally, 1, lambda: waiting_words(mine), squeezed)
        threading.Thread(target=courier.run, name="courier", daemon=True).start()
        post = ActorSetup(
            orders.plan,
            orders.worker,
            orders.incarnation,
            cast(Any, courier),
            cast(Any, window),
            cast(Any, tally),
            theirs,
            *(orders.make, orders.torso, orders.explore),
            log=orders.log,
            history=orders.history,
        )
        act(post)
        if courier.failure is not None:
            raise courier.failure


def waiting_words(words: Connection) -> list[bytes]:
    """What the actor has said since this was last asked."""
    said = []
    while words.poll(0):
        said.append(words.recv_bytes(1 << 16))
    return said


class LearnerCalls:
    """Calls from an actor to the learner."""

    def __init__(self, learner: Any, worker: int, incarnation: int) -> None:
        self.learner = learner
        self.who = (worker, incarnation)

    def send(self, message: RolloutMessage) -> RolloutReply:
        """One round trip."""
        return RolloutReply(*answered(self.learner.put.remote(*self.who, *message)))

    def fetch(self, newer_than: int) -> tuple[int, bytes] | None:
        """The newest weights; each node gets them once, from the object store."""
        found = answered(self.learner.weights.remote(newer_than))
        return None if found is None else (found[0], answered(found[1]))


def answered(call: Any) -> Any:
    """What a call was answered with, if it was in time."""
    try:
        return ray.get(call, timeout=ANSWER_SECONDS)
    except GetTimeoutError as error:
        raise NoReply from error


class RayActorHandle:
    """One incarnation of an actor, as the fleet sees it."""

    def __init__(self, host: Any, life: Any, inbox: RolloutInbox) -> None:
        self.host = host
        self.life = life
        self.inbox = inbox

    def alive(self) -> bool:
        """Has its life not been answered for?"""
        return not ray.wait([self.life], timeout=0)[0]

    def progress(self) -> int:
        """As it said with its last call."""
        return self.inbox.gauges.get("progress", 0)

    def get(self) -> Rollout | None:
        """The oldest rollout in its inbox."""
        return self.inbox.get()

    def ask(self) -> None:
        """Its next call will be answered with "stop"."""
        self.inbox.close()

    def end(self) -> None:
        """Hear it no more, let it close its environments, and end its process."""
        self.inbox.close()
        ray.wait([self.life], timeout=CLOSING_SECONDS)
        ray.kill(self.host, no_restart=True)

    def troubles(self) -> list[dict[str, Any]]:
        """What went wrong in its environments since this was last asked."""
        said = [self.inbox.words.popleft() for _ in range(len(self.inbox.words))]
        return [msgspec.msgpack.decode(words, type=EnvFaultMessage).fault for words in said]

    def last_words(self) -> str:
        """What it said, or how it ended; an error of usage is raised, for another try cannot mend it."""
        try:
            said = ray.get(self.life, timeout=WORDS_SECONDS)
        except GetTimeoutError:
            return "it did not say why"
        except RayActorError as error:
            return "its process ended: " + " ".join(str(error).split())[:300]
        except RayError as error:
            return str(error).strip().splitlines()[-1][:300]
        if not said:
            return "it was told to stop"
        words = msgspec.msgpack.decode(said, type=FinalError)
        if words.exit_code == USAGE:
            raise UsageError(words.what, words.why, words.fix)
        return words.what

    def close(self) -> None:
        """There is nothing else to free."""


class RayActorLauncher:
    """Starts actors on the nodes of a cluster and shows them the weights."""

    def __init__(
        self,
        plan: Plan,
        runtime: RayRuntime,
        spec: Spec,
        weights: Any,
        own: tuple[Any, Any, Any],
        desk: LearnerEndpoint | None,
    ) -> None:
        if runtime.compress:
            lz4_block()  # here, where its absence is told at once
        self.plan = plan
        self.runtime = runtime
        self.spec = spec
        self.own = own
        self.desk = desk or LearnerEndpoint()
        self.hearing = desk is not None
        self.lanes = plan.env.num // plan.actors.num
        self.layout = layout_of(weights)
        self.flat = FlatWeights(self.layout)
        self.next_at = float("-inf")
        self.pending: tuple[int, Any] | None = None  # weights that came too soon after others
        self.before = dict.fromkeys(COUNTS, 0)  # of actors that have been replaced
        self.folder: Path | None = None

    def hire(self, worker: int, incarnation: int) -> RayActorHandle:
        """Start one, with an inbox of its own, on any node that has room."""
        if not self.hearing:
            raise RuntimeError("actors on Ray report to a course that runs on Ray; see qfleet.distributed.ray.driver")
        self.keep_times(worker)
        runtime = self.runtime
        inbox = self.desk.open(
            RolloutInbox(self.spec, self.lanes, runtime.chunk_rows, runtime.slots, source=(worker, incarnation))
        )
        options = {"num_cpus": runtime.actor_cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        host = ray.remote(ActorHost).options(**options).remote()
        log = self.file("logs", f"actor-{worker}.log")
        notes = self.file("history", f"actor-{worker}-{incarnation:06d}.jsonl") if self.plan.log.history else None
        orders = RayActorSetup(msgspec.json.encode(self.plan), worker, incarnation, self.layout, *self.own, log, notes)
        return RayActorHandle(host, host.act.remote(orders, ray.get_runtime_context().current_actor), inbox)

    def file(self, *parts: str) -> str | None:
        """A file in the run's folder, once there is one."""
        return None if self.folder is None else str(self.folder.joinpath(*parts))

    def publish(self, version: int, weights: Any, steps: int) -> None:
        """Show the newest weights; soon, if others were shown a moment ago and somebody is acting by them."""
        self.pending = (version, weights)
        if not any(not inbox.shut for inbox in self.desk.inboxes.values()):
            self.next_at = float("-inf")
        self.tell(steps)

    def tell(self, steps: int) -> None:
        """Show how many steps came in, and weights that are due."""
        self.desk.env_steps = steps
        begin = time.monotonic()
        if self.hearing and self.pending is not None and begin >= self.next_at:
            (version, weights) = self.pending
            self.pending = None
            self.desk.show(version, ray.put(self.flat.parcel(version, weights)))
            now = time.monotonic()
            self.next_at = now + max(SHOW_SECONDS, (now - begin) / SHOW_SHARE)

    def keep_times(self, worker: int) -> None:
        """What the worker's last incarnation said of its time."""
        if (old := self.desk.inboxes.get(worker)) is not None:
            self.before = {name: spent + old.gauges.get(name, 0) for name, spent in self.before.items()}

    def counts(self) -> dict[str, int]:
        """As actors said with their last calls."""
        gauges = [inbox.gauges for inbox in self.desk.inboxes.values()]
        return {name: self.before[name] + sum(own.get(name, 0) for own in gauges) for name in COUNTS}

    def close(self) -> None:
        """Let go of the weights."""
        self.desk.shown = None
