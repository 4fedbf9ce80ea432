"""The server side of a remote replay: handles messages one after the other; and the main function of its process."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qfleet.audit.history import NOTED_IDS, History, HistoryLog, NoHistory
from qfleet.build.make import own_replay
from qfleet.data import Array, Spec, State
from qfleet.data.array_messages import as_priorities, as_rollout, batch_parts
from qfleet.data.wire_format import Parts
from qfleet.plan.schema import Plan
from qfleet.replay import Fold, Replay, Store, make_replay
from qfleet.replay.warm import warm
from qfleet.save import pack_state, unpack_state
from qfleet.system.ring import Ring
from qfleet.system.shared_memory import SharedMemory, round_to_cache_lines

NAP_SECONDS = 0.0002
REQUEST_SECONDS = 60.0  # the content of a request follows its message at once
NO_BATCH = "nothing"  # sent instead of a batch when the replay is empty


@dataclass
class ReplaySetup:
    """The arguments of the replay process."""

    plan: bytes  # as JSON
    spec: Spec
    region: SharedMemory
    messages: Ring
    batches: Ring
    pipe: Connection
    history: str | None  # the file that records operations


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
    """A replay and the messages that it handles, however they are carried."""

    def __init__(self, replay: Replay, history: str | None) -> None:
        self.replay = replay
        self.history = history_in(history)
        self.messages: dict[str, Callable[[Parts], Parts | None]] = {
            "add": self.add,
            "priorities": self.update,
            "draw": self.draw,
            "fold": self.fold,
        }

    def handle_message(self, parts: Parts) -> Parts | None:
        """Handle a message; a draw returns a batch."""
        return self.messages[str(parts[0]["kind"])](parts)

    def add(self, parts: Parts) -> None:
        """Store a rollout."""
        facts, arrays = parts
        gain = arrays.pop("gain", None)
        lanes = slice(int(facts["begin"]), int(facts["end"]))  # type: ignore[arg-type]
        rollout = as_rollout(({**facts, "kind": "rollout"}, arrays), self.replay.spec, lanes.stop - lanes.start)
        self.replay.add(rollout, gain, lanes)
        self.note("stored", source=rollout.source)

    def note(self, op: str, **fields: Any) -> None:
        """Record an operation, with the range of serial numbers that can be drawn after it."""
        self.history.note("replay", op, **fields, tail=self.replay.tail, head=self.replay.head)

    def update(self, parts: Parts) -> None:
        """Update priorities."""
        self.replay.update(*as_priorities(parts))

    def fold(self, parts: Parts) -> None:
        """Change how rewards are summed."""
        self.replay.fold = Fold(**{name: value for name, value in parts[0].items() if name != "kind"})  # type: ignore[arg-type]

    def draw(self, parts: Parts) -> Parts:
        """Cut a batch."""
        batch = self.replay.sample(int(parts[0]["size"]))  # type: ignore[arg-type]
        if batch is None:
            # Batches are requested ahead: the items of that time may all have been overwritten since.
            return {"kind": NO_BATCH}, {}
        self.note("drawn", ids=batch.ids[:NOTED_IDS].tolist())
        return batch_parts(batch)

    def handle_request(self, name: str, state: State) -> State:
        """Handle a request; returns the reply."""
        replay = self.replay
        match name:
            case "counts":
                filtered = 0.0 if replay.filter is None else replay.filter.share
                return {
                    "head": replay.head,
                    "tail": replay.tail,
                    "items_added": replay.items_added,
                    "filtered": filtered,
                }
            case "read_batch":
                facts, arrays = batch_parts(replay.read_batch(state["serials"], state["weight"]))
                return {"facts": facts, "arrays": arrays}
            case "spans":
                return {"spans": [[lanes.start, lanes.stop, begin, end] for lanes, begin, end in replay.spans()]}
            case "seal":
                return {"steps_sealed": replay.seal(slice(state["begin"], state["end"]))}
            case "state":
                return replay.state_dict()
            case "read":
                return replay.store.read(state["begin"], state["end"], slice(state["first"], state["stop"]))
            case "compression_savings":
                savings = replay.store.compression_savings()
                return {} if savings is None else asdict(savings)
            case _:
                return self.handle_command(name, state)

    def handle_command(self, name: str, state: State) -> State:
        """Handle a request with an empty reply."""
        match name:
            case "clear":
                self.replay.clear()
            case "restore":
                lanes = slice(state["first"], state["stop"])
                self.replay.store.restore(state["begin"], state["end"], state["values"], lanes)
            case "load":
                self.replay.load_state_dict(state)
            case "reseed":
                self.replay.rng.bit_generator.state = state["rng"]
            case "set_history_file":
                self.history = history_in(state["file"])
            case _:
                raise ValueError(f"unknown request {name}")
        return {}


def history_in(file: str | None) -> HistoryLog:
    """A history in this file; none if the run directory is not on this machine."""
    return History(Path(file)) if file is not None and Path(file).parents[1].is_dir() else NoHistory()


def replay_main(setup: ReplaySetup) -> None:
    """Handle messages until the parent process ends."""
    parent = os.getppid()
    warm(replace(setup.spec, state=()))  # before the first message: compiled loops take long to load
    replay = own_replay(msgspec.json.decode(setup.plan, type=Plan), setup.spec)
    server = ReplayServer(shared_store(replay, setup.region), setup.history)
    while os.getppid() == parent:
        parts = setup.messages.get()
        if parts is None:
            time.sleep(NAP_SECONDS)
        elif parts[0]["kind"] == "request":
            answer_request(setup, server)
        elif (batch := server.handle_message(parts)) is not None:
            send_batch(setup, batch, parent)


def send_batch(setup: ReplaySetup, batch: Parts, parent: int) -> None:
    """Send a batch; wait for room while the parent lives."""
    while not setup.batches.put(*batch) and os.getppid() == parent:
        time.sleep(NAP_SECONDS)


def answer_request(setup: ReplaySetup, server: ReplayServer) -> None:
    """Receive a request, handle it and send the reply."""
    if not setup.pipe.poll(REQUEST_SECONDS):
        raise TimeoutError("a request without content")
    message = msgspec.msgpack.decode(setup.pipe.recv_bytes())
    name = message.pop("name")
    state = unpack_state(message) if message else {}
    setup.pipe.send_bytes(msgspec.msgpack.encode(pack_state(server.handle_request(name, state))))
