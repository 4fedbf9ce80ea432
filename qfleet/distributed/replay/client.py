"""The client of a replay in another process, which cuts batches while the learner updates.

Rollouts, priorities and draws are sent in order through one connection, so the replay does the same as it would in this
process; batches are requested one ahead. The connection is shared memory (`replay.process`) or Ray (`ray.replay`).
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from torch import nn

from qfleet.build.components import ActorSide, Components, LearnerSide, ReplayLost
from qfleet.build.make import join_components
from qfleet.data import Array, Batch, Rollout, Sequences, Spec, State, count_steps
from qfleet.data.array_messages import as_batch, batch_parts, priority_parts, rollout_parts, template_batch
from qfleet.data.wire_format import Arrays, Facts, packed_bytes
from qfleet.plan.schema import BufferReplay as Buffer
from qfleet.plan.schema import GrowingBatch, Plan
from qfleet.replay import ALL, CompressionSavings, Cut, Fold, Replay, Span, Store, Uniform
from qfleet.system.restart_budget import RestartBudget


class ReplayConnection(Protocol):
    """The connection to a replay server, which handles messages in order; raises ReplayLost if the server is lost."""

    def start(self, history: Path | None) -> None:
        """Start a server with an empty replay, which records its operations in this file; stop any server before it."""

    def send(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Send a message, without waiting for its effect."""

    def receive_batch(self) -> Batch | Sequences | None:
        """The oldest batch drawn and not received yet; None if the replay had no items."""

    def request(self, name: str, state: State | None = None) -> State:
        """Send a request and wait for the reply; all messages before it are handled first."""

    def discard_batches(self) -> None:
        """Discard the batches that were drawn; no request may be under way."""

    def close(self) -> None:
        """Stop the server and free all resources."""


class RemoteReplay:
    """A Replay in another process; see Replay for the meaning of each method."""

    def __init__(
        self, plan: Plan, connection: ReplayConnection, template: Replay, store: "Store | RemoteRows", restarts: int
    ) -> None:
        self.plan = plan
        self.connection = connection
        self.store = store
        self.budget = RestartBudget(restarts)
        self.template = template  # an empty replay with the same rules
        self.spec = template.spec
        self.cut = template.cut
        self.lanes = store.lanes
        self.capacity = template.cut.items_in(buffer_of(plan).capacity)
        self.filter = None if template.filter is None else RemoteFilter(self)
        self._fold = template.fold
        self.history: Path | None = None  # the file that records its operations
        self.batches_requested = 0  # and not received yet

    # Lifecycle

    def start(self) -> None:
        """Start a new, empty replay."""
        self.connection.start(self.history)
        self._fold = self.template.fold  # the plan's, which the new replay has
        self.discard_batches()

    def use_run_folder(self, folder: Path) -> None:
        """Record the replay's operations in the run directory, if the plan asks for a history."""
        if self.plan.log.history:
            self.history = folder / "history" / "replay.jsonl"
            with suppress(ReplayLost):  # start() passes the file to the next server
                self.connection.request("set_history_file", {"file": str(self.history)})

    def discard_batches(self) -> None:
        """Discard the batches that were requested or have arrived."""
        self.connection.discard_batches()
        self.batches_requested = 0

    def flush(self) -> None:
        """Wait until all messages so far are handled; only then may the rows be written from here."""
        self.counts()

    def close(self) -> None:
        """Stop the server and free its memory."""
        self.connection.close()

    # The methods of a Replay

    def add(self, rollout: Rollout, gain: Array | None = None, lanes: slice = ALL) -> int:
        """Send rows to be stored, without waiting."""
        begin, end, _ = lanes.indices(self.lanes)
        facts, arrays = rollout_parts(rollout)
        extra = {"gain": gain} if gain is not None and self.template.store.gain is not None else {}
        self.connection.send({**facts, "kind": "add", "begin": begin, "end": end}, {**arrays, **extra})
        return count_steps(rollout)

    def seal(self, lanes: slice = ALL) -> int:
        """End the episodes of these lanes."""
        begin, end, _ = lanes.indices(self.lanes)
        return int(self.connection.request("seal", {"begin": begin, "end": end})["steps_sealed"])

    def sample(self, size: int) -> Batch | Sequences | None:
        """The batch requested by the previous call; requests the next one."""
        if not self.batches_requested and not len(self):
            return None
        while self.batches_requested < 2:
            self.connection.send({"kind": "draw", "size": size})
            self.batches_requested += 1
        batch = self.connection.receive_batch()
        self.batches_requested -= 1
        return batch

    def update(self, ids: Array, priority: Array) -> None:
        """Send new priorities, if the sampler uses them."""
        if not isinstance(self.template.sampler, Uniform):
            self.connection.send(*priority_parts(ids, priority.astype(np.float32)))

    @property
    def fold(self) -> Fold:
        """How rewards are summed over n steps."""
        return self._fold

    @fold.setter
    def fold(self, fold: Fold) -> None:
        if fold != self._fold:
            self._fold = fold
            self.connection.send({"kind": "fold", **asdict(fold)})

    def counts(self) -> State:
        """Serial numbers and item counts."""
        return self.connection.request("counts")

    @property
    def head(self) -> int:
        """One past the newest item."""
        return int(self.counts()["head"])

    @property
    def tail(self) -> int:
        """The oldest item."""
        return int(self.counts()["tail"])

    @property
    def items_added(self) -> int:
        """Items added since it was last empty."""
        return int(self.counts()["items_added"])

    def __len__(self) -> int:
        counts = self.counts()
        return int(counts["head"]) - int(counts["tail"])

    def read_batch(self, serials: Array, weight: Array) -> Batch | Sequences:
        """The items with these serial numbers."""
        found = self.connection.request("read_batch", {"serials": serials, "weight": weight})
        return as_batch((found["facts"], found["arrays"]), self.spec)

    def spans(self) -> list[Span]:
        """The rows that are needed, by lanes."""
        return [(slice(a, b), begin, end) for a, b, begin, end in self.connection.request("spans")["spans"]]

    def clear(self) -> None:
        """Remove all items."""
        self.connection.request("clear")
        self.discard_batches()

    def state_dict(self) -> State:
        """All but the rows."""
        return self.connection.request("state")

    def load_state_dict(self, state: State) -> None:
        """Restore; the rows were restored before."""
        self.connection.request("load", state)
        self.discard_batches()

    def reseed(self, rng: np.random.Generator) -> None:
        """Replace the random generator."""
        self.connection.request("reseed", {"rng": rng.bit_generator.state})


class RemoteFilter:
    """The duplicate filter of a remote replay."""

    def __init__(self, replay: RemoteReplay) -> None:
        self.replay = replay

    @property
    def share(self) -> float:
        """The share of items that were filtered out."""
        return float(self.replay.counts()["filtered"])


class RemoteRows:
    """The rows of a remote replay without shared memory; see Store for the meaning of each method."""

    def __init__(self, connection: ReplayConnection, template: Store, lanes: int, rows: int) -> None:
        self.connection = connection
        self.spec = template.spec
        self.lanes = lanes
        self.rows = rows
        self.row_bytes = template.row_bytes
        self.compresses = template.packed is not None
        self.last_savings: CompressionSavings | None = None

    def read(self, begin: int, end: int, lanes: slice = ALL) -> State:
        """Rows [begin, end) of these lanes."""
        return self.connection.request("read", self.row_range(begin, end, lanes))

    def restore(self, begin: int, end: int, values: State, lanes: slice = ALL) -> None:
        """Write rows [begin, end) of these lanes back."""
        self.connection.request("restore", {**self.row_range(begin, end, lanes), "values": values})

    def row_range(self, begin: int, end: int, lanes: slice) -> State:
        """Rows and lanes as fields of a request."""
        first, stop, _ = lanes.indices(self.lanes)
        return {"begin": begin, "end": end, "first": first, "stop": stop}

    def compression_savings(self) -> CompressionSavings | None:
        """What compression saves and costs, if rows are compressed; the last known values if the replay is lost."""
        if self.compresses:
            with suppress(ReplayLost):
                self.last_savings = CompressionSavings(**self.connection.request("compression_savings"))
        return self.last_savings


def join_remote_replay(
    plan: Plan,
    spec: Spec,
    make_actors: Callable[[LearnerSide], ActorSide],
    torso: nn.Module | None,
    make_replay: Callable[[Plan, Spec], RemoteReplay],
) -> Components:
    """The components of a run with a remote replay, which is stopped if they cannot be made."""
    made: list[RemoteReplay] = []

    def make_started(plan: Plan, stored: Spec) -> Replay:
        made.append(make_replay(plan, stored))
        made[0].start()
        return cast("Replay", made[0])  # it has every method that ReplaySource calls

    try:
        components = join_components(plan, spec, make_actors, torso, make_started)
    except BaseException:
        for replay in made:
            replay.close()
        raise
    components.remote = made[0]
    return components


def buffer_of(plan: Plan) -> Buffer:
    """The plan's replay buffer; TypeError for fresh experience."""
    if not isinstance(plan.replay, Buffer):
        raise TypeError("fresh experience has no replay buffer")
    return plan.replay


def batch_bytes(plan: Plan, spec: Spec, cut: Cut) -> int:
    """The largest size of a packed batch."""
    return packed_bytes(*batch_parts(template_batch(spec, batch_size(plan), *window(cut))))


def window(cut: Cut) -> tuple[int, int]:
    """Rows of a window and how many of them are learned from; zeros for single steps."""
    return (getattr(cut, "rows", 0), getattr(cut, "length", 0))


def batch_size(plan: Plan) -> int:
    """The largest number of items in a batch."""
    steer = plan.steer.batch
    largest = steer.largest if isinstance(steer, GrowingBatch) else plan.algo.batch_size
    return largest * plan.population.num
