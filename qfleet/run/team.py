"""The team: the driver's learner as rank 0, and partners in processes of their own.

Every update is dealt out: a part of the batch to each, gradients (or weights) agreed on by the plan's strategy, and the
priorities joined again. Rank 0 is the truth. Whoever is lost, the others leave the group, form a new one around rank
0's weights and learn the same batch again, unless rank 0 had made its step by then; partners are started anew in the
background and join when they are ready.
"""

import importlib
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from qfleet.data import Array, Batch, Report, Sequences, Spec
from qfleet.data.budget import Budget
from qfleet.data.cargo import batch_parts, blank_batch
from qfleet.data.kin import hidden_main
from qfleet.data.wire import Facts, Parts, packed_bytes
from qfleet.learn import Learner
from qfleet.learn.parts import chosen
from qfleet.plan.schema import Plan
from qfleet.plan.together import ServerSync
from qfleet.plan.together import Sync as SyncPlan
from qfleet.replay import Cut
from qfleet.run.partner import (
    PartnerPost,
    Talk,
    join,
    learn_beside,
    proposed,
    served_for,
    share_state,
    state_hash,
    sync_for,
)
from qfleet.run.processes import fork_server, require_sendable
from qfleet.run.remote_replay import batch_size, window
from qfleet.run.server import Server, ShardPort
from qfleet.run.shared import Ring
from qfleet.sync.comm import Comm, CommLost, NoComm
from qfleet.sync.shard import cuts_of
from qfleet.sync.strategies import Sync, flat, place

ADDRESS = "127.0.0.1"
WINDOW_SECONDS, START_SECONDS, END_SECONDS, GRACE_SECONDS, LISTEN_SECONDS = 600.0, 120.0, 0.5, 5.0, 0.2
ANSWER_BYTES, SLOTS = 4096, 2
SPEED_WEIGHT, BALANCE_UPDATES, WORTH, SLOW = 0.1, 50, 0.1, 0.6
Known: TypeAlias = tuple[Array, Array]  # ids and their priorities


class Mate:
    """One partner's process, as the driver sees it."""

    def __init__(self, process: BaseProcess, post: PartnerPost, talk: Talk, now: float) -> None:
        self.process, self.post, self.talk, self.since = process, post, talk, now
        self.ready = False
        self.dealt: deque[Array] = deque()  # ids of the items it has not answered for yet

    def listen(self, now: float) -> None:
        """Is it ready by now? One that takes too long to start is lost."""
        if self.ready:
            return
        self.ready = self.talk.hear(0.0) is not None
        if not self.process.is_alive() or (not self.ready and now - self.since > START_SECONDS):
            raise CommLost("it did not start")

    def answer(self, kind: str, limit_seconds: float) -> Parts:
        """What it has to say within the limit, which must be of this kind."""
        parts = self.word(limit_seconds)
        if parts[0].get("kind") != kind:
            raise CommLost(str(parts[0].get("what", "it said something else")))
        return parts

    def word(self, limit_seconds: float) -> Parts:
        """Whatever it says within the limit."""
        until = time.monotonic() + limit_seconds
        while time.monotonic() < until and self.process.is_alive():
            if (parts := self.talk.hear(LISTEN_SECONDS)) is not None:
                return parts
        raise CommLost("it does not answer" if self.process.is_alive() else "its process is gone")

    def hand(self, *handles: int) -> None:
        """Hand descriptors over."""
        try:
            for handle in handles:
                send_handle(self.talk.bell, handle, self.process.pid)
        except OSError as error:
            raise CommLost(str(error)) from error

    def end(self) -> None:
        """It is not needed, or not to be relied upon."""
        self.process.kill()
        self.process.join(END_SECONDS)
        self.talk.bell.close()
        self.post.orders.close()
        self.post.answers.close()


class Team:
    """All learners of a run, to their feed as one."""

    def __init__(
        self, plan: Plan, shown: Spec, spec: Spec, cut: Cut, learner: Learner, torso: nn.Module | None = None
    ) -> None:
        self.plan, self.shown, self.spec, self.learner, self.torso = plan, shown, spec, learner, torso
        self.slot_bytes = packed_bytes(*batch_parts(blank_batch(spec, batch_size(plan), *window(cut)))) + ANSWER_BYTES
        self.needs_main = b"__main__" in require_sendable((None, torso, None))
        self.budget = Budget(plan.learners.restarts, WINDOW_SECONDS)
        self.context, self.store = fork_server(), make_store()
        self.mates: dict[int, Mate] = {}
        self.group: list[Mate] = []  # by rank, from 1 on
        self.comm: Comm = NoComm()
        self.sync: Sync | None = None
        self.number = 0  # of groups so far
        self.updates: int | None = None  # after the last one made together
        self.made: list[float] = []  # the norm of this update's gradient, once our own step was made
        self.agreement, self.servers, self.ports = plan.sync, list[Server](), list[ShardPort]()
        self.finite = True  # was the last update?
        self.speeds = Speeds(1, balance=False)
        self.late: list[Known] = []  # priorities that came after their batch
        self.events: list[dict[str, Any]] = []
        for number in range(1, plan.learners.num):
            self.mates[number] = self.hire(number)
        self.await_everybody()

    # Updates

    def update(self, batch: Batch | Sequences) -> Report:
        """One update; it may take several tries, with fewer partners each time."""
        while True:
            try:
                self.tend()
                report = self.update_once(batch) if self.group else self.learner.update_alone(batch)
            except CommLost as cause:
                self.give_up(cause)
                continue
            self.updates = self.learner.updates
            if self.events:
                report.stats["learners"], self.events = self.events, []
            return report

    def update_once(self, batch: Batch | Sequences) -> Report:
        """Deal the batch out, learn, and join what everybody found."""
        owners, late = owners_of(len(batch.ids), self.speeds.shares), self.late
        for rank, mate in enumerate(self.group, 1):
            if len(mate.dealt) == SLOTS:
                self.hear(mate, late)
            part = chosen(batch, owners == rank)
            facts, arrays = batch_parts(part)
            mate.talk.say({**facts, **self.terms(owners, rank)}, arrays)
            mate.dealt.append(part.ids)
        share = share_of(owners, 0, 1 + len(self.group))
        own = chosen(batch, owners == 0)
        change, norm, seconds = proposed(self.learner, own, share, self.agreed)
        self.speeds.note(0, len(own.ids), seconds)
        self.finite = math.isfinite(norm)
        for mate in self.group.copy():
            while mate.dealt and mate in self.group and (self.in_step or mate.talk.bell.poll(0)):
                self.hear(mate, late)
        self.balance()
        change.report.priority = joined(batch.ids, owners, change.report.priority, late)
        report = self.learner.agree(change, norm)
        report.late, self.late = late, []
        return report

    def balance(self) -> None:
        """Let shares follow speeds, and name who is slow."""
        for rank in self.speeds.settle():
            number = 0 if rank == 0 else self.group[rank - 1].post.number
            self.tell("learner_slow", learner=number, share=round(self.speeds.shares[rank] / self.speeds.num, 3))

    def terms(self, owners: Array, rank: int) -> Facts:
        """What a partner must know to take part in this update."""
        share = share_of(owners, rank, 1 + len(self.group))
        return {"updates": self.learner.updates, "rate": self.learner.learning_rate, "share": share}

    def agreed(self, gradients: list[Tensor]) -> float:
        """Make the step; if somebody is lost after our own was made, it counts and the group is over."""
        self.made.clear()
        if self.sync is None:
            raise CommLost("there is no group")
        try:
            return self.sync.step(gradients)
        except CommLost as cause:
            if not self.made:
                raise
            self.give_up(cause)
            return self.made[0]

    def step(self, gradients: list[Tensor]) -> float:
        """Our own step."""
        self.made.append(norm := self.learner.step(gradients))
        return norm

    def hear(self, mate: Mate, late: list[Known]) -> None:
        """A partner's priorities; if it has none to tell, or skipped what others did not, the group begins anew."""
        try:
            facts, arrays = mate.answer("learned", self.plan.learners.timeout_seconds)
            late.append((mate.dealt.popleft(), arrays["priority"]))
            if mate in self.group:
                self.speeds.note(1 + self.group.index(mate), len(arrays["priority"]), float(facts["seconds"]))  # type: ignore[arg-type]
            if facts["finite"] != self.finite and self.in_step:
                self.updates = None
        except (CommLost, KeyError) as cause:
            self.lose(mate, str(cause))

    def switch(self, agreement: SyncPlan) -> None:
        """Agree in another way from the next update on; what a strategy remembers begins anew."""
        self.agreement, self.updates = agreement, None

    @property
    def in_step(self) -> bool:
        """Does everybody make the same update at the same time?"""
        return not (isinstance(self.agreement, ServerSync) and self.agreement.max_staleness != 0)

    def rest(self) -> None:
        """Return when nobody is learning, and rank 0 has everything that there is."""
        for mate in self.group.copy():
            while mate.dealt and mate in self.group:
                self.hear(mate, self.late)
        with suppress(CommLost):  # the next update will find out
            self.gather()

    # Who is there

    def tend(self) -> None:
        """Form a group anew if somebody came or left, or rank 0's weights were replaced."""
        now = time.monotonic()
        for mate in list(self.mates.values()):
            try:
                mate.listen(now)
            except CommLost as cause:
                self.lose(mate, str(cause))
        present = [mate for mate in self.mates.values() if mate.ready]
        if present and (present != self.group or self.updates != self.learner.updates):
            self.form(present)

    def form(self, present: list[Mate]) -> None:
        """A new group of rank 0 and these, who begin where rank 0 is."""
        self.leave()
        self.number, size = self.number + 1, 1 + len(present)
        sync = msgspec.json.encode(self.agreement).decode()
        facts: Facts = {"kind": "form", "number": self.number, "size": size, "sync": sync}
        self.group = present
        for rank, mate in enumerate(present, 1):
            mate.talk.say({**facts, "rank": rank})
        self.comm = join(self.plan, ADDRESS, self.store.port, {**facts, "rank": 0})
        share_state(self.learner, self.comm)
        own = state_hash(self.learner)
        self.sync = self.open_server() if isinstance(self.agreement, ServerSync) else self.open_group()
        for mate in present:
            if mate.answer("formed", self.plan.learners.timeout_seconds)[0]["hash"] != own:
                raise RuntimeError(f"learner {mate.post.number} did not begin with the same weights")
        self.updates, self.speeds = self.learner.updates, Speeds(size, balance=self.plan.learners.balance)
        self.tell("group_formed", number=self.number, learners=size, sync=tag_of(self.agreement))

    def open_group(self) -> Sync:
        """Agree by a group alone."""
        return sync_for(self.agreement, self.plan.seed, self.learner, self.comm, self.step)

    def open_server(self) -> Sync:
        """Start the shards with what rank 0 has, and hand everybody the ways to them."""
        if not isinstance(self.agreement, ServerSync):
            raise TypeError("not an agreement with a server")
        kept, limit = blocks_of(self.learner), self.plan.learners.timeout_seconds
        plan, sync = msgspec.json.encode(self.plan), msgspec.json.encode(self.agreement)
        for begin, end in cuts_of(len(kept[0]), self.agreement.shards):
            server = Server(self.context, plan, sync, end - begin, len(kept) - 1, limit)
            self.servers.append(server)
            for row, whole in zip(server.rows(), kept, strict=True):
                row[:] = whole[begin:end].numpy()
            server.start()
            self.ports.append(ShardPort(*server.seat(0), end - begin, limit))
            for rank, mate in enumerate(self.group, 1):
                region, line = server.seat(rank)
                mate.hand(region.fileno(), line.fileno())
                line.close()
        return served_for(self.agreement, self.plan.seed, self.learner, self.ports, 0)

    def gather(self) -> None:
        """What the shards have, written into rank 0's learner; how stale gradients were is told."""
        if not self.servers:
            return
        told = [server.ask("state") for server in self.servers]
        for at, into in enumerate(parameters_of(self.learner)):
            whole = torch.cat([torch.from_numpy(server.rows()[at].copy()) for server in self.servers])
            if into[0].dim():
                place(whole, into)
            else:
                fill(into, float(whole[0]))
        self.tell("server", versions=[each["version"] for each in told], staleness=told[0]["staleness"])

    def leave(self, *, gather: bool = True) -> None:
        """The group is over."""
        if gather:
            with suppress(CommLost):
                self.gather()
        self.comm.close()
        for port in self.ports:
            port.close()
        for server in self.servers:
            server.end()
        self.comm, self.sync, self.group, self.ports, self.servers = NoComm(), None, [], [], []

    def give_up(self, cause: CommLost) -> None:
        """Somebody is lost: whoever does not say that it noticed, too."""
        group = self.group
        # A shard may hold a gradient of this update, which will be learned again.
        self.leave(gather=False)
        for mate in group:
            mate.dealt.clear()
            try:
                mate.word(GRACE_SECONDS)  # that it is lost, or that it was done before it noticed
            except CommLost as silence:
                self.lose(mate, f"{cause}; {silence}")

    def lose(self, mate: Mate, what: str) -> None:
        """End a partner and start another one in its place, if that is allowed."""
        number = mate.post.number
        if self.mates.get(number) is not mate:
            return
        mate.end()
        del self.mates[number]
        if mate in self.group:
            self.leave()
        again = self.budget.charge(time.monotonic())
        self.tell("learner_lost", learner=number, what=what, replaced=again)
        if again:
            self.mates[number] = self.hire(number)

    def hire(self, number: int) -> Mate:
        """Start a partner's process."""
        bell, theirs = self.context.Pipe()
        plan = msgspec.json.encode(self.plan)
        rings = (Ring(SLOTS, self.slot_bytes), Ring(SLOTS, 4 * batch_size(self.plan) + ANSWER_BYTES))
        post = PartnerPost(plan, self.shown, self.spec, number, ADDRESS, self.store.port, *rings, theirs, self.torso)
        process = self.context.Process(target=learn_beside, args=(post,), name=f"qfleet-learner-{number}", daemon=True)
        with hidden_main(not self.needs_main):
            process.start()
        theirs.close()
        return Mate(process, post, Talk(post.orders, post.answers, bell), time.monotonic())

    def await_everybody(self) -> None:
        """At the start everybody is waited for: a run begins with as many learners as it was asked for."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and not all(mate.ready for mate in self.mates.values()):
            for mate in list(self.mates.values()):
                mate.talk.bell.poll(0.05)
                mate.listen(time.monotonic())

    def tell(self, kind: str, **fields: Any) -> None:
        """Something worth writing down."""
        self.events.append({"kind": kind, **fields})

    def close(self) -> None:
        """End everybody."""
        self.leave()
        for mate in self.mates.values():
            mate.end()
        self.mates.clear()


def make_store() -> Any:
    """Where groups meet: a small server in this process, on this machine only."""
    dist: Any = importlib.import_module("torch.distributed")
    return dist.TCPStore(ADDRESS, 0, None, True, timedelta(seconds=START_SECONDS), wait_for_workers=False)


def parameters_of(learner: Learner) -> list[list[Tensor]]:
    """Weights, then every kind of moment: a tensor of each for every parameter."""
    return [learner.parameters, *learner.optimizer.moments.values()]  # type: ignore[list-item]


def blocks_of(learner: Learner) -> list[Tensor]:  # [D] each
    """Weights and moments as vectors of one length; a count that all parameters share fills its own."""
    weights, *moments = parameters_of(learner)
    whole = flat(weights)
    return [whole, *(flat(each) if each[0].dim() else torch.full_like(whole, float(each[0])) for each in moments)]


@torch.no_grad()
def fill(into: list[Tensor], value: float) -> None:
    """A count for every parameter."""
    for tensor in into:
        tensor.fill_(value)


def joined(ids: Array, owners: Array, own: Array, late: list[Known]) -> Array:  # [N]
    """The priorities of a batch as far as they are known; what was found of it is taken out of `late`."""
    priority = np.full(len(ids), np.nan, np.float32)
    priority[owners == 0] = own
    for rank in range(1, int(owners.max(initial=0)) + 1):
        theirs = ids[owners == rank]
        at = next((at for at, (found, _) in enumerate(late) if np.array_equal(found, theirs)), None)
        if at is not None:
            priority[owners == rank] = late.pop(at)[1]
    return priority


def tag_of(agreement: SyncPlan) -> str:
    """Its type in the plan."""
    return str(agreement.__struct_config__.tag)


def owners_of(items: int, shares: Sequence[float]) -> Array:  # [N]
    """Who learns from each item: in turns as even as the shares allow, so that everybody sees all ages that were drawn.

    Everybody gets one at least: a learner that has none would be waited for in vain.
    """
    learners = len(shares)
    if len(set(shares)) == 1:
        return np.arange(items) % learners
    wanted, got, owners = np.asarray(shares, float) / sum(shares), np.zeros(learners), np.empty(items, np.int64)
    for item in range(items):
        missing = np.flatnonzero(got == 0)
        behind = wanted * (item + 1) - got
        owners[item] = rank = int(missing[0] if len(missing) >= items - item else np.argmax(behind))
        got[rank] += 1
    return owners


def share_of(owners: Array, rank: int, learners: int) -> float:
    """How much this rank's mean gradient counts beside those of the others, which are averaged: 1 for equal parts."""
    return float(np.count_nonzero(owners == rank)) * learners / len(owners)


class Speeds:
    """How fast learners are, and the shares that follow from it; a moving mean, looked at every so many updates."""

    def __init__(self, num: int, *, balance: bool) -> None:
        self.num, self.balance = num, balance
        self.shares = [1.0] * num  # by rank, the mean is 1
        self.speeds: list[float | None] = [None] * num  # items per second
        self.updates = 0

    def note(self, rank: int, items: int, seconds: float) -> None:
        """A rank computed so many items in so many seconds."""
        now, before = items / max(seconds, 1e-9), self.speeds[rank]
        self.speeds[rank] = now if before is None else before + SPEED_WEIGHT * (now - before)

    def settle(self) -> list[int]:
        """After an update: new shares if they are off by a tenth; the ranks that are half as fast as the others."""
        self.updates += 1
        known = [speed for speed in self.speeds if speed is not None]
        if not self.balance or self.updates % BALANCE_UPDATES or len(known) < self.num:
            return []
        mean = sum(known) / self.num
        fair = [speed / mean for speed in known]
        if max(abs(new - old) / old for new, old in zip(fair, self.shares, strict=True)) < WORTH:
            return []
        slow = [rank for rank, share in enumerate(fair) if share <= SLOW and self.shares[rank] > SLOW]
        self.shares = fair
        return slow
