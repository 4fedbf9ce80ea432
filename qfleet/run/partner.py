"""A partner: a learner in a process of its own, which keeps one set of weights with the driver's and the others."""

import hashlib
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec
import torch
from torch import nn

from qfleet.data import Spec
from qfleet.data.cargo import as_batch, fact
from qfleet.data.kin import bound_log, die_with_parent
from qfleet.data.wire import Arrays, Facts, Parts
from qfleet.learn import Learner, NonFiniteUpdate, make_learner
from qfleet.plan.schema import Plan
from qfleet.plan.together import Sync as SyncPlan
from qfleet.run.post import logging_to
from qfleet.run.shared import Ring
from qfleet.run.wiring import LAYERS, SYNC, learner_net, make_fresh, make_policy, stream
from qfleet.sync.comm import Comm, CommLost, NoComm
from qfleet.sync.group import make_gloo
from qfleet.sync.make import make_sync
from qfleet.sync.strategies import Step, Sync, flat, place

LISTEN_SECONDS, NAP_SECONDS, SEEN_SECONDS = 1.0, 0.0001, 5.0
BELL = b"!"


@dataclass
class PartnerPost:
    """Everything a partner needs to know."""

    plan: bytes  # as JSON
    shown: Spec  # the world's own
    spec: Spec  # what batches are of
    number: int
    address: str  # of the store where groups meet
    port: int
    orders: Ring
    answers: Ring
    bell: Connection
    torso: nn.Module | None = None
    log: str | None = None


class Talk:
    """One end of what connects the driver and a partner: parcels through rings, and a bell that says so."""

    def __init__(self, out: Ring, into: Ring, bell: Connection) -> None:
        self.out, self.into, self.bell = out, into, bell

    def say(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Hand a parcel over; somebody who does not take what was said before is lost."""
        try:
            if not self.out.put(facts, arrays or {}):
                raise CommLost("what was said before is still waiting")
            self.bell.send_bytes(BELL)
        except OSError as error:
            raise CommLost(str(error)) from error

    def hear(self, limit_seconds: float) -> Parts | None:
        """What was said, within the limit; None if nothing was."""
        try:
            if not self.bell.poll(limit_seconds):
                return None
            self.bell.recv_bytes(len(BELL))
        except (OSError, EOFError) as error:
            raise CommLost(str(error)) from error
        until = time.monotonic() + SEEN_SECONDS
        while (parts := self.into.get()) is None:
            if time.monotonic() > until:
                raise CommLost("a bell without a parcel")
            time.sleep(NAP_SECONDS)
        return parts


def learn_beside(post: PartnerPost) -> None:
    """The life of a partner's process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    with logging_to(post.log), suppress(CommLost):
        Partner(post).run(os.getppid())


class Partner:
    """A learner, and the orders it obeys."""

    def __init__(self, post: PartnerPost) -> None:
        self.post, self.plan = post, msgspec.json.decode(post.plan, type=Plan)
        torch.set_num_threads(self.plan.runtime.threads or 1)
        torch.manual_seed(int(stream(self.plan.seed, LAYERS, post.number).integers(2**63)))
        self.learner = lone_learner(self.plan, post.shown, post.spec, post.torso)
        self.talk = Talk(post.answers, post.orders, post.bell)
        self.comm: Comm = NoComm()
        self.sync: Sync | None = None

    def run(self, parent: int) -> None:
        """Obey until the parent is gone."""
        self.talk.say({"kind": "ready"})
        while os.getppid() == parent:
            if (parts := self.talk.hear(LISTEN_SECONDS)) is not None:
                try:
                    self.obey(parts)
                except CommLost as cause:
                    self.leave()
                    self.talk.say({"kind": "lost", "what": str(cause)})
                bound_log()

    def obey(self, parts: Parts) -> None:
        """Join a group, or learn."""
        if fact(parts[0], "kind") == "form":
            self.form(parts[0])
        else:
            self.learn(parts)

    def leave(self) -> None:
        """The group is no more."""
        self.comm.close()
        self.comm, self.sync = NoComm(), None

    def form(self, facts: Facts) -> None:
        """Join the others, and begin where rank 0 is."""
        self.leave()
        self.comm = join(self.plan, self.post.address, self.post.port, facts)
        share_state(self.learner, self.comm)
        agreement = msgspec.json.decode(str(facts["sync"]), type=SyncPlan)
        self.sync = sync_for(agreement, self.plan.seed, self.learner, self.comm)
        self.talk.say({"kind": "formed", "number": facts["number"], "hash": state_hash(self.learner)})

    def learn(self, parts: Parts) -> None:
        """Take part in an update."""
        if self.sync is None:
            raise CommLost("not in a group")
        facts, learner, begun = parts[0], self.learner, time.perf_counter()
        learner.updates, learner.learning_rate = int(facts["updates"]), float(facts["rate"])  # type: ignore[arg-type]
        change = learner.propose(as_batch(parts, self.post.spec), float(facts["share"]))  # type: ignore[arg-type]
        seconds, finite = time.perf_counter() - begun, True
        try:
            learner.agree(change, self.sync.step(change.gradients))
        except NonFiniteUpdate:
            finite = False
        answer: Facts = {"kind": "learned", "finite": finite, "seconds": seconds, "sent_bytes": self.comm.sent_bytes}
        self.talk.say(answer, {"priority": change.report.priority})


# What driver and partners do alike


def lone_learner(plan: Plan, shown: Spec, spec: Spec, torso: nn.Module | None) -> Learner:
    """A learner as the driver's, before anybody has agreed on anything."""
    policy = make_policy(plan, shown, torch.device(plan.runtime.device or "cpu"), torso)
    return make_learner(plan, spec, learner_net(plan, policy), policy.device, make_fresh(plan, shown, torso, 0))


def join(plan: Plan, address: str, port: int, facts: Facts) -> Comm:
    """The group that an order names."""
    rank, size, number = (int(facts[name]) for name in ("rank", "size", "number"))  # type: ignore[arg-type]
    return make_gloo(address, port, rank, size, number=number, limit_seconds=plan.learners.timeout_seconds)


def share_state(learner: Learner, comm: Comm) -> None:
    """Everybody has what rank 0 has."""
    state = flat(learner.everything())
    comm.broadcast(state)
    place(state, learner.everything())


def state_hash(learner: Learner) -> str:
    """Equal for learners that are equal."""
    return hashlib.sha256(flat(learner.everything()).numpy().tobytes()).hexdigest()


def sync_for(plan: SyncPlan, seed: int, learner: Learner, comm: Comm, step: Step | None = None) -> Sync:
    """The plan's strategy for this learner, whose own step may be watched."""
    moments = [tensor for moment in learner.optimizer.moments.values() for tensor in moment]
    drawn = int(stream(seed, SYNC).integers(2**31))
    return make_sync(plan, comm, step or learner.step, learner.parameters, moments, seed=drawn)
