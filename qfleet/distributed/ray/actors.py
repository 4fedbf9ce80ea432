"""Actors on Ray: a Ray actor process for each, and the launcher.

Ray only carries calls; their content is flat array messages, checked on arrival (`rpc`). The actor pool, in the
trainer's process, decides which actors are accepted and replaced, as in every other runtime.
"""

import threading
import time
from contextlib import closing
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError

from qfleet.build.custom_parts import CustomParts, pack_parts
from qfleet.data import Spec
from qfleet.data.wire_format import lz4_block, to_bytes, unpack
from qfleet.distributed.actors.handle import ActorHandle
from qfleet.distributed.actors.launcher import COMPRESSED_COLUMNS, COUNTS, actor_files
from qfleet.distributed.actors.main import ActorSetup, LearnerLinks, act
from qfleet.distributed.actors.messages import ActorReply, ActorReport
from qfleet.distributed.actors.weights_board import WeightsLayout, layout_of
from qfleet.distributed.ray import rpc
from qfleet.distributed.ray.nodes import Versions, name_node, require_versions, versions_here
from qfleet.distributed.ray.worker import RayWorker, ResultWatch
from qfleet.envs.workers.pool import CLOSE_SECONDS
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.system.child_process import redirect_output

REPLY_SECONDS = 30.0  # until a call counts as lost
PUBLISH_SECONDS = 0.02  # the least time between two sets of weights
PUBLISH_SHARE = 0.05  # of the time, at most, is spent on publishing
CLOSING_SECONDS = CLOSE_SECONDS + 1.0  # for an actor to close its environments


class ActorHost:
    """The process of one actor, on a node that Ray chose."""

    def run(
        self, setup: ActorSetup, layout: WeightsLayout, compress: tuple[str, ...], trainer: Any, versions: Versions
    ) -> bytes:
        """Act until the learner replies "stop"; returns the encoded FinalError, if any.

        A node with other `versions` than the trainer's does not act.
        """
        # The run directory need not exist on this node; Ray then keeps the output, and there is no history.
        if setup.log is not None and not Path(setup.log).parent.is_dir():
            setup = replace(setup, log=None, history=None)
        if setup.log is not None:
            redirect_output(setup.log)
        try:
            require_versions(versions, versions_here(msgspec.json.decode(setup.plan, type=Plan).env.id))
            self.act(setup, layout, compress, trainer)
        except BaseException as error:
            return msgspec.msgpack.encode(name_node(error))
        return b""

    def act(self, setup: ActorSetup, layout: WeightsLayout, compress: tuple[str, ...], trainer: Any) -> None:
        """Act as in a local process, with links to the learner that use Ray."""
        view = rpc.WeightsView(layout)
        counters = rpc.ActorCounters()
        calls = LearnerCalls(trainer)
        # One rollout waits here: more wait in the inbox, and each that waits was made by older weights.
        sender = rpc.RolloutSender(
            (setup.worker, setup.incarnation), calls.send, calls.fetch, view, counters, slots=1, compress=compress
        )
        threading.Thread(target=sender.run, name="rollout-sender", daemon=True).start()
        with closing(act(setup, LearnerLinks(sender, view, counters, sender.report_fault))) as ticks:
            while not sender.stopped:
                next(ticks)
        if sender.failure is not None:
            raise sender.failure


@dataclass(eq=False)
class LearnerCalls:
    """Calls from an actor to the trainer's process."""

    trainer: Any

    def send(self, report: ActorReport, rollout: bytes) -> ActorReply:
        """Send a report and a packed rollout; returns the reply."""
        reply = get_reply(self.trainer.receive_rollout.remote(to_bytes(report), rollout))
        found: ActorReply = unpack(reply, ActorReply, limit_bytes=rpc.TABLE_BYTES)[0]
        return found

    def fetch(self, newer_than: int) -> tuple[int, bytes] | None:
        """The newest weights; each node gets them once, from the object store.

        The trainer returns a reference of Ray's to them, which cannot be packed into a message.
        """
        found = get_reply(self.trainer.weights.remote(newer_than))
        return None if found is None else (found[0], get_reply(found[1]))


def get_reply(call: Any) -> Any:
    """The result of a call; NoReply if it is late."""
    try:
        return ray.get(call, timeout=REPLY_SECONDS)
    except GetTimeoutError as error:
        raise rpc.NoReply from error


@dataclass(eq=False)
class RayActorLauncher:
    """Starts actors on the nodes of a cluster and publishes weights to them."""

    plan: Plan
    runtime: RayRuntime
    spec: Spec
    weights: InitVar[Any]
    custom_parts: CustomParts
    given_endpoint: InitVar[rpc.LearnerEndpoint | None]
    publish_at: float = float("-inf")
    pending: tuple[int, Any] | None = None  # weights to be published later
    folder: Path | None = None

    def __post_init__(self, weights: Any, given_endpoint: rpc.LearnerEndpoint | None) -> None:
        if self.runtime.compress:
            lz4_block()  # fail now, not in the actors, if lz4 is missing
        self.endpoint = given_endpoint or rpc.LearnerEndpoint()
        self.is_connected = given_endpoint is not None
        self.lanes = self.plan.env.num // self.plan.actors.num
        self.layout = layout_of(weights)
        self.flat = rpc.FlatWeights(self.layout)
        self.replaced_counts = dict.fromkeys(COUNTS, 0)
        self.watch = ResultWatch()
        self.versions = versions_here(self.plan.env.id)

    def launch(self, worker: int, incarnation: int) -> ActorHandle:
        """Start an actor with an inbox of its own, on any node that has room."""
        if not self.is_connected:
            raise RuntimeError("actors on Ray need a trainer that runs on Ray; see qfleet.distributed.ray.driver")
        self.keep_counts(worker)
        runtime = self.runtime
        shape = (self.spec, self.lanes, runtime.chunk_rows, runtime.slots)
        num_info = len(self.plan.log.info)
        inbox = self.endpoint.open(rpc.RolloutInbox(*shape, source=(worker, incarnation), num_info=num_info))
        options = {"num_cpus": runtime.actor_cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        host = ray.remote(ActorHost).options(**options).remote()
        files = actor_files(self.plan, self.folder, worker, incarnation)
        setup = ActorSetup(msgspec.json.encode(self.plan), worker, incarnation, pack_parts(self.custom_parts), *files)
        compress = COMPRESSED_COLUMNS if runtime.compress else ()
        trainer = ray.get_runtime_context().current_actor
        result = host.run.remote(setup, self.layout, compress, trainer, self.versions)
        return ActorHandle(RayWorker(host, result, self.watch), inbox, CLOSING_SECONDS)

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
