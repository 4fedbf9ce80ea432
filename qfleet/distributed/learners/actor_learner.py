"""A bundle: a partner with environments and a replay of its own (Gorila, Nair et al. 2015).

It keeps pace by a gate of its own, made for its part of all steps: between orders it acts until the gate opens, and an
order finds it with a batch to draw. What it remembers is read by the driver for a checkpoint, and given back when a
run goes on, piece by piece.
"""

import secrets
import time
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from torch import nn

from qfleet.act import Actor, Explore
from qfleet.build.components import BUNDLES, Components, EnvMaker, LearnerSide, join_parts, make_actor, stream
from qfleet.data import Array, Batch, Sequences, Spec, State
from qfleet.data.state_reader import saved_count, saved_value
from qfleet.data.wire_format import Facts
from qfleet.distributed.learners.shares import BatchTotals, share_in
from qfleet.envs import TRAIN, make_world
from qfleet.learn import Learner, ReplaySource
from qfleet.plan.schema import Plan
from qfleet.plan.validate.placement import one_bundle
from qfleet.replay import Prioritized, Replay, make_replay
from qfleet.save import pack_state, unpack_state
from qfleet.sync.comm import CommLost
from qfleet.training.checkpoints.replay_segments import packed_rows, restore_rows, segments_of

PIECE_BYTES = 2**20
# in one word
MOST_EPISODES = 1000
MOST_FAULTS = 20
# uses of a bundle's random numbers
WORLD = 1
ACTIONS = 2
DRAWS = 3
REDRAWS = 4
STATE = ("state.json", "state.safetensors")
LIST = ""  # the name of the list of names


class ActorLearner:
    """A line without updates of its own, in step with the others."""

    def __init__(self, line: Components, number: int, learners: int, limit_seconds: float, *, late: bool) -> None:
        actor = line.actor
        batch_source = line.batch_source
        learner = line.learner
        if not (isinstance(actor, Actor) and isinstance(batch_source, ReplaySource) and isinstance(learner, Learner)):
            raise TypeError("a bundle is one actor, one replay and one learner")
        self.line = line
        self.actor = actor
        self.batch_source = batch_source
        self.learner = learner
        self.number = number
        self.learners = learners
        self.limit_seconds = limit_seconds
        self.life = secrets.token_hex(4)  # names what it remembers: another life remembers something else
        self.late = late  # it comes when the others have learned for a while, and has caught up with nothing yet
        self.all_steps = 0  # of everybody, by rank 0's last word
        self.held: Facts = {}  # what it had when it last drew: the others count on that until its next word
        self.acts_by: int | None = None  # the update whose weights the policy has
        self.still = True  # it does not act unasked: before it has met the others it has no weights to act by
        self.finished: list[tuple[float, int]] = []
        self.faults: list[Any] = []
        self.written: dict[str, bytearray] = {}
        self.open: tuple[str, bytes] = (LIST, b"")
        self.reading = False  # what it remembers is being read, and must not change meanwhile
        actor.elapsed = self.elapsed
        actor.start()

    def elapsed(self) -> int:
        """Steps that everybody has made, by which exploration changes."""
        return max(self.all_steps, self.actor.steps * self.learners)

    # Acting and learning

    def idle(self) -> bool:
        """There is no order: one step in every lane, if any is missing. Was there something to do?"""
        if self.still or self.reading or not self.hungry:
            return False
        self.walk()
        return True

    @property
    def hungry(self) -> bool:
        """Are steps missing before the next update?"""
        return not self.batch_source.limiter.is_open(self.batch_source.steps) or not len(self.batch_source.replay)

    def walk(self) -> None:
        """One step in every lane."""
        if self.acts_by != self.learner.updates:
            self.actor.policy.load(self.learner.updates, self.learner.weights())
            self.acts_by = self.learner.updates
        self.actor.send()
        rollout, finished = self.actor.receive()
        self.batch_source.insert(rollout)
        self.finished += finished

    def fill(self) -> bool:
        """Act until the next update may be made, and answer True; if that takes too long, as far as it gets."""
        until = time.monotonic() + self.limit_seconds
        while self.hungry and (time.monotonic() < until or not len(self.batch_source.replay)):
            if time.monotonic() > until + self.limit_seconds:
                raise CommLost("nothing to learn from in time")
            self.walk()
        return not self.hungry

    def joined(self, facts: Facts) -> None:
        """The learner has weights that rank 0 gave it, after so many updates and steps."""
        self.acts_by = None
        self.still = False
        self.reading = False
        updates = int(facts["updates"])  # type: ignore[arg-type]
        steps = int(facts["steps"])  # type: ignore[arg-type]
        # Not late, and yet nothing learned: the run goes on from a checkpoint that has nothing of ours.
        if self.late or (updates and not self.batch_source.limiter.updates):
            self.late = False
            self.catch_up(updates, steps)

    def catch_up(self, updates: int, steps: int) -> None:
        """Be as far as the others in everything that changes with updates and steps; nobody waits for a full replay."""
        limiter = self.batch_source.limiter
        sampler = self.batch_source.replay.sampler
        limiter.start_steps = 0
        limiter.updates = updates
        limiter.forgiven = -updates
        if isinstance(sampler, Prioritized):
            sampler.draws = updates
        self.batch_source.refold()
        self.all_steps = steps

    def draw(self, facts: Facts) -> tuple[Batch | Sequences, float]:
        """A batch of our own, and how much it counts among what all hold together."""
        self.still = self.reading = False
        kept_pace = self.fill()
        self.all_steps = int(facts["steps"])  # type: ignore[arg-type]  # only now: the moment must not matter
        if (batch := self.batch_source.replay.sample(self.batch_source.batch_size)) is None:
            raise CommLost("nothing to learn from")
        stock = self.batch_source.replay.stock()
        self.held = {**asdict(stock), "steps": self.batch_source.steps, "behind": not kept_pace}
        num, items, mass, top = (float(facts[name]) for name in ("num", "items", "mass", "top"))  # type: ignore[arg-type]
        return batch, share_in(BatchTotals(int(num), int(items), mass, top), stock)

    def learned(self, batch: Batch | Sequences, priority: Array) -> None:
        """The update was made."""
        self.batch_source.learned(batch, priority)

    def reseed(self, number: int) -> None:
        """Draw other batches from here on."""
        self.batch_source.replay.reseed(own_stream(self.line.plan, self.number, number, REDRAWS))

    # Words

    def news(self) -> Facts:
        """What it held when it last drew, and what happened in its environments; until `heard` it is said again."""
        self.faults += [{**asdict(fault), "actor": self.number} for fault in self.actor.take_faults()]
        episodes = self.finished[:MOST_EPISODES]
        faults = self.faults[:MOST_FAULTS]
        told = {"episodes": msgspec.json.encode(episodes).decode(), "faults": msgspec.json.encode(faults).decode()}
        return {**self.held, "life": self.life, **told}

    def heard(self) -> None:
        """The last news were handed over."""
        del self.finished[:MOST_EPISODES], self.faults[:MOST_FAULTS]

    # What is remembered, as files

    def read(self, name: str, at: int) -> tuple[bytes, bool]:
        """A piece of a file from byte `at` on, and whether there is more; from first to last it stands still."""
        self.reading = True
        if self.open[0] != name or at == 0:
            self.open = (name, self.file(name))
        more = at + PIECE_BYTES < len(self.open[1])
        if name == STATE[-1] and not more:
            self.reading = False
        return self.open[1][at : at + PIECE_BYTES], more

    def file(self, name: str) -> bytes:
        """A whole file."""
        replay = self.batch_source.replay
        segments = {segment.name: segment for segment in segments_of(replay)}
        if name == LIST:
            return msgspec.json.encode([self.life, *segments, *STATE])
        if name in STATE:
            return pack_state(self.state_dict())[name]
        return packed_rows(replay, segments[name])

    def state_dict(self) -> State:
        """All but the rows."""
        own = {"all_steps": self.all_steps, "held": self.held, "late": self.late}
        finished = [list(episode) for episode in self.finished]
        return {
            "line": self.line.state_dict(),
            "start_steps": self.batch_source.limiter.start_steps,
            "finished": finished,
            **own,
        }

    def write(self, name: str, at: int, piece: bytes) -> None:
        """A piece of a file that was read once; the list comes first, and makes room for all others."""
        if name == LIST:
            self.written.clear()
        elif at == 0:
            self.written[name] = bytearray(piece)
        else:
            self.written[name] += piece

    def adopt(self) -> int:
        """Go on with what was written, as soon as the others are met; how many lanes could not be re-driven."""
        files = {name: bytes(data) for name, data in self.written.items()}
        self.written = {}
        state = unpack_state({name: files.pop(name) for name in STATE})
        replay = state["line"]["feed"]["replay"]
        restore_rows(self.batch_source.replay.store, files, lambda name, most_bytes: files[name], replay)
        lost = self.line.load_state_dict(state["line"])
        self.batch_source.limiter.start_steps = saved_count(state, "start_steps")
        self.all_steps = saved_count(state, "all_steps")
        self.late = bool(saved_value(state, "late"))
        self.held = dict(saved_value(state, "held"))
        self.finished = [(float(value), int(length)) for value, length in saved_value(state, "finished")]
        self.still = True
        return int(lost.sum())

    def close(self) -> None:
        """Let go of the world."""
        self.line.close()


def own_stream(plan: Plan, number: int, incarnation: int, use: int) -> np.random.Generator:
    """Random numbers of one bundle's life, for one use."""
    return stream(plan.seed, BUNDLES, number, incarnation, use)


def make_bundle(
    plan: Plan,
    shown: Spec,
    number: int,
    incarnation: int,
    *,
    make: EnvMaker | None = None,
    torso: nn.Module | None = None,
    explore: Explore | None = None,
) -> ActorLearner:
    """The bundle of learner `number`; every incarnation has seeds of its own, and all but the first come late."""
    own = one_bundle(plan)
    seed = int(own_stream(plan, number, incarnation, WORLD).integers(2**31))
    threads = plan.runtime.threads or 1
    world = make_world(own.env, seed=seed, stream=TRAIN, num=own.env.num, make=make, threads=threads)

    def hire(learning: LearnerSide) -> Actor:
        # One of more than the plan has explores as one of the first does.
        actor = make_actor(plan, world, learning.policy, explore, worker=number % plan.learners.num)
        actor.rng = own_stream(plan, number, incarnation, ACTIONS)
        actor.source = (0, 0)  # the only one that its replay hears of
        return actor

    def remember(part: Plan, spec: Spec) -> Replay:
        return make_replay(part, spec, part.env.num, own_stream(plan, number, incarnation, DRAWS))

    line = join_parts(plan, shown, hire, torso, remember)
    return ActorLearner(line, number, plan.learners.num, plan.learners.timeout_seconds / 2, late=incarnation > 0)
