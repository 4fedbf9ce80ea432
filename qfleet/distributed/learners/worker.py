"""A learner worker: a learner in another process that makes updates together with the driver's learner."""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import nn

from qfleet.build.make import UserParts, learner_net, make_fresh, make_policy
from qfleet.build.seeds import LAYERS, SYNC, stream
from qfleet.data import Batch, Sequences, Spec
from qfleet.data.array_messages import as_batch, required_field
from qfleet.data.wire_format import Arrays, Facts, Parts
from qfleet.distributed.learners.actor_learner import ActorLearner, make_actor_learner
from qfleet.learn import Learner, NonFiniteUpdate, make_learner
from qfleet.learn.learner import PendingUpdate
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.plan.sync_schema import Sync as SyncPlan
from qfleet.plan.validate.placement import has_actor_learners
from qfleet.sync.average import LogEvent
from qfleet.sync.comm import Comm, CommLost, NoComm
from qfleet.sync.make import make_served, make_sync
from qfleet.sync.process_groups import make_gloo, make_nccl
from qfleet.sync.served import PushRefused, ShardConnection
from qfleet.sync.strategies import GradientCallback, OptimizerStep, Sync, copy_into, flatten_tensors, gradient_callback

MAX_TRIES = 100


@dataclass
class LearnerSetup:
    """Everything a learner worker needs before its first request."""

    plan: bytes  # as JSON
    env_spec: Spec  # of the environments
    spec: Spec  # of the batches
    number: int
    incarnation: int  # which start of this number it is: 0 is the first
    user_parts: UserParts


class PeerConnections(Protocol):
    """How a learner worker reaches other learners and shards."""

    def join(self, facts: Facts) -> Comm:
        """Join the process group that a `form` request describes."""

    def connect_shards(self, sync_plan: Serving, learner: Learner, facts: Facts) -> Sequence[ShardConnection]:
        """Connect to all shards of the parameter server that a `form` request describes."""

    def disconnect_shards(self) -> None:
        """Close the connections to the shards."""


HASHED_PARTS = ("all", "targets", "weights")


class ReplyFunction(Protocol):
    """Sends the reply to the current request."""

    def __call__(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Send it."""


class LearnerWorker:
    """A learner that handles requests; each gets exactly one reply."""

    def __init__(self, setup: LearnerSetup, connect: Callable[[Plan], PeerConnections], reply: ReplyFunction) -> None:
        self.spec = setup.spec
        self.reply = reply
        self.plan = with_device(msgspec.json.decode(setup.plan, type=Plan), setup.number)
        self.connections = connect(self.plan)
        torch.set_num_threads(self.plan.runtime.threads or 1)
        torch.manual_seed(int(stream(self.plan.seed, LAYERS, setup.number).integers(2**63)))
        self.actor_learner: ActorLearner | None = None
        if has_actor_learners(self.plan):
            parts = (setup.env_spec, setup.number, setup.incarnation, setup.user_parts)
            self.actor_learner = make_actor_learner(self.plan, *parts)
            self.learner = self.actor_learner.learner
        else:
            self.learner = build_learner(self.plan, setup.env_spec, setup.spec, setup.user_parts[1])
        self.comm: Comm = NoComm()
        self.sync: Sync | None = None
        self.given_up: Facts = {}  # the report that this learner gave up its codec, if it did

    def handle_request(self, parts: Parts) -> None:
        """Handle one request; if other learners are lost meanwhile, leave the group and reply with the cause."""
        try:
            match required_field(parts[0], "kind"):
                case "form":
                    self.form_group(parts[0])
                case "hash":
                    hashes: Facts = {part: state_hash(self.learner, part) for part in HASHED_PARTS}
                    self.reply({"kind": "hash", **hashes})
                case "read" | "write" | "load" | "reseed":
                    self.transfer_state(parts)
                case _:
                    self.learn(parts)
        except CommLost as cause:
            self.leave_group()
            self.reply({"kind": "lost", "cause": str(cause)})

    def act_when_idle(self) -> bool:
        """With no request to handle, let an actor-learner act; False if there was nothing to do."""
        return self.actor_learner is not None and self.actor_learner.act_when_idle()

    def transfer_state(self, parts: Parts) -> None:
        """Read or restore the actor-learner's state."""
        facts, arrays = parts
        if self.actor_learner is None:
            raise ValueError("only an actor-learner has state to transfer")
        if facts["kind"] == "read":
            piece, more = self.actor_learner.read(str(facts["name"]), int(facts["at"]))  # type: ignore[arg-type]
            self.reply({"kind": "piece", "more": more}, {"bytes": np.frombuffer(piece, np.uint8)})
        elif facts["kind"] == "write":
            self.actor_learner.write(str(facts["name"]), int(facts["at"]), arrays["bytes"].tobytes())  # type: ignore[arg-type]
            self.reply({"kind": "written"})
        elif facts["kind"] == "reseed":
            self.actor_learner.reseed(int(facts["number"]))  # type: ignore[arg-type]
            self.reply({"kind": "reseeded"})
        else:
            facts = {"kind": "loaded", "lost_lanes": self.actor_learner.load_written()}
            self.reply({**facts, **self.actor_learner.last_totals, "instance_id": self.actor_learner.instance_id})

    def leave_group(self) -> None:
        """Close the connections of the current group."""
        self.comm.close()
        self.connections.disconnect_shards()
        self.comm = NoComm()
        self.sync = None
        self.given_up = {}

    def form_group(self, facts: Facts) -> None:
        """Join a new group, and start with rank 0's state."""
        self.leave_group()
        self.comm = self.connections.join(facts)
        broadcast_state(self.learner, self.comm)
        sync_plan = msgspec.json.decode(str(facts["sync"]), type=SyncPlan)
        own = self.learner
        if isinstance(sync_plan, Serving):
            ports = self.connections.connect_shards(sync_plan, own, facts)
            self.sync = make_server_client(
                sync_plan, self.plan.seed, own, ports, self.comm.rank, self.on_strategy_event
            )
        else:
            self.sync = make_strategy(sync_plan, self.plan.seed, own, self.comm)
        formed: Facts = {"kind": "formed", "number": facts["number"], "hash": state_hash(self.learner)}
        if self.actor_learner is None:
            self.reply(formed)
            return
        self.actor_learner.on_joined(facts)
        self.reply(formed | self.actor_learner.env_report())
        self.actor_learner.discard_reported()

    def learn(self, parts: Parts) -> None:
        """Make one update with the others, from the share in the request or from a batch of the own replay."""
        if self.sync is None:
            raise CommLost("not in a group")
        facts = parts[0]
        learner = self.learner
        learner.updates = int(facts["updates"])  # type: ignore[arg-type]
        learner.learning_rate = float(facts["rate"])  # type: ignore[arg-type]
        batch, share = self.batch_for(parts)
        # Before new priorities change the totals.
        env_report = {} if self.actor_learner is None else self.actor_learner.env_report()
        pending, norm, seconds = compute_and_step(learner, batch, share, self.sync.step, gradient_callback(self.sync))
        try:
            learner.finish_shared_update(pending, norm)
        except NonFiniteUpdate:
            finite = False
        else:
            finite = True
            if self.actor_learner is not None:
                self.actor_learner.after_update(batch, pending.report.priority)
        report: Facts = {"kind": "learned", "finite": finite, "seconds": seconds, **self.given_up}
        self.reply(report | env_report, {"priority": pending.report.priority} if self.actor_learner is None else None)
        if self.actor_learner is not None:
            self.actor_learner.discard_reported()

    def on_strategy_event(self, kind: str, **fields: Any) -> None:
        """Keep for the next report that the codec was given up: rank 0 does not see this learner's gradients."""
        if kind == "codec_given_up":
            self.given_up = {"given_up": fields["cosine"]}

    def close(self) -> None:
        """Leave the group, and close the environments."""
        self.leave_group()
        if self.actor_learner is not None:
            self.actor_learner.close()

    def batch_for(self, parts: Parts) -> tuple[Batch | Sequences, float]:
        """The batch of a request, or one from the own replay, and the weight of its gradient."""
        if self.actor_learner is not None:
            return self.actor_learner.draw_batch(parts[0])
        return as_batch(parts, self.spec), float(parts[0]["share"])  # type: ignore[arg-type]


# Shared by the driver and learner workers


def build_learner(plan: Plan, env_spec: Spec, spec: Spec, torso: nn.Module | None) -> Learner:
    """A learner like the driver's, with initial weights of its own."""
    policy = make_policy(plan, env_spec, torch.device(plan.runtime.device or "cpu"), torso)
    return make_learner(plan, spec, learner_net(plan, policy), policy.device, make_fresh(plan, env_spec, torso, 0))


def join_group(plan: Plan, facts: Facts, own: str | None = None) -> Comm:
    """Join the group that a `form` request describes, by gloo or NCCL; `own` is this machine's address."""
    rank, size, number, port = (int(facts[name]) for name in ("rank", "size", "number", "port"))  # type: ignore[arg-type]
    options: dict[str, Any] = {"number": number, "timeout_seconds": plan.learners.timeout_seconds}
    if plan.learners.backend == "nccl":
        return make_nccl(str(facts["address"]), port, rank, size, **options)
    return make_gloo(str(facts["address"]), port, rank, size, **options, own=own)


def with_device(plan: Plan, number: int) -> Plan:
    """The plan of learner `number`: with NCCL each learner has an accelerator of its own."""
    if plan.learners.backend != "nccl":
        return plan
    device = f"cuda:{number % max(1, torch.cuda.device_count())}"
    return msgspec.structs.replace(plan, runtime=msgspec.structs.replace(plan.runtime, device=device))


def broadcast_state(learner: Learner, comm: Comm) -> None:
    """Copy rank 0's weights, target network and moments to all ranks."""
    state = flatten_tensors(learner.synced_tensors())
    comm.broadcast(state)
    copy_into(state, learner.synced_tensors())


def state_hash(learner: Learner, part: str = "all") -> str:
    """A hash of the whole state ("all"), of weights and target network ("targets"), or of the weights."""
    targets = learner.target_tensors if part == "targets" else []
    compared = learner.synced_tensors() if part == "all" else [*learner.online_tensors, *targets]
    return hashlib.sha256(flatten_tensors(compared).cpu().numpy().tobytes()).hexdigest()


def compute_and_step(
    learner: Learner, batch: Batch | Sequences, share: float, step: OptimizerStep, ready: GradientCallback | None = None
) -> tuple[PendingUpdate, float, float]:
    """Compute a gradient and step until no server refuses it as stale; the update, its norm, and seconds to compute."""
    for _ in range(MAX_TRIES):
        started_at = time.perf_counter()
        pending = learner.prepare_shared_update(batch, share, ready)
        seconds = time.perf_counter() - started_at
        with suppress(PushRefused):
            return pending, step(pending.gradients), seconds
    raise CommLost(f"every gradient was too old, {MAX_TRIES} times")


def ignore_event(kind: str, **fields: Any) -> None:
    """Events of a strategy are the same on all ranks; rank 0 logs them."""


def make_server_client(
    plan: Serving,
    seed: int,
    learner: Learner,
    ports: Sequence[ShardConnection],
    rank: int,
    log_event: LogEvent = ignore_event,
) -> Sync:
    """This learner's client of a parameter server."""
    drawn = int(stream(seed, SYNC).integers(2**31))
    options: dict[str, Any] = {"rank": rank, "seed": drawn, "log_event": log_event}
    return make_served(plan, ports, learner.clip, learner.current_rate, learner.parameters, **options)


def make_strategy(
    plan: SyncPlan,
    seed: int,
    learner: Learner,
    comm: Comm,
    step: OptimizerStep | None = None,
    log_event: LogEvent = ignore_event,
) -> Sync:
    """The plan's strategy for this learner; `step` replaces the learner's own step."""
    moments = [tensor for moment in learner.optimizer.moments.values() for tensor in moment]
    drawn = int(stream(seed, SYNC).integers(2**31))
    return make_sync(plan, comm, step or learner.step, learner.parameters, moments, seed=drawn, log_event=log_event)
