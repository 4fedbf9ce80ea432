"""Actors on Ray: a Ray actor process for each, its handle in the pool, and the launcher.

Ray only carries calls; their content is flat array messages, checked on arrival (`rpc`). The actor pool, in the
trainer's process, decides which actors are accepted and replaced, as in every other runtime.
"""

import threading
import time
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
from qfleet.build.worlds import EnvMaker
from qfleet.data import Rollout, Spec
from qfleet.data.wire_format import lz4_block
from qfleet.distributed.actors.launcher import COMPRESSED_COLUMNS, COUNTS, actor_files
from qfleet.distributed.actors.main import ActorSetup, EnvFaultMessage, act_until_stopped
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
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.system.worker_process import FinalError, final_error_of, redirect_output

REPLY_SECONDS = 30.0  # until a call counts as lost
FINAL_ERROR_SECONDS = 2.0
PUBLISH_SECONDS = 0.02  # the least time between two sets of weights
PUBLISH_SHARE = 0.05  # of the time, at most, is spent on publishing
CLOSING_SECONDS = CLOSE_SECONDS + 1.0  # for an actor to close its environments


@dataclass
class RayActorSetup:
    """The arguments of an actor, sent by Ray."""

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
    """The process of one actor, on a node that Ray chose."""

    def run(self, setup: RayActorSetup, trainer: Any) -> bytes:
        """Act until the learner replies "stop"; returns the encoded FinalError, if any."""
        # The run directory need not exist on this node; Ray then keeps the output, and there is no history.
        if setup.log is not None and not Path(setup.log).parent.is_dir():
            setup = replace(setup, log=None, history=None)
        if setup.log is not None:
            redirect_output(setup.log)
        try:
            self.act(setup, trainer)
        except BaseException as error:
            return msgspec.msgpack.encode(final_error_of(error))
        return b""

    def act(self, setup: RayActorSetup, trainer: Any) -> None:
        """Act as in a local process, with a sender, a weights view and counters that use Ray."""
        weights_view = WeightsView(setup.layout)
        counters = ActorCounters()
        calls = LearnerCalls(trainer, setup.worker, setup.incarnation)
        runtime = cast(RayRuntime, msgspec.json.decode(setup.plan, type=Plan).runtime)
        reader, writer = Pipe(duplex=False)
        compress = COMPRESSED_COLUMNS if runtime.compress else ()
        # One rollout waits here: more wait in the inbox, and each that waits was made by older weights.
        sender = RolloutSender(calls.send, calls.fetch, weights_view, counters, 1, lambda: drain_pipe(reader), compress)
        threading.Thread(target=sender.run, name="rollout-sender", daemon=True).start()
        actor_setup = ActorSetup(
            setup.plan,
            setup.worker,
            setup.incarnation,
            cast(Any, sender),
            cast(Any, weights_view),
            cast(Any, counters),
            writer,
            setup.make,
            setup.torso,
            setup.explore,
            setup.log,
            setup.history,
        )
        act_until_stopped(actor_setup)
        if sender.failure is not None:
            raise sender.failure


def drain_pipe(pipe: Connection) -> list[bytes]:
    """All messages waiting in a pipe."""
    messages = []
    while pipe.poll(0):
        messages.append(pipe.recv_bytes(1 << 16))
    return messages


class LearnerCalls:
    """Calls from an actor to the trainer's process."""

    def __init__(self, trainer: Any, worker: int, incarnation: int) -> None:
        self.trainer = trainer
        self.worker_id = (worker, incarnation)

    def send(self, message: RolloutMessage) -> RolloutReply:
        """Send a message; returns the reply."""
        return RolloutReply(*get_reply(self.trainer.receive_rollout.remote(*self.worker_id, *message)))

    def fetch(self, newer_than: int) -> tuple[int, bytes] | None:
        """The newest weights; each node gets them once, from the object store."""
        found = get_reply(self.trainer.weights.remote(newer_than))
        return None if found is None else (found[0], get_reply(found[1]))


def get_reply(call: Any) -> Any:
    """The result of a call; NoReply if it is late."""
    try:
        return ray.get(call, timeout=REPLY_SECONDS)
    except GetTimeoutError as error:
        raise NoReply from error


class RayActorHandle:
    """The handle of one incarnation of an actor on Ray."""

    def __init__(self, host: Any, result: Any, inbox: RolloutInbox) -> None:
        self.host = host
        self.result = result
        self.inbox = inbox

    def alive(self) -> bool:
        """Is its `run` call still under way?"""
        return not ray.wait([self.result], timeout=0)[0]

    def progress(self) -> int:
        """The progress counter in its last message."""
        return self.inbox.counters.get("progress", 0)

    def get(self) -> Rollout | None:
        """The oldest rollout in its inbox."""
        return self.inbox.get()

    def request_stop(self) -> None:
        """Reply "stop" to its next message."""
        self.inbox.close()

    def stop(self) -> None:
        """Close its inbox, wait until it has closed its environments, and kill its process."""
        self.inbox.close()
        ray.wait([self.result], timeout=CLOSING_SECONDS)
        ray.kill(self.host, no_restart=True)

    def env_faults(self) -> list[dict[str, Any]]:
        """Environment faults reported since the last call."""
        messages = [self.inbox.faults.popleft() for _ in range(len(self.inbox.faults))]
        return [msgspec.msgpack.decode(message, type=EnvFaultMessage).fault for message in messages]

    def final_error(self) -> str:
        """The error that the actor returned, or how its process ended; a UsageError is raised."""
        try:
            encoded = ray.get(self.result, timeout=FINAL_ERROR_SECONDS)
        except GetTimeoutError:
            return "it did not report why"
        except RayActorError as error:
            return "its process ended: " + " ".join(str(error).split())[:300]
        except RayError as error:
            return str(error).strip().splitlines()[-1][:300]
        if not encoded:
            return "it was told to stop"
        return msgspec.msgpack.decode(encoded, type=FinalError).message()

    def close(self) -> None:
        """Nothing to free."""


class RayActorLauncher:
    """Starts actors on the nodes of a cluster and publishes weights to them."""

    def __init__(
        self,
        plan: Plan,
        runtime: RayRuntime,
        spec: Spec,
        weights: Any,
        user_parts: tuple[Any, Any, Any],
        endpoint: LearnerEndpoint | None,
    ) -> None:
        if runtime.compress:
            lz4_block()  # fail now, not in the actors, if lz4 is missing
        self.plan = plan
        self.runtime = runtime
        self.spec = spec
        self.user_parts = user_parts
        self.endpoint = endpoint or LearnerEndpoint()
        self.is_connected = endpoint is not None
        self.lanes = plan.env.num // plan.actors.num
        self.layout = layout_of(weights)
        self.flat = FlatWeights(self.layout)
        self.publish_at = float("-inf")
        self.pending: tuple[int, Any] | None = None  # weights to be published later
        self.replaced_counts = dict.fromkeys(COUNTS, 0)
        self.folder: Path | None = None

    def launch(self, worker: int, incarnation: int) -> RayActorHandle:
        """Start an actor with an inbox of its own, on any node that has room."""
        if not self.is_connected:
            raise RuntimeError("actors on Ray need a trainer that runs on Ray; see qfleet.distributed.ray.driver")
        self.keep_counts(worker)
        runtime = self.runtime
        inbox = self.endpoint.open(
            RolloutInbox(self.spec, self.lanes, runtime.chunk_rows, runtime.slots, source=(worker, incarnation))
        )
        options = {"num_cpus": runtime.actor_cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        host = ray.remote(ActorHost).options(**options).remote()
        files = actor_files(self.plan, self.folder, worker, incarnation)
        plan = msgspec.json.encode(self.plan)
        setup = RayActorSetup(plan, worker, incarnation, self.layout, *self.user_parts, *files)
        return RayActorHandle(host, host.run.remote(setup, ray.get_runtime_context().current_actor), inbox)

    def publish(self, version: int, weights: Any, steps: int) -> None:
        """Publish the newest weights: now if no actor runs, else after PUBLISH_SECONDS since the last ones."""
        self.pending = (version, weights)
        if all(inbox.closed for inbox in self.endpoint.inboxes.values()):
            self.publish_at = float("-inf")
        self.publish_steps(steps)

    def publish_steps(self, steps: int) -> None:
        """Publish the number of steps received, and pending weights that are due."""
        self.endpoint.env_steps = steps
        begin = time.monotonic()
        if self.is_connected and self.pending is not None and begin >= self.publish_at:
            version, weights = self.pending
            self.pending = None
            self.endpoint.publish(version, ray.put(self.flat.pack(version, weights)))
            now = time.monotonic()
            self.publish_at = now + max(PUBLISH_SECONDS, (now - begin) / PUBLISH_SHARE)

    def keep_counts(self, worker: int) -> None:
        """Add the counters of the worker's last incarnation to those of replaced actors."""
        if (old := self.endpoint.inboxes.get(worker)) is not None:
            for name in COUNTS:
                self.replaced_counts[name] += old.counters.get(name, 0)

    def counts(self) -> dict[str, int]:
        """The counters of all actors, summed over all incarnations."""
        counters = [inbox.counters for inbox in self.endpoint.inboxes.values()]
        return {name: self.replaced_counts[name] + sum(each.get(name, 0) for each in counters) for name in COUNTS}

    def close(self) -> None:
        """Release the weights."""
        self.endpoint.published = None
