"""The client of a replay in another process, which cuts batches while the learner updates.

Rollouts, priorities and draws are sent in order through one connection, so the replay does the same as it would in this
process; batches are requested one ahead. The process is on this machine (`replay.process`) or on Ray (`ray.replay`).
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import numpy as np

from qfleet.build.components import ActorSide, Components, LearnerSide
from qfleet.build.custom_parts import CustomParts
from qfleet.build.make import join_components
from qfleet.data import Array, Batch, Rollout, Sequences, Spec, State, count_steps
from qfleet.data.array_messages import batch_arrays, batch_form, rollout_parts, template_batch
from qfleet.data.wire_format import packed_bytes
from qfleet.distributed.replay import messages
from qfleet.distributed.replay.connection import ReplayConnection
from qfleet.distributed.replay.messages import BatchReply, state_arrays, state_in
from qfleet.distributed.worker.messages import Done
from qfleet.plan.schema import BufferReplay as Buffer
from qfleet.plan.schema import GrowingBatch, Plan
from qfleet.replay import ALL, CompressionSavings, Cut, NStepReturn, Replay, Span, Store, Uniform
from qfleet.system.restart_budget import RestartBudget
from qfleet.system.worker_errors import WorkerLost


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
        self._n_step = template.n_step
        self.history: Path | None = None  # the file that records its operations

    # Lifecycle

    def start(self) -> None:
        """Start a new, empty replay."""
        self.connection.start(self.history)
        self._n_step = self.template.n_step  # the plan's, which the new replay has

    def use_run_folder(self, folder: Path) -> None:
        """Record the replay's operations in the run directory, if the plan asks for a history."""
        if self.plan.log.history:
            self.history = folder / "history" / "replay.jsonl"
            with suppress(WorkerLost):  # start() passes the file to the next process
                self.connection.request(messages.SetHistoryFile(str(self.history)), Done)

    def flush(self) -> None:
        """Wait until all messages so far are handled; only then may the rows be written from here."""
        self.counts()

    def close(self) -> None:
        """Stop the server and free its memory."""
        self.connection.close()

    # The methods of a Replay

    def add(self, rollout: Rollout, gain: Array | None = None, lanes: slice = ALL) -> int:
        """Send rows to be stored, without waiting."""
        first, stop, _ = lanes.indices(self.lanes)
        header, arrays = rollout_parts(rollout)
        arrays.pop("info", None)  # a replay has no use for the numbers of episodes
        extra = {"gain": gain} if gain is not None and self.template.store.gain is not None else {}
        self.connection.send(messages.Add(header, first, stop), {**arrays, **extra})
        return count_steps(rollout)

    def seal(self, lanes: slice = ALL) -> int:
        """End the episodes of these lanes."""
        first, stop, _ = lanes.indices(self.lanes)
        return self.connection.request(messages.Seal(first, stop), messages.Sealed)[0].steps

    def sample(self, size: int) -> Batch | Sequences | None:
        """The batch requested by the previous call; requests the next one."""
        if not self.connection.num_due and not len(self):
            return None
        while self.connection.num_due < 2:
            self.connection.draw(size)
        return self.connection.receive_batch()

    def update(self, ids: Array, priority: Array) -> None:
        """Send new priorities, if the sampler uses them."""
        if not isinstance(self.template.sampler, Uniform):
            self.connection.send(messages.SetPriorities(), {"ids": ids, "priority": priority.astype(np.float32)})

    @property
    def n_step(self) -> NStepReturn:
        """How rewards are summed over n steps."""
        return self._n_step

    @n_step.setter
    def n_step(self, n_step: NStepReturn) -> None:
        if n_step != self._n_step:
            self._n_step = n_step
            self.connection.send(messages.SetNStep(n_step))

    def counts(self) -> messages.CountsReply:
        """Serial numbers and item counts."""
        return self.connection.request(messages.Counts(), messages.CountsReply)[0]

    @property
    def head(self) -> int:
        """One past the newest item."""
        return self.counts().head

    @property
    def tail(self) -> int:
        """The oldest item."""
        return self.counts().tail

    @property
    def items_added(self) -> int:
        """Items added since it was last empty."""
        return self.counts().items_added

    def __len__(self) -> int:
        counts = self.counts()
        return counts.head - counts.tail

    def read_batch(self, serials: Array, weight: Array) -> Batch | Sequences:
        """The items with these serial numbers."""
        wanted = {"serials": serials, "weight": weight}
        with self.connection.using_handle():  # an invalid reply is a loss
            return self.connection.valid_batch(*self.connection.request(messages.ReadBatch(), BatchReply, wanted))

    def spans(self) -> list[Span]:
        """The rows that are needed, by lanes."""
        reply, _ = self.connection.request(messages.Spans(), messages.SpansReply)
        return [(slice(first, stop), begin, end) for first, stop, begin, end in reply.spans]

    def clear(self) -> None:
        """Remove all items."""
        self.connection.request(messages.Clear(), Done)
        self.connection.discard_batches()

    def state_dict(self) -> State:
        """All but the rows."""
        return state_in(self.connection.request(messages.ReadState(), messages.StateReply)[1])

    def load_state_dict(self, state: State) -> None:
        """Restore; the rows were restored before."""
        self.connection.request(messages.LoadState(), Done, state_arrays(state))
        self.connection.discard_batches()

    def reseed(self, rng: np.random.Generator) -> None:
        """Replace the random generator."""
        self.connection.request(messages.SetGenerator(), Done, state_arrays({"rng": rng.bit_generator.state}))


class RemoteFilter:
    """The duplicate filter of a remote replay."""

    def __init__(self, replay: RemoteReplay) -> None:
        self.replay = replay

    @property
    def share(self) -> float:
        """The share of items that were filtered out."""
        return self.replay.counts().filtered


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
        first, stop, _ = lanes.indices(self.lanes)
        return state_in(self.connection.request(messages.ReadRows(begin, end, first, stop), messages.StateReply)[1])

    def restore(self, begin: int, end: int, values: State, lanes: slice = ALL) -> None:
        """Write rows [begin, end) of these lanes back."""
        first, stop, _ = lanes.indices(self.lanes)
        self.connection.request(messages.RestoreRows(begin, end, first, stop), Done, state_arrays(values))

    def compression_savings(self) -> CompressionSavings | None:
        """What compression saves and costs, if rows are compressed; the last known values if the replay is lost."""
        if self.compresses:
            with suppress(WorkerLost):
                self.last_savings = self.connection.request(messages.ReadSavings(), messages.SavingsReply)[0].savings
        return self.last_savings


def join_remote_replay(
    plan: Plan,
    spec: Spec,
    make_actors: Callable[[LearnerSide], ActorSide],
    custom_parts: CustomParts,
    make_replay: Callable[[Plan, Spec], RemoteReplay],
) -> Components:
    """The components of a run with a remote replay, which is stopped if they cannot be made."""
    made: list[RemoteReplay] = []

    def make_started(plan: Plan, stored: Spec) -> Replay:
        made.append(make_replay(plan, stored))
        made[0].start()
        return cast("Replay", made[0])  # it has every method that ReplaySource calls

    try:
        components = join_components(plan, spec, make_actors, custom_parts, make_started)
    except BaseException:
        for replay in made:
            replay.close()
        raise
    components.remote_replay = made[0]
    return components


def buffer_of(plan: Plan) -> Buffer:
    """The plan's replay buffer; TypeError for fresh experience."""
    if not isinstance(plan.replay, Buffer):
        raise TypeError("fresh experience has no replay buffer")
    return plan.replay


def batch_bytes(plan: Plan, spec: Spec, cut: Cut) -> int:
    """The largest size of a packed batch."""
    batch = template_batch(spec, batch_size(plan), *window(cut))
    return packed_bytes(BatchReply(batch_form(batch)), batch_arrays(batch))


def window(cut: Cut) -> tuple[int, int]:
    """Rows of a window and how many of them are learned from; zeros for single steps."""
    return (getattr(cut, "rows", 0), getattr(cut, "length", 0))


def batch_size(plan: Plan) -> int:
    """The largest number of items in a batch."""
    steer = plan.steer.batch
    largest = steer.largest if isinstance(steer, GrowingBatch) else plan.algo.batch_size
    return largest * plan.population.num
