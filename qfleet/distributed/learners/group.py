"""The team: the driver's learner as rank 0, and partners elsewhere (`quarters`).

Every update is dealt out: a part of the batch to each, gradients (or weights) agreed on by the plan's strategy, and the
priorities joined again. Rank 0 is the truth. Whoever is lost, the others leave the group, form a new one around rank
0's weights and learn the same batch again, unless rank 0 had made its step by then; partners are started anew in the
background and join when they are ready.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from qfleet.audit.history import History, HistoryLog, NoHistory
from qfleet.data import Batch, Report, Sequences
from qfleet.data.wire_format import Facts
from qfleet.distributed.learners.actor_learner_state import ActorLearnerFiles, bundle_files
from qfleet.distributed.learners.batch_scatter import BatchScatter, LearnedItems, OwnReplayScatter, SplitScatter
from qfleet.distributed.learners.handle import LearnerHandle, LearnerLost
from qfleet.distributed.learners.launcher import SLOTS, LearnerLauncher, ShardGroup
from qfleet.distributed.learners.shares import Known
from qfleet.distributed.learners.traffic import CountsBytes, Traffic
from qfleet.distributed.learners.worker import proposed, served_for, share_state, state_hash, sync_for
from qfleet.errors import UsageError
from qfleet.learn import BatchSource, Learner
from qfleet.nets import draws
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import AllreduceSync, Codec, Coded, NoCodec, ServerSync, Serving, sends_steps
from qfleet.plan.sync_schema import Sync as SyncPlan
from qfleet.sync.comm import Comm, CommLost, NoComm
from qfleet.sync.served import ServerClient
from qfleet.sync.strategies import Sync, listener
from qfleet.system.restart_budget import RestartBudget

WINDOW_SECONDS = 600.0
START_SECONDS = 120.0
GRACE_SECONDS = 5.0
RELEASE_SECONDS = 0.02
ADOPT_TRIES = 2


class LearnerGroup:
    """All learners of a run, to their feed as one."""

    def __init__(
        self, plan: Plan, learner: Learner, quarters: LearnerLauncher, batch_source: BatchSource | None = None
    ) -> None:
        require_place(plan, learner)
        self.plan = plan
        self.learner = learner
        self.quarters = quarters
        self.batch_source = batch_source  # our own bundle's, if every learner has one
        self.budget = RestartBudget(plan.learners.restarts, WINDOW_SECONDS)
        self.mates: dict[int, LearnerHandle] = {}
        self.group: list[LearnerHandle] = []  # by rank, from 1 on
        self.comm: Comm = NoComm()
        self.sync: Sync | None = None
        self.servers: ShardGroup | None = None
        self.history: HistoryLog = NoHistory()
        # how the next group agrees, and how many there have been
        self.agreement = plan.sync
        self.number = 0
        self.formed = plan.sync  # how this group does
        self.mistrusted: set[Codec] = set()  # that were given up
        self.stale = True  # must a group be formed before the next update, whoever is there?
        self.updates, self.dealt_at = 0, 0.0  # after the last one made together; when the last one was dealt out
        self.made: list[float] = []  # the norm of this update's gradient, once our own step was made
        self.pushing = False  # is a gradient of ours on its way to a server?
        self.finite = True  # was the last update?
        self.late: list[Known] = []  # priorities that came after their batch
        self.tally = LearnedItems()
        self.traffic = Traffic()
        self.dealing: BatchScatter = SplitScatter(1, self.late, balance=False)
        self.events: list[dict[str, Any]] = []
        self.noted: set[tuple[int, str]] = set()  # what was told of bundles
        self.num = 1
        self.losses = 0
        self.begun = False
        try:
            self.resize(plan.learners.num)
            self.await_everybody()
        except BaseException:
            self.close()  # nobody else knows of them
            raise
        self.begun = True

    # Updates

    def update(self, batch: Batch | Sequences) -> Report:
        """One update; it may take several tries, with fewer partners each time."""
        while True:
            try:
                self.tend()
                self.traffic.begin(self.ways())
                report = self.update_once(batch) if self.group else self.update_alone(batch)
            except CommLost as cause:
                self.give_up(cause)
                continue
            self.traffic.end()
            self.updates = self.learner.updates
            if "reset" in report.stats and not isinstance(self.agreement, AllreduceSync):
                self.renounce()  # shards, centres and duals know nothing of it: all begin with what rank 0 has
            return report

    def ways(self) -> list[CountsBytes]:
        """From rank 0 to the others."""
        return [self.comm, *(self.sync.ports if isinstance(self.sync, ServerClient) else ())]

    def update_alone(self, batch: Batch | Sequences) -> Report:
        """By rank 0 only, because nobody else is there."""
        report = self.learner.update_alone(batch)
        items = len(batch.ids)
        self.history.note("team", "made", group=0, update=self.learner.updates, own=items, items=items, finite=True)
        return report

    def update_once(self, batch: Batch | Sequences) -> Report:
        """Deal the batch out, learn, and join what everybody found."""
        if self.learner.reset is not None and self.learner.reset.due(self.learner.updates + 1):
            self.rest()  # it also changes moments, which a server may have
        self.make_room()
        # the group may be over when the step was made
        dealing = self.dealing
        number = self.number
        self.dealt_at = time.monotonic()
        own, share = dealing.begin(batch)
        for rank, mate in enumerate(self.group, 1):
            self.deal(mate, rank)
        change, norm, seconds = proposed(self.learner, own, share, self.agreed, listener(self.sync))
        self.finite = math.isfinite(norm)
        self.note_made(number, len(own.ids), dealing.items)
        dealing.timed(0, len(own.ids), seconds)
        for mate in self.group.copy():
            while mate.dealt and mate in self.group and (self.in_step or mate.talk.waits(0.0)):
                self.hear(mate)
        self.balance()
        report = self.learner.agree(change, norm)
        dealing.finish(report)
        return report

    def make_room(self) -> None:
        """Hear who has two parts already. One that turns out to be lost is so before a part of this batch is dealt out:
        what a server has by then is taken along, and nothing of the batch is among it when it is dealt out again.
        """
        for mate in self.group.copy():
            if len(mate.dealt) == SLOTS:
                self.hear(mate)
            if mate not in self.group:
                raise CommLost("the group is over")

    def deal(self, mate: LearnerHandle, rank: int) -> None:
        """Give a partner its part."""
        facts, arrays, ids = self.dealing.order(rank)
        dealt = {"update": self.learner.updates + 1, "learner": mate.number, "items": len(ids)}
        self.history.note("team", "dealt", group=self.number, **dealt)
        mate.dealt.append(ids)
        try:
            mate.order({**facts, "updates": self.learner.updates, "rate": self.learner.learning_rate}, arrays)
        except CommLost:
            if self.in_step:
                raise
            # Others may have pushed their part already: the batch counts, and who is gone is heard of after our step.

    def agreed(self, gradients: list[Tensor]) -> float:
        """Make the step; if somebody is lost after our own was made, it counts and the group is over."""
        self.made.clear()
        if self.sync is None:
            raise CommLost("there is no group")
        self.pushing = self.servers is not None
        try:
            norm = self.sync.step(gradients)
        except CommLost as cause:
            if not self.made:
                raise
            self.give_up(cause)
            return self.made[0]
        self.pushing = False
        return norm

    def step(self, gradients: list[Tensor]) -> float:
        """Our own step."""
        self.made.append(norm := self.learner.step(gradients))
        return norm

    def hear(self, mate: LearnerHandle) -> None:
        """A partner's priorities. If it has none to tell the group is over; if it alone skipped, it begins anew."""
        try:
            facts, arrays = mate.answer("learned", self.patience)
        except LearnerLost as cause:
            self.lose(mate, str(cause))
            return
        except CommLost as cause:
            self.give_up(cause)
            return
        ids = mate.dealt.popleft()
        finite = bool(facts["finite"])
        self.history.note("team", "learned", group=self.number, learner=mate.number)
        self.dealing.heard(1 + self.group.index(mate), ids, (facts, arrays))
        if facts.get("behind"):
            self.note_inexact(mate, "it acts too slowly to keep pace")
        if "given_up" in facts:
            self.tell("codec_given_up", learner=mate.number, cosine=facts["given_up"])
        self.stale = self.stale or (self.in_step and finite != self.finite)

    def note_formed(self) -> None:
        """A group begins."""
        sync = self.formed
        learners = [mate.number for mate in self.group]
        how = {"in_step": self.in_step, "exact": not (isinstance(sync, ServerSync) and sync.spare)}
        self.history.note("team", "formed", group=self.number, learners=learners, updates=self.learner.updates, **how)

    def note_made(self, group: int, own: int, items: int) -> None:
        """An update was made, if its numbers are finite."""
        update = self.learner.updates + 1
        self.history.note("team", "made", group=group, update=update, own=own, items=items, finite=self.finite)

    def balance(self) -> None:
        """Let shares follow speeds, and name who is slow."""
        for rank, speed in self.dealing.slow() if self.group else ():
            number = 0 if rank == 0 else self.group[rank - 1].number
            self.tell("learner_slow", learner=number, speed=round(speed, 3))

    # What the rest of a run asks of it

    def switch(self, agreement: SyncPlan) -> None:
        """Agree in another way from the next update on; what a strategy remembers begins anew."""
        self.agreement = self.trusted(agreement)
        self.stale = True

    def resize(self, num: int) -> None:
        """Be so many from now on: who is new joins when ready, who is too many leaves at once."""
        for number in range(num, self.num):
            if (mate := self.mates.pop(number, None)) is not None:
                if mate in self.group:
                    self.leave()
                mate.life.end()
                self.tell("learner_left", learner=number)
        for number in range(self.num, num):
            self.hire(number)
        self.num = num

    def hire(self, number: int) -> None:
        """Start a partner; it joins when it is ready. No seed decides those that come later: each is another one."""
        incarnation = 1 + secrets.randbelow(2**31) if self.begun else 0
        self.mates[number] = self.quarters.hire(number, incarnation)

    def rest(self) -> None:
        """Return when nobody is learning, and rank 0 has everything that there is."""
        try:
            for mate in self.group.copy():
                while mate.dealt and mate in self.group:
                    self.release(mate)
                    self.hear(mate)
            self.gather()
        except CommLost as cause:
            self.give_up(cause)

    def release(self, mate: LearnerHandle) -> None:
        """One that was slow may wait for a step of ours, which does not come now: let it go on without."""
        sync = self.formed
        until = time.monotonic() + self.patience
        if self.servers is None or not isinstance(sync, ServerSync) or not sync.spare:
            return
        while not mate.talk.waits(RELEASE_SECONDS) and mate.life.is_alive() and time.monotonic() < until:
            self.servers.release()

    def forget(self) -> None:
        """The run goes back: what anybody else has, or has told of the time since, is of no use."""
        self.renounce()
        self.tally.forget()

    def renounce(self) -> None:
        """Rank 0's weights were replaced: what anybody else has is of no use."""
        group = self.group
        self.leave(gather=False)
        self.await_words(group)  # before the steps they tell of are forgotten, or set back
        self.late.clear()

    def take_sent_bytes(self) -> float | None:
        """What an update had us send, in bytes, since this was last asked."""
        return self.traffic.take()

    def take_events(self) -> list[dict[str, Any]]:
        """What happened since this was last asked."""
        taken = self.events
        self.events = []
        return taken

    # What bundles remember

    @property
    def steps(self) -> int:
        """Steps that other learners have made in environments of their own."""
        return self.tally.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.tally.steps = steps

    def meet(self) -> None:
        """Bundles act by rank 0's weights from the first step on."""
        if self.batch_source is not None:
            try:
                self.tend()
            except CommLost as cause:
                self.give_up(cause)

    def archive(self) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """What every bundle remembers, in files; one that is lost meanwhile has no more of them."""
        if self.batch_source is None:
            return
        self.await_words(list(self.mates.values()))
        for mate in list(self.mates.values()):
            if mate.ready:
                yield from ActorLearnerFiles(mate, self.patience, self.lose).files()

    def adopt(self, names: Sequence[str], read: Callable[[str], bytes]) -> None:
        """Let bundles go on with what these files hold; one that has no whole set of them goes on as it is."""
        if self.batch_source is None:
            return
        self.await_words(list(self.mates.values()))
        for number in list(self.mates):
            for _ in range(ADOPT_TRIES):  # one that is lost on the way is replaced
                self.await_everybody()
                if number not in self.mates or self.give_back(self.mates[number], names, read):
                    break

    def give_back(self, mate: LearnerHandle, names: Sequence[str], read: Callable[[str], bytes]) -> bool:
        """Let one bundle go on with its files: is it there afterwards?"""
        if not (files := bundle_files(names, mate.number)):
            self.note_inexact(mate, "the checkpoint holds nothing of its replay")
            return True
        what = ActorLearnerFiles(mate, self.patience, self.lose).write(files, read, self.tally)
        if what is not None:
            self.note_inexact(mate, what)
        return self.mates.get(mate.number) is mate

    def reseed(self, number: int) -> None:
        """Let bundles draw other batches from here on."""
        present = [mate for mate in self.mates.values() if mate.ready and self.batch_source is not None]
        for mate in present:  # one that is still starting has seeds of its own
            try:
                mate.order({"kind": "reseed", "number": number})
                mate.answer("reseeded", self.patience)
            except CommLost as cause:
                self.lose(mate, str(cause))

    def note_inexact(self, mate: LearnerHandle, what: str) -> None:
        """Something with a bundle is not as the seed decides; told once."""
        if (mate.number, what) not in self.noted:
            self.noted.add((mate.number, what))
            self.tell("bundle_inexact", learner=mate.number, what=what)

    # What is promised

    def doubts(self) -> list[str]:
        """Why a run that goes on from a checkpoint is not the one that its seed decides."""
        agreed = self.agreement
        same = isinstance(agreed, AllreduceSync) and isinstance(agreed.codec, NoCodec) and not sends_steps(agreed)
        reasons = ((not same, f"learners that agree by {tag_of(self.agreement)} begin anew from the saved weights"),)
        anew = self.batch_source is None and draws(self.plan.net)  # a bundle's generator is in its files
        drawing = anew or self.plan.learners.balance
        return [text for holds, text in (*reasons, (drawing, "partners draw anew, or share by the clock")) if holds]

    def chances(self) -> list[str]:
        """Why no seed decides what this run becomes, even if it is never interrupted."""
        loose = f"learners that agree by {tag_of(self.agreement)} do not wait for each other"
        reasons = ((not keeps_step(self.agreement), loose), (self.plan.learners.balance, "learners share by the clock"))
        return [text for holds, text in reasons if holds]

    def alike(self, what: str = "all") -> bool:
        """Does everybody in the group have the same weights, target network ("targets") and moments ("all")?"""
        self.rest()
        for mate in self.group:
            mate.order({"kind": "hash"})
        own = state_hash(self.learner, what)
        return all(mate.answer("hash", self.patience)[0][what] == own for mate in self.group)

    def settle(self, folder: Path) -> None:
        """The run's folder is here: who keeps a history keeps it there."""
        if self.plan.log.history:
            self.history = History(folder / "history" / "team.jsonl")
            self.history.note("team", "began", group=0)

    def close(self) -> None:
        """End everybody."""
        self.leave(gather=False)
        self.history.close()
        for mate in self.mates.values():
            mate.life.end()
        self.mates.clear()

    # Who is there

    @property
    def in_step(self) -> bool:
        """Does everybody make the same update at the same time?"""
        return keeps_step(self.formed)

    @property
    def patience(self) -> float:
        """How long a word may take of somebody who waits for others itself."""
        return self.plan.learners.timeout_seconds + GRACE_SECONDS

    def tend(self) -> None:
        """Form a group anew if somebody came or left, or rank 0's weights were replaced."""
        self.look_around()
        present = [mate for mate in self.mates.values() if mate.ready]
        if present and (self.stale or present != self.group or self.updates != self.learner.updates):
            self.form(present)

    def look_around(self) -> None:
        """See who is ready, and who is gone."""
        for mate in list(self.mates.values()):
            try:
                mate.listen(time.monotonic())
            except CommLost as cause:
                self.lose(mate, str(cause))

    def form(self, present: list[LearnerHandle]) -> None:
        """A new group of rank 0 and these, who begin where rank 0 is."""
        self.leave()
        self.await_words(present)
        if any(self.mates.get(mate.number) is not mate for mate in present):
            raise CommLost("somebody was lost before the group was formed")
        self.number = self.number + 1
        size = 1 + len(present)
        self.group, self.dealing, self.formed = present, self.dealing_for(size), self.agreement
        self.note_formed()
        if isinstance(self.agreement, Serving):
            self.servers = self.quarters.serve(self.agreement, self.learner)
        sync = msgspec.json.encode(self.agreement).decode()
        self.dealt_at = time.monotonic()
        facts: Facts = {"kind": "form", "number": self.number, "size": size, "sync": sync}
        facts |= {"updates": self.learner.updates, "steps": self.all_steps()}
        self.comm = self.quarters.meet(present, facts | (self.servers.facts if self.servers else {}), self.learner)
        share_state(self.learner, self.comm)
        self.sync = self.opened()
        self.require_alike(present)
        self.updates = self.learner.updates
        self.stale = False
        self.dealt_at = time.monotonic()
        self.tell("group_formed", number=self.number, learners=size, sync=tag_of(self.agreement))

    def dealing_for(self, size: int) -> BatchScatter:
        """Who learns from what in a group of so many."""
        if self.batch_source is None:
            return SplitScatter(size, self.late, balance=self.plan.learners.balance)
        return OwnReplayScatter(size, self.tally, self.batch_source.replay.stock, self.all_steps)

    def all_steps(self) -> int:
        """Steps of all bundles, our own too."""
        return self.steps + (0 if self.batch_source is None else self.batch_source.steps)

    def opened(self) -> Sync:
        """Rank 0's end of the strategy; with a server everybody is handed the ways to it."""
        if self.servers is None or not isinstance(self.agreement, Serving):
            return sync_for(self.agreement, self.plan.seed, self.learner, self.comm, self.step, self.tell)
        ports = self.servers.seat(0)
        self.servers.invite(self.group)
        return served_for(self.agreement, self.plan.seed, self.learner, ports, 0, self.tell)

    def require_alike(self, present: list[LearnerHandle]) -> None:
        """Everybody has begun with the same weights, target network and moments."""
        own = state_hash(self.learner)
        for rank, mate in enumerate(present, 1):
            facts, _ = mate.answer("formed", self.patience)
            if facts["hash"] != own:
                raise RuntimeError(f"learner {mate.number} did not begin with the same weights")
            self.dealing.welcome(rank, facts)

    def gather(self) -> None:
        """What the shards have, written into rank 0's learner; how stale gradients were is told."""
        if self.servers is not None:
            held = self.servers.gather(self.learner)
            if isinstance(self.sync, ServerClient):
                self.sync.versions = list(held["versions"])  # the next gradient is of these weights
            self.tell("server", **held)
            self.history.note("team", "held", group=self.number, versions=held["versions"], taken=held["taken"])

    def leave(self, *, gather: bool = True) -> None:
        """The group is over; what shards have is taken along if nothing of ours may be among it twice."""
        if gather and not self.pushing:
            with suppress(CommLost):
                self.gather()
        self.comm.close()
        if self.servers is not None:
            self.servers.close()
        self.comm = NoComm()
        self.sync = None
        self.servers = None
        self.group = []
        self.stale = True
        self.pushing = False

    def give_up(self, cause: CommLost) -> None:
        """Somebody is lost: the group is over, and whoever does not say so in time is lost too."""
        if not self.group:
            return  # it was over before, and whoever was lost has been charged for
        group = self.group
        before = self.losses
        self.leave()
        # Whoever is well has heard that the group is over, or does so when what it was dealt is computed.
        self.await_words(group, str(cause), max(self.dealt_at + self.patience, time.monotonic() + GRACE_SECONDS))
        self.look_around()
        if self.losses > before:
            return
        self.tell("group_failed", what=str(cause))
        if not self.budget.charge(time.monotonic()):
            self.tell("learners_given_up", what=str(cause))
            for mate in list(self.mates.values()):
                self.lose(mate, str(cause), again=False)

    def await_words(self, mates: list[LearnerHandle], cause: str = "", until: float | None = None) -> None:
        """Hear what these owe us; who does not speak in time is lost."""
        until = time.monotonic() + self.patience if until is None else until
        for mate in mates:
            try:
                for facts, _ in mate.settle(max(0.0, until - time.monotonic())):
                    if "life" in facts:
                        self.tally.count(facts)
            except CommLost as silence:
                self.lose(mate, f"{cause}; {silence}" if cause else str(silence))

    def lose(self, mate: LearnerHandle, what: str, *, again: bool = True) -> None:
        """End a partner and start another one in its place, if that is allowed."""
        number = mate.number
        if self.mates.get(number) is not mate:
            return
        self.losses += 1
        what = mate.cause(what)  # before it is ended here
        mate.life.end()
        del self.mates[number]
        if mate in self.group:
            self.leave()
        again = again and self.quarters.replaces and self.budget.charge(time.monotonic())
        self.tell("learner_lost", learner=number, what=what, replaced=again)
        if again:
            self.hire(number)

    def await_everybody(self) -> None:
        """At the start everybody is waited for: a run begins with as many learners as it was asked for."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and not all(mate.ready for mate in self.mates.values()):
            for mate in list(self.mates.values()):
                if not mate.ready:
                    mate.talk.waits(0.05)
            self.look_around()

    def tell(self, kind: str, **fields: Any) -> None:
        """Something worth writing down."""
        self.events.append({"kind": kind, **fields})
        if kind == "codec_given_up" and isinstance(self.formed, Coded):
            # For everybody and for good: with a server each judges alone, so that all begin anew.
            self.mistrusted.add(self.formed.codec)
            self.agreement = self.trusted(self.agreement)
            steps = isinstance(self.formed, AllreduceSync) and sends_steps(self.formed)  # and without a codec gradients
            self.stale = self.stale or steps or isinstance(self.formed, Serving)

    def trusted(self, agreement: SyncPlan) -> SyncPlan:
        """The same without its codec, if that was given up before."""
        if isinstance(agreement, Coded) and agreement.codec in self.mistrusted:
            return msgspec.structs.replace(agreement, codec=NoCodec())
        return agreement


def keeps_step(sync: SyncPlan) -> bool:
    """Does everybody who agrees so make the same update at the same time?"""
    if isinstance(sync, ServerSync):
        return sync.max_staleness == 0 and sync.spare == 0
    return not isinstance(sync, Serving)


def tag_of(agreement: SyncPlan) -> str:
    """Its type in the plan."""
    return str(agreement.__struct_config__.tag)


def require_place(plan: Plan, learner: Learner) -> None:
    """Only NCCL connects accelerators; codecs and shards compute on a CPU."""
    if learner.device.type != "cpu" and plan.learners.backend != "nccl":
        raise UsageError(
            f"learners.num does not go with runtime.device={learner.device.type}",
            "Learners with accelerators agree by NCCL.",
            "Add learners.backend=nccl, or set runtime.device=cpu.",
        )
