"""A learner worker: a learner in another process that makes updates together with the driver's learner."""

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import torch

from qfleet.build.custom_parts import CustomParts, unpack_parts
from qfleet.build.make import learner_net, make_custom_learner, make_policy
from qfleet.build.seeds import LAYERS, SYNC, stream
from qfleet.build.threads import operation_threads
from qfleet.data import Batch, Sequences, Spec
from qfleet.data.array_messages import as_batch
from qfleet.data.wire_format import Arrays, Parts
from qfleet.distributed.learners import messages
from qfleet.distributed.learners.actor_learner import ActorLearner, make_actor_learner
from qfleet.distributed.worker.messages import Done, PeerLost
from qfleet.errors import StorageError
from qfleet.learn import Learner, NonFiniteUpdate
from qfleet.learn.learner import PendingUpdate
from qfleet.learn.parameters_hash import parameters_hash
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.plan.sync_schema import Sync as SyncPlan
from qfleet.plan.validate.placement import has_actor_learners
from qfleet.replay import make_replay
from qfleet.sync.average import LogEvent
from qfleet.sync.comm import Comm, CommLost, NoComm
from qfleet.sync.make import make_served, make_sync
from qfleet.sync.process_groups import make_gloo, make_nccl
from qfleet.sync.served import PushRefused, ShardConnection
from qfleet.sync.strategies import GradientCallback, OptimizerStep, Sync, copy_into, flatten_tensors, gradient_callback

if TYPE_CHECKING:
    from qfleet.learn.offline.dataset_source import DatasetSource

MAX_TRIES = 100


@dataclass
class LearnerSetup:
    """Everything a learner worker needs before its first request."""

    plan: bytes  # as JSON
    env_spec: Spec  # of the environments
    spec: Spec  # of the batches
    number: int
    incarnation: int  # which start of this number it is: 0 is the first
    custom_parts: bytes  # packed by `pack_parts`


class PeerConnections(Protocol):
    """How a learner worker reaches other learners and shards."""

    def join(self, request: messages.FormGroup) -> Comm:
        """Join the process group that the request describes."""

    def connect_shards(
        self, sync_plan: Serving, learner: Learner, request: messages.FormGroup
    ) -> Sequence[ShardConnection]:
        """Connect to all shards of the parameter server that the request describes."""

    def disconnect_shards(self) -> None:
        """Close the connections to the shards."""


class LearnerWorker:
    """A learner that handles requests; each gets exactly one reply."""

    def __init__(self, setup: LearnerSetup, connect: Callable[[Plan], PeerConnections]) -> None:
        self.spec = setup.spec
        self.plan = with_device(msgspec.json.decode(setup.plan, type=Plan), setup.number)
        self.connections = connect(self.plan)
        torch.set_num_threads(operation_threads(self.plan) or 1)
        torch.manual_seed(int(stream(self.plan.seed, LAYERS, setup.number).integers(2**63)))
        parts = unpack_parts(setup.custom_parts)
        self.actor_learner: ActorLearner | None = None
        if has_actor_learners(self.plan):
            identity = (setup.env_spec, setup.number, setup.incarnation)
            self.actor_learner = make_actor_learner(self.plan, *identity, parts)
            self.learner = self.actor_learner.learner
        else:
            self.learner = build_learner(self.plan, setup.env_spec, setup.spec, parts)
        self.comm: Comm = NoComm()
        self.sync: Sync | None = None
        self.dataset_source: DatasetSource | None = None  # opened by the first share of a data set
        self.given_up: float | None = None  # the cosine for which this learner gave up its codec, if it did

    def handle(self, message: messages.LearnerRequest, arrays: Arrays) -> Parts:
        """Handle one request; if other learners are lost meanwhile, leave the group and reply with the cause."""
        try:
            match message:
                case messages.FormGroup():
                    return self.form_group(message), {}
                case messages.LearnShare():
                    return self.learn_share(message, arrays)
                case messages.LearnPositions():
                    return self.learn_positions(message, arrays)
                case messages.ReadHashes():
                    hashes = [state_hash(self.learner, part) for part in ("all", "targets", "weights")]
                    return messages.Hashes(*hashes), {}
                case _:
                    return handle_as_actor_learner(self, message, arrays)
        except CommLost as cause:
            self.leave_group()
            return PeerLost(str(cause)), {}

    def work_when_idle(self) -> bool:
        """With no request to handle, let an actor-learner act; False if there was nothing to do."""
        return self.actor_learner is not None and self.actor_learner.act_when_idle()

    def leave_group(self) -> None:
        """Close the connections of the current group."""
        self.comm.close()
        self.connections.disconnect_shards()
        self.comm = NoComm()
        self.sync = None
        self.given_up = None

    def form_group(self, request: messages.FormGroup) -> messages.GroupJoined:
        """Join a new group, and start with rank 0's state."""
        self.leave_group()
        self.comm = self.connections.join(request)
        broadcast_state(self.learner, self.comm)
        own = self.learner
        if isinstance(request.sync, Serving):
            ports = self.connections.connect_shards(request.sync, own, request)
            self.sync = make_server_client(
                request.sync, self.plan.seed, own, ports, self.comm.rank, self.on_strategy_event
            )
        else:
            self.sync = make_strategy(request.sync, self.plan.seed, own, self.comm)
        report = None
        if self.actor_learner is not None:
            self.actor_learner.on_joined(request.updates, request.steps)
            report = self.actor_learner.take_report()
        parameters = parameters_hash(self.learner.online_tensors)
        return messages.GroupJoined(request.number, state_hash(self.learner), parameters, report)

    def begin_update(self, request: messages.LearnShare | messages.LearnPositions | messages.LearnOwn) -> None:
        """Set the learner to where rank 0's is."""
        if self.sync is None:
            raise CommLost("not in a group")
        self.learner.updates = request.updates
        self.learner.learning_rate = request.rate

    def learn_share(self, request: messages.LearnShare, arrays: Arrays) -> Parts:
        """Make one update with the others, from the share in the request."""
        self.begin_update(request)
        pending, seconds, finite = self.update(as_batch(request.form, arrays, self.spec), request.share)
        return messages.Learned(finite, seconds, self.given_up), {"priority": pending.report.priority}

    def learn_positions(self, request: messages.LearnPositions, arrays: Arrays) -> Parts:
        """Make one update with the others, from transitions that this learner reads itself."""
        self.begin_update(request)
        if self.dataset_source is None:
            self.dataset_source = open_own_source(self.plan, self.spec)
        batch = self.dataset_source.batch_at(arrays["positions"])
        pending, seconds, finite = self.update(batch, request.share)
        return messages.Learned(finite, seconds, self.given_up), {"priority": pending.report.priority}

    def learn_own(self, request: messages.LearnOwn, actor_learner: ActorLearner) -> messages.Learned:
        """Make one update with the others, from a batch of the own replay."""
        self.begin_update(request)
        batch, share = actor_learner.draw_batch(request)
        report = actor_learner.report()  # before new priorities change the totals
        pending, seconds, finite = self.update(batch, share)
        if finite:
            actor_learner.batch_source.after_update(batch, pending.report.priority)
        actor_learner.discard_reported()
        return messages.Learned(finite, seconds, self.given_up, report)

    def update(self, batch: Batch | Sequences, share: float) -> tuple[PendingUpdate, float, bool]:
        """Compute and step; the update, seconds to compute, and whether it was finite."""
        if self.sync is None:
            raise CommLost("not in a group")
        learner = self.learner
        pending, norm, seconds = compute_and_step(learner, batch, share, self.sync.step, gradient_callback(self.sync))
        try:
            learner.finish_shared_update(pending, norm)
        except NonFiniteUpdate:
            return pending, seconds, False
        return pending, seconds, True

    def on_strategy_event(self, kind: str, **fields: Any) -> None:
        """Keep for the next report that the codec was given up: rank 0 does not see this learner's gradients."""
        if kind == "codec_given_up":
            self.given_up = float(fields["cosine"])

    def close(self) -> None:
        """Leave the group, and close the environments."""
        self.leave_group()
        if self.actor_learner is not None:
            self.actor_learner.close()
        if self.dataset_source is not None:
            self.dataset_source.close()


def handle_as_actor_learner(worker: LearnerWorker, message: messages.LearnerRequest, arrays: Arrays) -> Parts:
    """Handle a request that only an actor-learner can."""
    own = worker.actor_learner
    if own is None:
        raise ValueError(f"{type(message).__name__} is for actor-learners only")
    match message:
        case messages.LearnOwn():
            return worker.learn_own(message, own), {}
        case messages.ReadFile(name):
            return messages.FileContent(), {"bytes": np.frombuffer(own.read_file(name), np.uint8)}
        case messages.WriteFile(name):
            own.write_file(name, arrays["bytes"].tobytes())
        case messages.Reseed(number):
            own.reseed(number)
        case messages.LoadFiles():
            return messages.FilesLoaded(own.load_written(), own.report()), {}
    return Done(), {}


# Shared by the driver and learner workers


def build_learner(plan: Plan, env_spec: Spec, spec: Spec, parts: CustomParts) -> Learner:
    """A learner like the driver's, with initial weights of its own."""
    policy = make_policy(plan, env_spec, torch.device(plan.runtime.device or "cpu"), parts)
    return make_custom_learner(plan, env_spec, spec, learner_net(plan, policy), policy, parts)


def open_dataset_source(plan: Plan, spec: Spec) -> "DatasetSource":
    """The plan's data set, as rank 0 reads it."""
    from qfleet.learn.offline.dataset_source import make_dataset_source  # an extra, and most runs act

    return make_dataset_source(plan, make_replay(plan, spec, 1, np.random.default_rng(0)))


def open_own_source(plan: Plan, spec: Spec) -> "DatasetSource":
    """The data set as another learner opens it; one that this machine does not reach is an error that says so."""
    try:
        return open_dataset_source(plan, spec)
    except StorageError as error:
        raise StorageError(
            f"a learner on {socket.gethostname()} cannot open the data set: {error.what}",
            f"Every learner reads its part of the data set by the same address. {error.why}",
            "Put the data set where all machines reach it: s3://, hdfs://, or a folder that all mount at one path.",
        ) from error


def join_group(plan: Plan, request: messages.FormGroup, own: str | None = None) -> Comm:
    """Join the group that the request describes, by gloo or NCCL; `own` is this machine's address."""
    place = (request.address, request.port, request.rank, request.size)
    options: dict[str, Any] = {"number": request.number, "timeout_seconds": plan.learners.timeout_seconds}
    return make_nccl(*place, **options) if plan.learners.backend == "nccl" else make_gloo(*place, **options, own=own)


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
