"""A partner: a learner in a process of its own, which keeps one set of weights with the driver's and the others."""

import hashlib
import importlib
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import msgspec
import torch
from torch import nn

from qfleet.data import Batch, Sequences, Spec
from qfleet.data.cargo import as_batch, fact
from qfleet.data.kin import bound_log, die_with_parent
from qfleet.data.region import Region, region_of
from qfleet.data.wire import Arrays, Facts, Parts
from qfleet.learn import Learner, NonFiniteUpdate, make_learner
from qfleet.learn.learner import Change
from qfleet.plan.schema import Plan
from qfleet.plan.together import ServerSync
from qfleet.plan.together import Sync as SyncPlan
from qfleet.run.post import MOST_CHARACTERS, logging_to
from qfleet.run.server import ShardPort
from qfleet.run.shard_post import pair_bytes
from qfleet.run.shared import Ring
from qfleet.run.wiring import LAYERS, SYNC, learner_net, make_fresh, make_policy, stream
from qfleet.sync.average import Tell
from qfleet.sync.comm import Comm, CommLost, NoComm
from qfleet.sync.group import make_gloo
from qfleet.sync.make import make_served, make_sync
from qfleet.sync.served import Refused
from qfleet.sync.shard import cuts_of
from qfleet.sync.shared import SharedComm, region_bytes
from qfleet.sync.strategies import Step, Sync, flat, place

LISTEN_SECONDS, NAP_SECONDS, SEEN_SECONDS = 1.0, 0.0001, 5.0
BELL, MOST_TRIES = b"!", 100


@dataclass
class PartnerPost:
    """Everything a partner needs to know."""

    plan: bytes  # as JSON
    shown: Spec  # the world's own
    spec: Spec  # what batches are of
    number: int
    orders: Ring
    answers: Ring
    bell: Connection
    torso: nn.Module | None = None


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
        except (OSError, ValueError) as error:  # closed, or never to be read
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
    talk = Talk(post.answers, post.orders, post.bell)
    with logging_to(None), suppress(CommLost):
        try:
            Partner(post, talk).run(os.getppid())
        except Exception as error:
            talk.say({"kind": "failed", "what": f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]})
            raise


class Partner:
    """A learner, and the orders it obeys."""

    def __init__(self, post: PartnerPost, talk: Talk) -> None:
        self.post, self.talk = post, talk
        self.plan = msgspec.json.decode(post.plan, type=Plan)
        torch.set_num_threads(self.plan.runtime.threads or 1)
        torch.manual_seed(int(stream(self.plan.seed, LAYERS, post.number).integers(2**63)))
        if self.plan.learners.backend == "gloo":
            importlib.import_module("torch.distributed")  # now, while nobody waits for us in a group
        self.learner = lone_learner(self.plan, post.shown, post.spec, post.torso)
        self.comm: Comm = NoComm()
        self.sync: Sync | None = None
        self.ports: list[ShardPort] = []

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
        """Join a group, learn, or tell what we have."""
        match fact(parts[0], "kind"):
            case "form":
                self.form(parts[0])
            case "hash":
                self.talk.say({"kind": "hash", "hash": state_hash(self.learner)})
            case _:
                self.learn(parts)

    def leave(self) -> None:
        """The group is no more."""
        self.comm.close()
        for port in self.ports:
            port.close()
        self.comm, self.sync, self.ports = NoComm(), None, []

    def form(self, facts: Facts) -> None:
        """Join the others, and begin where rank 0 is."""
        self.leave()
        self.comm = self.joined(facts)
        share_state(self.learner, self.comm)
        agreement, own = msgspec.json.decode(str(facts["sync"]), type=SyncPlan), self.learner
        if isinstance(agreement, ServerSync):
            self.ports = self.seated(agreement)
            self.sync = served_for(agreement, self.plan.seed, own, self.ports, self.comm.rank)
        else:
            self.sync = sync_for(agreement, self.plan.seed, own, self.comm)
        self.talk.say({"kind": "formed", "number": facts["number"], "hash": state_hash(self.learner)})

    def joined(self, facts: Facts) -> Comm:
        """The group that an order names."""
        if (port := int(facts["port"])) > 0:  # type: ignore[arg-type]
            return join_gloo(self.plan, str(facts["address"]), port, facts)
        size, slot = int(facts["size"]), int(facts["slot_bytes"])  # type: ignore[arg-type]
        region, line = self.handed(region_bytes(size, slot))
        how = {"slot_bytes": slot, "limit_seconds": self.plan.learners.timeout_seconds}
        return SharedComm(region, [line], int(facts["rank"]), size, **how)  # type: ignore[arg-type]

    def handed(self, num_bytes: int) -> tuple[Region, socket.socket]:
        """Memory and a line that the driver hands over."""
        handles = []
        for _ in range(2):
            if not self.post.bell.poll(self.plan.learners.timeout_seconds):
                raise CommLost("nothing was handed over")
            handles.append(recv_handle(self.post.bell))
        return region_of(handles[0], num_bytes), socket.socket(fileno=handles[1])

    def seated(self, agreement: ServerSync) -> list[ShardPort]:
        """The ways to all shards, which the driver hands over."""
        found, limit = [], self.plan.learners.timeout_seconds
        for begin, end in cuts_of(sum(weight.numel() for weight in self.learner.parameters), agreement.shards):
            found.append(ShardPort(*self.handed(pair_bytes(end - begin)), end - begin, limit))
        return found

    def learn(self, parts: Parts) -> None:
        """Take part in an update."""
        if self.sync is None:
            raise CommLost("not in a group")
        facts, learner = parts[0], self.learner
        learner.updates, learner.learning_rate = int(facts["updates"]), float(facts["rate"])  # type: ignore[arg-type]
        batch, share, finite = as_batch(parts, self.post.spec), float(facts["share"]), True  # type: ignore[arg-type]
        change, norm, seconds = proposed(learner, batch, share, self.sync.step)
        try:
            learner.agree(change, norm)
        except NonFiniteUpdate:
            finite = False
        answer: Facts = {"kind": "learned", "finite": finite, "seconds": seconds, "sent_bytes": self.comm.sent_bytes}
        self.talk.say(answer, {"priority": change.report.priority})


# What driver and partners do alike


def lone_learner(plan: Plan, shown: Spec, spec: Spec, torso: nn.Module | None) -> Learner:
    """A learner as the driver's, before anybody has agreed on anything."""
    policy = make_policy(plan, shown, torch.device(plan.runtime.device or "cpu"), torso)
    return make_learner(plan, spec, learner_net(plan, policy), policy.device, make_fresh(plan, shown, torso, 0))


def join_gloo(plan: Plan, address: str, port: int, facts: Facts) -> Comm:
    """The group that an order names, by sockets."""
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


def proposed(learner: Learner, batch: Batch | Sequences, share: float, step: Step) -> tuple[Change, float, float]:
    """What a batch asks for, once it was not refused; the norm of the gradient, and the seconds it took to compute."""
    for _ in range(MOST_TRIES):
        begun = time.perf_counter()
        change = learner.propose(batch, share)
        seconds = time.perf_counter() - begun
        with suppress(Refused):
            return change, step(change.gradients), seconds
    raise CommLost(f"every gradient was too old, {MOST_TRIES} times")


def silent(kind: str, **fields: Any) -> None:
    """Rank 0 tells what is worth telling."""


def served_for(
    plan: ServerSync, seed: int, learner: Learner, ports: list[ShardPort], rank: int, tell: Tell = silent
) -> Sync:
    """A parameter server's strategy for this learner."""
    who, drawn = {"rank": rank}, int(stream(seed, SYNC).integers(2**31))
    return make_served(plan, ports, learner.clip, learner.rate, learner.parameters, **who, seed=drawn, tell=tell)


def sync_for(
    plan: SyncPlan, seed: int, learner: Learner, comm: Comm, step: Step | None = None, tell: Tell = silent
) -> Sync:
    """The plan's strategy for this learner, whose own step may be watched."""
    moments = [tensor for moment in learner.optimizer.moments.values() for tensor in moment]
    drawn = int(stream(seed, SYNC).integers(2**31))
    return make_sync(plan, comm, step or learner.step, learner.parameters, moments, seed=drawn, tell=tell)
