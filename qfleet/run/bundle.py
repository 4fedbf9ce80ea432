"""A bundle: a partner with environments and a replay of its own (Gorila, Nair et al. 2015).

It keeps pace by a gate of its own, made for its part of all steps: between orders it acts until the gate opens, and an
order finds it with a batch to draw. What it remembers is read by the driver for a checkpoint, and given back when a
run goes on, piece by piece.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import msgspec
from torch import nn

from qfleet.act import Actor, Explore
from qfleet.data import Array, Batch, Sequences, Spec
from qfleet.data.saved import saved_count, saved_value
from qfleet.data.wire import Facts
from qfleet.envs import TRAIN, make_world
from qfleet.learn import Learner, ReplayFeed
from qfleet.plan.places import bundled
from qfleet.plan.schema import Plan
from qfleet.replay import Replay, make_replay
from qfleet.run.rows import packed_rows, restore_rows, segments_of
from qfleet.run.shares import Totals, share_in
from qfleet.run.wiring import SAMPLE, WORLDS, EnvMaker, Learning, Line, join_parts, make_actor, stream
from qfleet.save import pack_state, unpack_state
from qfleet.sync.comm import CommLost

PIECE_BYTES = 2**20
MOST_EPISODES = 1000  # in one word
STATE = ("state.json", "state.safetensors")
LIST = ""  # the name of the list of names


class Bundle:
    """A line without updates of its own, in step with the others."""

    def __init__(self, line: Line, learners: int, limit_seconds: float, incarnation: int) -> None:
        actor, feed, learner = line.actor, line.feed, line.learner
        if not (isinstance(actor, Actor) and isinstance(feed, ReplayFeed) and isinstance(learner, Learner)):
            raise TypeError("a bundle is one actor, one replay and one learner")
        self.line, self.actor, self.feed, self.learner = line, actor, feed, learner
        self.learners, self.limit_seconds = learners, limit_seconds
        self.life = secrets.token_hex(4)  # names what it remembers: another life remembers something else
        self.told = 0  # steps of everybody, by rank 0's last word
        self.held: Facts = {}  # what it had when it last drew: the others count on that until its next word
        self.acts_by: int | None = None  # the update whose weights the policy has
        self.still = False  # it does not act unasked
        self.finished: list[tuple[float, int]] = []
        self.written: dict[str, bytearray] = {}
        self.open: tuple[str, bytes] = (LIST, b"")
        actor.elapsed = self.elapsed
        if incarnation:
            feed.gate.start_steps = 0  # the others do not wait: what it has counts by how much it is
        actor.start()

    def elapsed(self) -> int:
        """Steps that everybody has made, by which exploration changes."""
        return max(self.told, self.actor.steps * self.learners)

    # Acting and learning

    @property
    def hungry(self) -> bool:
        """Are steps missing before the next update?"""
        return not self.feed.gate.is_open(self.feed.steps) or not len(self.feed.replay)

    def walk(self) -> None:
        """One step in every lane."""
        if self.acts_by != self.learner.updates:
            self.actor.policy.load(self.learner.updates, self.learner.weights())
            self.acts_by = self.learner.updates
        self.actor.send()
        rollout, finished = self.actor.receive()
        self.feed.insert(rollout)
        self.finished += finished

    def fill(self) -> None:
        """Act until the next update may be made; if that takes too long for the others, as far as it gets."""
        until = time.monotonic() + self.limit_seconds
        while self.hungry and (time.monotonic() < until or not len(self.feed.replay)):
            if time.monotonic() > until + self.limit_seconds:
                raise CommLost("nothing to learn from in time")
            self.walk()

    def joined(self) -> None:
        """The learner has weights that rank 0 gave it."""
        self.acts_by, self.still = None, False
        self.fill()
        if not self.held:
            self.look()

    def draw(self, facts: Facts) -> tuple[Batch | Sequences, float]:
        """A batch of our own, and how much it counts among what all hold together."""
        self.still = False
        self.fill()
        self.told = int(facts["steps"])  # type: ignore[arg-type]  # only now: what it says must not depend on the moment
        if (batch := self.feed.replay.sample(self.feed.batch_size)) is None:
            raise CommLost("nothing to learn from")
        self.look()
        num, items, mass, top = (float(facts[name]) for name in ("num", "items", "mass", "top"))  # type: ignore[arg-type]
        return batch, share_in(Totals(int(num), int(items), mass, top), self.feed.replay.stock())

    def look(self) -> None:
        """See what there is."""
        self.held = {**asdict(self.feed.replay.stock()), "steps": self.feed.steps}

    def news(self) -> Facts:
        """What it held when it last drew, and what happened in its environments since it was last asked."""
        told, self.finished = self.finished[:MOST_EPISODES], self.finished[MOST_EPISODES:]
        faults = [asdict(fault) for fault in self.actor.take_faults()]
        episodes, faulty = msgspec.json.encode(told).decode(), msgspec.json.encode(faults).decode()
        return {**self.held, "life": self.life, "episodes": episodes, "faults": faulty}

    def learned(self, batch: Batch | Sequences, priority: Array) -> None:
        """The update was made."""
        self.feed.learned(batch, priority)

    # What is remembered, as files

    def read(self, name: str, at: int) -> tuple[bytes, bool]:
        """A piece of a file from byte `at` on, and whether there is more; it stands still from the first one on."""
        if name == LIST:
            self.still = True
        if self.open[0] != name or at == 0:
            self.open = (name, self.file(name))
        return self.open[1][at : at + PIECE_BYTES], at + PIECE_BYTES < len(self.open[1])

    def file(self, name: str) -> bytes:
        """A whole file."""
        replay = self.feed.replay
        segments: dict[str, Callable[[], bytes]] = {
            segment.name: partial(packed_rows, replay, segment) for segment in segments_of(replay)
        }
        if name == LIST:
            return msgspec.json.encode([self.life, *segments, *STATE])
        if name in STATE:
            return pack_state({"line": self.line.state_dict(), "told": self.told, "held": self.held})[name]
        return segments[name]()

    def write(self, name: str, piece: bytes) -> None:
        """A piece of a file that was read once."""
        self.written.setdefault(name, bytearray()).extend(piece)

    def adopt(self) -> None:
        """Go on with what was written; until the others are met, it stands still."""
        files, self.written = {name: bytes(data) for name, data in self.written.items()}, {}
        state = unpack_state({name: files.pop(name) for name in STATE})
        restore_rows(self.feed.replay.store, files, files.__getitem__, state["line"]["feed"]["replay"])
        self.line.load_state_dict(state["line"])
        self.told, self.held, self.still = saved_count(state, "told"), dict(saved_value(state, "held")), True

    def close(self) -> None:
        """Let go of the world."""
        self.line.close()


def make_bundle(
    plan: Plan,
    shown: Spec,
    number: int,
    incarnation: int,
    *,
    make: EnvMaker | None,
    torso: nn.Module | None,
    explore: Explore | None,
) -> Bundle:
    """The bundle of learner `number`; every incarnation has seeds of its own."""
    own, who = bundled(plan), (number, incarnation)
    seed = int(stream(plan.seed, WORLDS, *who).integers(2**31))
    threads = plan.runtime.threads or 1
    world = make_world(own.env, seed=seed, stream=TRAIN, num=own.env.num, make=make, threads=threads)

    def hire(learning: Learning) -> Actor:
        # One that came later explores as one of the first.
        worker = number % plan.learners.num
        actor = make_actor(plan, world, learning.policy, explore, worker=worker, incarnation=incarnation)
        actor.source = (0, incarnation)  # the only one that its replay hears of
        return actor

    def remember(part: Plan, spec: Spec) -> Replay:
        return make_replay(part, spec, part.env.num, stream(plan.seed, SAMPLE, *who))

    line = join_parts(plan, shown, hire, torso, remember)
    return Bundle(line, plan.learners.num, plan.learners.timeout_seconds / 2, incarnation)
