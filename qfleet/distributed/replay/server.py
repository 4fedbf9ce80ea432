"""What a replay that lives elsewhere does: it obeys orders, one after the other; and the rings that bring them."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qfleet.audit.history import NOTED_IDS, History, HistoryLog, NoHistory
from qfleet.build.components import own_replay
from qfleet.data import Array, Spec, State
from qfleet.data.array_messages import as_priorities, as_rollout, batch_parts
from qfleet.data.wire_format import Parts
from qfleet.distributed.actors.main import logging_to
from qfleet.plan.schema import Plan
from qfleet.replay import Fold, Replay, Store, make_replay
from qfleet.replay.warm import warm
from qfleet.save import pack_state, unpack_state
from qfleet.system.child_process import die_with_parent
from qfleet.system.ring import Ring
from qfleet.system.shared_memory import SharedMemory

NAP_SECONDS = 0.0002
WORDS_BYTES = 1_000
CALL_SECONDS = 60.0  # a call's content follows its order at once
LINE = 128
NOTHING = "nothing"  # stands where a batch was asked for and there is none


@dataclass
class ReplaySetup:
    """Everything the process needs to know."""

    plan: bytes  # as JSON
    spec: Spec
    region: SharedMemory
    orders: Ring
    answers: Ring
    calls: Connection
    words: SharedMemory  # what went wrong, in words
    history: str | None  # the file that operations are noted in, if they are


def columns_of(store: Store) -> dict[str, Array]:
    """What both processes see: every column, and how far each lane is."""
    return {**store.columns(), "heads": store.heads}


def store_region(plan: Plan, spec: Spec) -> SharedMemory:
    """Memory for the rows of the plan's replay."""
    columns = columns_of(make_replay(plan, spec, plan.env.num, np.random.default_rng(0)).store)
    return SharedMemory(sum(padded(column.nbytes) for column in columns.values()))


def padded(size: int) -> int:
    """Columns begin at whole lines of memory."""
    return -(-size // LINE) * LINE


def shared_store(replay: Replay, region: SharedMemory) -> Replay:
    """The replay with its rows in this memory, as they are there."""
    begin = 0
    store = replay.store
    for name, column in columns_of(store).items():
        view = np.ndarray(column.shape, column.dtype, region.view, begin)
        setattr(store, name, view)
        begin += padded(column.nbytes)
    return replay


# What obeys


class ReplayServer:
    """A replay and the orders it obeys, whoever brings them."""

    def __init__(self, replay: Replay, history: str | None) -> None:
        self.replay = replay
        self.history = notes_in(history)
        self.orders: dict[str, Callable[[Parts], Parts | None]] = {
            "add": self.add,
            "priorities": self.update,
            "draw": self.draw,
            "fold": self.fold,
        }

    def obey(self, parts: Parts) -> Parts | None:
        """Do what is ordered; a draw is answered."""
        return self.orders[str(parts[0]["kind"])](parts)

    def add(self, parts: Parts) -> None:
        """Store a rollout."""
        facts, arrays = parts
        gain = arrays.pop("gain", None)
        lanes = slice(int(facts["begin"]), int(facts["end"]))  # type: ignore[arg-type]
        rollout = as_rollout(({**facts, "kind": "rollout"}, arrays), self.replay.spec, lanes.stop - lanes.start)
        self.replay.add(rollout, gain, lanes)
        self.note("stored", source=rollout.source)

    def note(self, op: str, **fields: Any) -> None:
        """Write an operation down, with the serial numbers that can be drawn after it."""
        self.history.note("replay", op, **fields, tail=self.replay.tail, head=self.replay.head)

    def update(self, parts: Parts) -> None:
        """Take priorities back."""
        self.replay.update(*as_priorities(parts))

    def fold(self, parts: Parts) -> None:
        """Sum rewards in another way."""
        self.replay.fold = Fold(**{name: value for name, value in parts[0].items() if name != "kind"})  # type: ignore[arg-type]

    def draw(self, parts: Parts) -> Parts:
        """Cut a batch."""
        batch = self.replay.sample(int(parts[0]["size"]))  # type: ignore[arg-type]
        if batch is None:
            # Asked for ahead of its time: what was ready then may all have been pushed out since.
            return {"kind": NOTHING}, {}
        self.note("drawn", ids=batch.ids[:NOTED_IDS].tolist())
        return batch_parts(batch)

    def answer(self, name: str, state: State) -> State:
        """What a call wants to know, or to have done."""
        replay = self.replay
        match name:
            case "counts":
                filtered = 0.0 if replay.filter is None else replay.filter.share
                return {"head": replay.head, "tail": replay.tail, "ready": replay.ready, "filtered": filtered}
            case "take":
                facts, arrays = batch_parts(replay.take(state["serials"], state["weight"]))
                return {"facts": facts, "arrays": arrays}
            case "spans":
                return {"spans": [[lanes.start, lanes.stop, begin, end] for lanes, begin, end in replay.spans()]}
            case "seal":
                return {"turned": replay.seal(slice(state["begin"], state["end"]))}
            case "state":
                return replay.state_dict()
            case "read":
                return replay.store.read(state["begin"], state["end"], slice(state["first"], state["stop"]))
            case "saving":
                saving = replay.store.saving()
                return {} if saving is None else asdict(saving)
            case _:
                return self.change(name, state)

    def change(self, name: str, state: State) -> State:
        """Calls that only change something."""
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
            case "settle":
                self.history = notes_in(state["file"])
            case _:
                raise ValueError(f"no call {name}")
        return {}


def notes_in(file: str | None) -> HistoryLog:
    """Who notes operations in this file of a run's folder; nobody, where there is no such folder."""
    return History(Path(file)) if file is not None and Path(file).parents[1].is_dir() else NoHistory()


# What brings orders to a process of this machine


def keep(post: ReplaySetup) -> None:
    """The life of a replay's process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with logging_to(None):
        try:
            run(post, os.getppid())
        except Exception as error:
            said = f"{type(error).__name__}: {error}".encode()[:WORDS_BYTES]
            post.words.view[: len(said)] = said
            raise


def run(post: ReplaySetup, parent: int) -> None:
    """Obey until the parent is gone."""
    warm(replace(post.spec, state=()))  # before the first order: compiled loops take their time to load
    replay = own_replay(msgspec.json.decode(post.plan, type=Plan), post.spec)
    keeping = ReplayServer(shared_store(replay, post.region), post.history)
    while os.getppid() == parent:
        parts = post.orders.get()
        if parts is None:
            time.sleep(NAP_SECONDS)
        elif parts[0]["kind"] == "call":
            reply(post, keeping)
        elif (batch := keeping.obey(parts)) is not None:
            hand_over(post, batch, parent)


def hand_over(post: ReplaySetup, batch: Parts, parent: int) -> None:
    """A batch waits for room, as long as somebody may still make it."""
    while not post.answers.put(*batch) and os.getppid() == parent:
        time.sleep(NAP_SECONDS)


def reply(post: ReplaySetup, keeping: ReplayServer) -> None:
    """Something with an answer of any size."""
    if not post.calls.poll(CALL_SECONDS):
        raise TimeoutError("a call without content")
    message = msgspec.msgpack.decode(post.calls.recv_bytes())
    name = message.pop("name")
    state = unpack_state(message) if message else {}
    post.calls.send_bytes(msgspec.msgpack.encode(pack_state(keeping.answer(name, state))))
