"""A partner: a learner that keeps one set of weights with the driver's and the others, wherever it lives."""

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

from qfleet.act import Explore
from qfleet.build.components import LAYERS, SYNC, EnvMaker, learner_net, make_fresh, make_policy, stream
from qfleet.data import Batch, Sequences, Spec
from qfleet.data.array_messages import as_batch, fact
from qfleet.data.wire_format import Arrays, Facts, Parts
from qfleet.distributed.learners.actor_learner import ActorLearner, make_bundle
from qfleet.learn import Learner, NonFiniteUpdate, make_learner
from qfleet.learn.learner import Change
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.plan.sync_schema import Sync as SyncPlan
from qfleet.plan.validate.placement import has_bundles
from qfleet.sync.average import Tell
from qfleet.sync.comm import Comm, CommLost, NoComm
from qfleet.sync.make import make_served, make_sync
from qfleet.sync.process_groups import make_gloo, make_nccl
from qfleet.sync.served import PushRefused, ShardConnection
from qfleet.sync.strategies import Ready, Step, Sync, flat, listener, place

MOST_TRIES = 100


@dataclass
class LearnerSetup:
    """Everything a partner needs to know before its first order."""

    plan: bytes  # as JSON
    shown: Spec  # the world's own
    spec: Spec  # what batches are of
    number: int
    torso: nn.Module | None = None
    # For a bundle: how often the partner was replaced, and what else is the user's own.
    incarnation: int = 0
    make: EnvMaker | None = None
    explore: Explore | None = None


class PeerConnections(Protocol):
    """How a partner reaches the others."""

    def join(self, facts: Facts) -> Comm:
        """The group that an order names."""
        ...

    def seats(self, agreement: Serving, learner: Learner, facts: Facts) -> Sequence[ShardConnection]:
        """The ways to all shards of the server that an order names."""
        ...

    def leave(self) -> None:
        """The ways to the shards are not needed any more."""
        ...


HASHED = ("all", "targets", "weights")


class ReplyFunction(Protocol):
    """A partner's word for an order."""

    def __call__(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Hand it over."""
        ...


class LearnerWorker:
    """A learner, and the orders it obeys: each is answered with one word."""

    def __init__(self, orders: LearnerSetup, ways: Callable[[Plan], PeerConnections], say: ReplyFunction) -> None:
        self.spec = orders.spec
        self.say = say
        self.plan = placed(msgspec.json.decode(orders.plan, type=Plan), orders.number)
        self.ways = ways(self.plan)
        torch.set_num_threads(self.plan.runtime.threads or 1)
        torch.manual_seed(int(stream(self.plan.seed, LAYERS, orders.number).integers(2**63)))
        self.bundle = bundle_for(self.plan, orders) if has_bundles(self.plan) else None
        self.learner = (
            lone_learner(self.plan, orders.shown, orders.spec, orders.torso)
            if self.bundle is None
            else self.bundle.learner
        )
        self.comm: Comm = NoComm()
        self.sync: Sync | None = None
        self.given_up: Facts = {}  # that our codec was, if we judge alone

    def obey(self, parts: Parts) -> None:
        """Join a group, learn, or tell what we have; if the others are lost on the way, say so."""
        try:
            match fact(parts[0], "kind"):
                case "form":
                    self.form(parts[0])
                case "hash":
                    hashes: Facts = {what: state_hash(self.learner, what) for what in HASHED}
                    self.say({"kind": "hash", **hashes})
                case "read" | "write" | "adopt" | "reseed":
                    self.remember(parts)
                case _:
                    self.learn(parts)
        except CommLost as cause:
            self.leave()
            self.say({"kind": "lost", "what": str(cause)})

    def idle(self) -> bool:
        """There is no order: a bundle acts meanwhile. Was there something to do?"""
        return self.bundle is not None and self.bundle.idle()

    def remember(self, parts: Parts) -> None:
        """Tell what our bundle remembers, or take it back."""
        facts, arrays = parts
        if self.bundle is None:
            raise ValueError("only a bundle remembers")
        if facts["kind"] == "read":
            piece, more = self.bundle.read(str(facts["name"]), int(facts["at"]))  # type: ignore[arg-type]
            self.say({"kind": "piece", "more": more}, {"bytes": np.frombuffer(piece, np.uint8)})
        elif facts["kind"] == "write":
            self.bundle.write(str(facts["name"]), int(facts["at"]), arrays["bytes"].tobytes())  # type: ignore[arg-type]
            self.say({"kind": "written"})
        elif facts["kind"] == "reseed":
            self.bundle.reseed(int(facts["number"]))  # type: ignore[arg-type]
            self.say({"kind": "reseeded"})
        else:
            lost = self.bundle.adopt()
            self.say({"kind": "adopted", "lost": lost, **self.bundle.held, "life": self.bundle.life})

    def leave(self) -> None:
        """The group is no more."""
        self.comm.close()
        self.ways.leave()
        self.comm = NoComm()
        self.sync = None
        self.given_up = {}

    def form(self, facts: Facts) -> None:
        """Join the others, and begin where rank 0 is."""
        self.leave()
        self.comm = self.ways.join(facts)
        share_state(self.learner, self.comm)
        agreement = msgspec.json.decode(str(facts["sync"]), type=SyncPlan)
        own = self.learner
        if isinstance(agreement, Serving):
            ports = self.ways.seats(agreement, own, facts)
            self.sync = served_for(agreement, self.plan.seed, own, ports, self.comm.rank, self.note)
        else:
            self.sync = sync_for(agreement, self.plan.seed, own, self.comm)
        word: Facts = {"kind": "formed", "number": facts["number"], "hash": state_hash(self.learner)}
        if self.bundle is not None:
            self.bundle.joined(facts)
            word |= self.bundle.news()
        self.say(word)
        if self.bundle is not None:
            self.bundle.heard()

    def learn(self, parts: Parts) -> None:
        """Take part in an update."""
        if self.sync is None:
            raise CommLost("not in a group")
        facts = parts[0]
        learner = self.learner
        learner.updates = int(facts["updates"])  # type: ignore[arg-type]
        learner.learning_rate = float(facts["rate"])  # type: ignore[arg-type]
        batch, share = self.batch_for(parts)
        news = {} if self.bundle is None else self.bundle.news()  # before priorities change what it holds
        change, norm, seconds = proposed(learner, batch, share, self.sync.step, listener(self.sync))
        try:
            learner.agree(change, norm)
        except NonFiniteUpdate:
            finite = False
        else:
            finite = True
            if self.bundle is not None:
                self.bundle.learned(batch, change.report.priority)
        answer: Facts = {"kind": "learned", "finite": finite, "seconds": seconds, **self.given_up}
        self.say(answer | news, {"priority": change.report.priority} if self.bundle is None else None)
        if self.bundle is not None:
            self.bundle.heard()

    def note(self, kind: str, **fields: Any) -> None:
        """Of what our codec tells, rank 0 must know when it is given up: nobody else sees our gradients."""
        if kind == "codec_given_up":
            self.given_up = {"given_up": fields["cosine"]}

    def close(self) -> None:
        """Leave, and let go of what is ours."""
        self.leave()
        if self.bundle is not None:
            self.bundle.close()

    def batch_for(self, parts: Parts) -> tuple[Batch | Sequences, float]:
        """What an order gives us to learn from, or has us draw, and how much it counts."""
        if self.bundle is not None:
            return self.bundle.draw(parts[0])
        return as_batch(parts, self.spec), float(parts[0]["share"])  # type: ignore[arg-type]


def bundle_for(plan: Plan, orders: LearnerSetup) -> ActorLearner:
    """The environments and the replay that come with a partner."""
    own: dict[str, Any] = {"make": orders.make, "torso": orders.torso, "explore": orders.explore}
    return make_bundle(plan, orders.shown, orders.number, orders.incarnation, **own)


# What driver and partners do alike


def lone_learner(plan: Plan, shown: Spec, spec: Spec, torso: nn.Module | None) -> Learner:
    """A learner as the driver's, before anybody has agreed on anything."""
    policy = make_policy(plan, shown, torch.device(plan.runtime.device or "cpu"), torso)
    return make_learner(plan, spec, learner_net(plan, policy), policy.device, make_fresh(plan, shown, torso, 0))


def join_group(plan: Plan, facts: Facts, own: str | None = None) -> Comm:
    """The group that an order names, by sockets or NCCL; `own` is this machine's address, if not the driver's."""
    rank, size, number, port = (int(facts[name]) for name in ("rank", "size", "number", "port"))  # type: ignore[arg-type]
    how: dict[str, Any] = {"number": number, "limit_seconds": plan.learners.timeout_seconds}
    if plan.learners.backend == "nccl":
        return make_nccl(str(facts["address"]), port, rank, size, **how)
    return make_gloo(str(facts["address"]), port, rank, size, **how, own=own)


def placed(plan: Plan, number: int) -> Plan:
    """The plan of learner `number`: by NCCL everybody has an accelerator of its own."""
    if plan.learners.backend != "nccl":
        return plan
    device = f"cuda:{number % max(1, torch.cuda.device_count())}"
    return msgspec.structs.replace(plan, runtime=msgspec.structs.replace(plan.runtime, device=device))


def share_state(learner: Learner, comm: Comm) -> None:
    """Everybody has what rank 0 has."""
    state = flat(learner.everything())
    comm.broadcast(state)
    place(state, learner.everything())


def state_hash(learner: Learner, what: str = "all") -> str:
    """Equal for learners that are equal in all, in weights and target network, or in weights."""
    targets = learner.target_tensors if what == "targets" else []
    compared = learner.everything() if what == "all" else [*learner.online_tensors, *targets]
    return hashlib.sha256(flat(compared).cpu().numpy().tobytes()).hexdigest()


def proposed(
    learner: Learner, batch: Batch | Sequences, share: float, step: Step, ready: Ready | None = None
) -> tuple[Change, float, float]:
    """What a batch asks for, once it was not refused; the norm of the gradient, and the seconds it took to compute."""
    for _ in range(MOST_TRIES):
        begun = time.perf_counter()
        change = learner.propose(batch, share, ready)
        seconds = time.perf_counter() - begun
        with suppress(PushRefused):
            return change, step(change.gradients), seconds
    raise CommLost(f"every gradient was too old, {MOST_TRIES} times")


def silent(kind: str, **fields: Any) -> None:
    """Rank 0 tells what is worth telling."""


def served_for(
    plan: Serving, seed: int, learner: Learner, ports: Sequence[ShardConnection], rank: int, tell: Tell = silent
) -> Sync:
    """A parameter server's strategy for this learner."""
    who = {"rank": rank}
    drawn = int(stream(seed, SYNC).integers(2**31))
    return make_served(plan, ports, learner.clip, learner.rate, learner.parameters, **who, seed=drawn, tell=tell)


def sync_for(
    plan: SyncPlan, seed: int, learner: Learner, comm: Comm, step: Step | None = None, tell: Tell = silent
) -> Sync:
    """The plan's strategy for this learner, whose own step may be watched."""
    moments = [tensor for moment in learner.optimizer.moments.values() for tensor in moment]
    drawn = int(stream(seed, SYNC).integers(2**31))
    return make_sync(plan, comm, step or learner.step, learner.parameters, moments, seed=drawn, tell=tell)
