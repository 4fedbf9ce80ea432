"""A replay that lives elsewhere: batches are cut there while the learner updates here.

Everything the learner asks for goes one way in order (rows, priorities, draws), so the replay sees what it would have
seen in this process; batches are asked for one ahead. The way is shared memory (`shared_replay`) or calls of Ray
(`ray_replay`).
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from torch import nn

from qfleet.build.components import ActorSide, Components, LearnerSide, ReplayLost, join_parts
from qfleet.data import Array, Batch, Rollout, Sequences, Spec, State, count_steps
from qfleet.data.array_messages import as_batch, batch_parts, blank_batch, priority_parts, rollout_parts
from qfleet.data.wire_format import Arrays, Facts, packed_bytes
from qfleet.plan.schema import BufferReplay as Buffer
from qfleet.plan.schema import GrowingBatch, Plan
from qfleet.replay import ALL, CompressionSavings, Cut, Fold, Replay, Span, Store, Uniform
from qfleet.system.restart_budget import RestartBudget


class ReplayConnection(Protocol):
    """The way to a replay that lives elsewhere. It does what it is told in that order; if it is gone: ReplayLost."""

    def start(self, history: Path | None) -> None:
        """Have an empty replay at its end, which notes its operations in this file; whoever was there is ended."""
        ...

    def order(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Something to be done, in its turn."""
        ...

    def batch(self) -> Batch | Sequences | None:
        """The oldest batch that was ordered and not taken, or that there was none."""
        ...

    def call(self, name: str, state: State | None = None) -> State:
        """Something to be done now, and its answer; all orders before are done first."""
        ...

    def forget(self) -> None:
        """Batches that were ordered are not wanted any more; nothing is under way."""
        ...

    def close(self) -> None:
        """End whoever is there and free everything."""
        ...


class RemoteReplay:
    """Stands where a Replay stands; see there for what each method means."""

    def __init__(
        self, plan: Plan, way: ReplayConnection, like: Replay, store: "Store | RemoteRows", restarts: int
    ) -> None:
        self.plan = plan
        self.way = way
        self.store = store
        self.budget = RestartBudget(restarts)
        self.like = like  # a replay with the rules of the other one; it stays empty
        self.spec = like.spec
        self.cut = like.cut
        self.lanes = store.lanes
        self.capacity = like.cut.items_in(buffer_of(plan).capacity)
        self.filter = None if like.filter is None else RemoteFilter(self)
        self._fold = like.fold
        self.history: Path | None = None  # where its operations are noted
        self.asked = 0  # batches asked for and not yet used

    # Its life

    def start(self) -> None:
        """Begin anew, with nothing in it."""
        self.way.start(self.history)
        self._fold = self.like.fold  # as the plan says, like that of the new one
        self.forget()

    def settle(self, folder: Path) -> None:
        """The run's folder is here: if a history is kept, so is that of the replay."""
        if self.plan.log.history:
            self.history = folder / "history" / "replay.jsonl"
            with suppress(ReplayLost):  # the next one is told when it starts
                self.way.call("settle", {"file": str(self.history)})

    def forget(self) -> None:
        """Batches that were asked for or have arrived are not wanted any more."""
        self.way.forget()
        self.asked = 0

    def rest(self) -> None:
        """Return when every order so far is done: only then may its rows be written here."""
        self.counts()

    def close(self) -> None:
        """End it and free its memory."""
        self.way.close()

    # What a Replay does

    def add(self, rollout: Rollout, gain: Array | None = None, lanes: slice = ALL) -> int:
        """Store rows; they are on their way when this returns."""
        begin, end, _ = lanes.indices(self.lanes)
        facts, arrays = rollout_parts(rollout)
        extra = {"gain": gain} if gain is not None and self.like.store.gain is not None else {}
        self.way.order({**facts, "kind": "add", "begin": begin, "end": end}, {**arrays, **extra})
        return count_steps(rollout)

    def seal(self, lanes: slice = ALL) -> int:
        """End the episodes of these lanes."""
        begin, end, _ = lanes.indices(self.lanes)
        return int(self.way.call("seal", {"begin": begin, "end": end})["turned"])

    def sample(self, size: int) -> Batch | Sequences | None:
        """The batch that was asked for last time; the next one is asked for."""
        if not self.asked and not len(self):
            return None
        while self.asked < 2:
            self.way.order({"kind": "draw", "size": size})
            self.asked += 1
        batch = self.way.batch()
        self.asked -= 1
        return batch

    def update(self, ids: Array, priority: Array) -> None:
        """New priorities, on their way, if they decide anything there."""
        if not isinstance(self.like.sampler, Uniform):
            self.way.order(*priority_parts(ids, priority.astype(np.float32)))

    @property
    def fold(self) -> Fold:
        """How rewards are summed."""
        return self._fold

    @fold.setter
    def fold(self, fold: Fold) -> None:
        if fold != self._fold:
            self._fold = fold
            self.way.order({"kind": "fold", **asdict(fold)})

    def counts(self) -> State:
        """Serial numbers and how many items were ready."""
        return self.way.call("counts")

    @property
    def head(self) -> int:
        """One past the newest item."""
        return int(self.counts()["head"])

    @property
    def tail(self) -> int:
        """The oldest item."""
        return int(self.counts()["tail"])

    @property
    def ready(self) -> int:
        """Items since it was last empty."""
        return int(self.counts()["ready"])

    def __len__(self) -> int:
        counts = self.counts()
        return int(counts["head"]) - int(counts["tail"])

    def take(self, serials: Array, weight: Array) -> Batch | Sequences:
        """The items with these serial numbers."""
        found = self.way.call("take", {"serials": serials, "weight": weight})
        return as_batch((found["facts"], found["arrays"]), self.spec)

    def spans(self) -> list[Span]:
        """The rows that are needed, by lanes."""
        return [(slice(a, b), begin, end) for a, b, begin, end in self.way.call("spans")["spans"]]

    def clear(self) -> None:
        """Forget everything."""
        self.way.call("clear")
        self.forget()

    def state_dict(self) -> State:
        """All but the rows."""
        return self.way.call("state")

    def load_state_dict(self, state: State) -> None:
        """Come back; the rows were restored before."""
        self.way.call("load", state)
        self.forget()

    def reseed(self, rng: np.random.Generator) -> None:
        """Draw other batches from here on."""
        self.way.call("reseed", {"rng": rng.bit_generator.state})


class RemoteFilter:
    """What is known here of the filter there."""

    def __init__(self, replay: RemoteReplay) -> None:
        self.replay = replay

    @property
    def share(self) -> float:
        """The share of items that it kept out."""
        return float(self.replay.counts()["filtered"])


class RemoteRows:
    """What is known here of rows that nobody sees from here; see Store for what each method means."""

    def __init__(self, way: ReplayConnection, like: Store, lanes: int, rows: int) -> None:
        self.way = way
        self.spec = like.spec
        self.lanes = lanes
        self.rows = rows
        self.row_bytes = like.row_bytes
        self.packs = like.packed is not None
        self.saved: CompressionSavings | None = None  # as last heard

    def read(self, begin: int, end: int, lanes: slice = ALL) -> State:
        """Rows [begin, end) of these lanes."""
        return self.way.call("read", self.place(begin, end, lanes))

    def restore(self, begin: int, end: int, values: State, lanes: slice = ALL) -> None:
        """Put rows [begin, end) of these lanes back where they were."""
        self.way.call("restore", {**self.place(begin, end, lanes), "values": values})

    def place(self, begin: int, end: int, lanes: slice) -> State:
        """Rows and lanes as a call names them."""
        first, stop, _ = lanes.indices(self.lanes)
        return {"begin": begin, "end": end, "first": first, "stop": stop}

    def saving(self) -> CompressionSavings | None:
        """What packing saves and costs, if anything is packed; as last heard if nobody answers."""
        if self.packs:
            with suppress(ReplayLost):
                self.saved = CompressionSavings(**self.way.call("saving"))
        return self.saved


def join_remote(
    plan: Plan,
    spec: Spec,
    hire: Callable[[LearnerSide], ActorSide],
    torso: nn.Module | None,
    make: Callable[[Plan, Spec], RemoteReplay],
) -> Components:
    """A line whose replay lives elsewhere; it does not outlive a line that could not be joined."""
    made: list[RemoteReplay] = []

    def remember(plan: Plan, stored: Spec) -> Replay:
        made.append(make(plan, stored))
        made[0].start()
        return cast("Replay", made[0])  # it has every method that a feed with a gate calls

    try:
        line = join_parts(plan, spec, hire, torso, remember)
    except BaseException:
        for replay in made:
            replay.close()
        raise
    line.remote = made[0]
    return line


def buffer_of(plan: Plan) -> Buffer:
    """The plan's replay, which is more than fresh experience."""
    if not isinstance(plan.replay, Buffer):
        raise TypeError("fresh experience has no replay to keep elsewhere")
    return plan.replay


def batch_bytes(plan: Plan, spec: Spec, cut: Cut) -> int:
    """The most that a batch can need."""
    return packed_bytes(*batch_parts(blank_batch(spec, batch_size(plan), *window(cut))))


def window(cut: Cut) -> tuple[int, int]:
    """Rows of a window and how many are learned from; zeros for single steps."""
    return (getattr(cut, "rows", 0), getattr(cut, "length", 0))


def batch_size(plan: Plan) -> int:
    """Items of the largest batch there will be."""
    steer = plan.steer.batch
    largest = steer.largest if isinstance(steer, GrowingBatch) else plan.algo.batch_size
    return largest * plan.population.num
