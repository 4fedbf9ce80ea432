"""The server side of a remote replay: handles messages one after the other; and the main function of its process."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qfleet.audit.history import NOTED_IDS, History, HistoryLog, NoHistory
from qfleet.build.custom_parts import unpack_parts
from qfleet.build.make import own_replay
from qfleet.data import Array, Batch, Sequences, Spec
from qfleet.data.array_messages import as_priorities, as_rollout, batch_arrays, batch_form
from qfleet.data.wire_format import Arrays, Message, Parts
from qfleet.distributed.replay import messages
from qfleet.distributed.replay.messages import state_arrays, state_in
from qfleet.distributed.worker.messages import Done
from qfleet.distributed.worker.serve import serve
from qfleet.distributed.worker.transport import RingTransport
from qfleet.plan.schema import Plan
from qfleet.replay import Replay, Store, make_replay
from qfleet.replay.warm import warm
from qfleet.system.shared_memory import SharedMemory, round_to_cache_lines


@dataclass
class ReplaySetup:
    """The arguments of the replay's process."""

    plan: bytes  # as JSON
    spec: Spec
    history: str | None  # the file that records operations
    custom_parts: bytes  # packed by `pack_parts`: the user's own sampler, if any
    region: SharedMemory | None = None  # of the rows, if they are in shared memory


def columns_of(store: Store) -> dict[str, Array]:
    """The arrays in shared memory: every column, and the head of each lane."""
    return {**store.columns(), "heads": store.heads}


def store_region(plan: Plan, spec: Spec) -> SharedMemory:
    """Shared memory for the rows of the plan's replay."""
    columns = columns_of(make_replay(plan, spec, plan.env.num, np.random.default_rng(0)).store)
    return SharedMemory(sum(round_to_cache_lines(column.nbytes) for column in columns.values()))


def shared_store(replay: Replay, region: SharedMemory) -> Replay:
    """Move the rows of a replay to this memory, keeping the memory's content."""
    begin = 0
    store = replay.store
    for name, column in columns_of(store).items():
        view = np.ndarray(column.shape, column.dtype, region.view, begin)
        setattr(store, name, view)
        begin += round_to_cache_lines(column.nbytes)
    return replay


class ReplayServer:
    """A replay and the messages that it handles: a Worker, wherever it runs."""

    def __init__(self, replay: Replay, history: str | None) -> None:
        self.replay = replay
        self.history = history_in(history)

    def handle(self, message: Message, arrays: Arrays) -> Parts | None:
        """Handle a message; the reply, if it has one."""
        replay = self.replay
        match message:
            case messages.Add():
                self.add(message, arrays)
            case messages.SetPriorities():
                replay.update(*as_priorities(arrays))
            case messages.SetNStep(n_step):
                replay.n_step = n_step
            case messages.Draw(size):
                return self.draw(size)
            case messages.Counts():
                filtered = 0.0 if replay.filter is None else replay.filter.share
                return messages.CountsReply(
                    int(replay.head), int(replay.tail), int(replay.items_added), float(filtered)
                ), {}
            case messages.ReadBatch():
                return batch_parts(replay.read_batch(arrays["serials"], arrays["weight"]))
            case messages.Spans():
                spans = [(lanes.start, lanes.stop, int(begin), int(end)) for lanes, begin, end in replay.spans()]
                return messages.SpansReply(spans), {}
            case messages.Seal(first, stop):
                return messages.Sealed(replay.seal(slice(first, stop))), {}
            case messages.ReadState():
                return messages.StateReply(), state_arrays(replay.state_dict())
            case messages.ReadRows(begin, end, first, stop):
                return messages.StateReply(), state_arrays(replay.store.read(begin, end, slice(first, stop)))
            case messages.ReadSavings():
                return messages.SavingsReply(replay.store.compression_savings()), {}
            case _:
                self.change(message, arrays)
                return Done(), {}
        return None

    def change(self, message: Message, arrays: Arrays) -> None:
        """Handle a request whose reply only says that it was carried out."""
        match message:
            case messages.Clear():
                self.replay.clear()
            case messages.LoadState():
                self.replay.load_state_dict(state_in(arrays))
            case messages.RestoreRows(begin, end, first, stop):
                self.replay.store.restore(begin, end, state_in(arrays), slice(first, stop))
            case messages.SetGenerator():
                self.replay.rng.bit_generator.state = state_in(arrays)["rng"]
            case messages.SetHistoryFile(file):
                self.history = history_in(file)
            case _:
                raise ValueError(f"a replay does not handle {type(message).__name__}")

    def add(self, message: messages.Add, arrays: Arrays) -> None:
        """Store a rollout."""
        gain = arrays.pop("gain", None)
        lanes = slice(message.first, message.stop)
        rollout = as_rollout(message.header, arrays, self.replay.spec, lanes.stop - lanes.start)
        self.replay.add(rollout, gain, lanes)
        self.note("stored", source=rollout.source)

    def draw(self, size: int) -> Parts:
        """Cut a batch."""
        batch = self.replay.sample(size)
        if batch is None:
            # Batches are requested ahead: the items of that time may all have been overwritten since.
            return messages.NoBatch(), {}
        self.note("drawn", ids=batch.ids[:NOTED_IDS].tolist())
        return batch_parts(batch)

    def note(self, op: str, **fields: Any) -> None:
        """Record an operation, with the range of serial numbers that can be drawn after it."""
        self.history.note("replay", op, **fields, tail=self.replay.tail, head=self.replay.head)

    def work_when_idle(self) -> bool:
        """There is nothing to do between messages."""
        return False

    def close(self) -> None:
        """Nothing must be freed before the process ends."""


def batch_parts(batch: Batch | Sequences) -> Parts:
    """A batch as a reply."""
    return messages.BatchReply(batch_form(batch)), batch_arrays(batch)


def history_in(file: str | None) -> HistoryLog:
    """A history in this file; none if the run directory is not on this machine."""
    return History(Path(file)) if file is not None and Path(file).parents[1].is_dir() else NoHistory()


def make_server(setup: ReplaySetup) -> ReplayServer:
    """An empty replay, and what it handles."""
    warm(replace(setup.spec, state=()))  # before the first message: compiled loops take long to load
    sampler = unpack_parts(setup.custom_parts).sampler
    replay = own_replay(msgspec.json.decode(setup.plan, type=Plan), setup.spec, sampler)
    return ReplayServer(replay if setup.region is None else shared_store(replay, setup.region), setup.history)


def replay_main(setup: ReplaySetup, transport: RingTransport) -> None:
    """Handle messages until the parent process ends."""
    serve(make_server(setup), transport)
