"""A replay in a process of its own: batches are cut there while the learner updates here.

Everything the learner asks for goes through one ring in order (rows, priorities, draws), so the replay sees what it
would have seen in this process; batches come back through a second ring, asked for one ahead. Its rows lie in memory
that both processes see: a checkpoint reads them here, between two orders.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qfleet.data import Array, Batch, Rollout, Sequences, Spec, State, count_steps
from qfleet.data.budget import Budget
from qfleet.data.cargo import as_batch, batch_parts, blank_batch, priority_parts, rollout_bytes, rollout_parts
from qfleet.data.kin import hidden_main
from qfleet.data.region import Region
from qfleet.data.wire import Facts, packed_bytes
from qfleet.plan.schema import GrowingBatch, Plan, Processes
from qfleet.replay import ALL, Cut, Fold, Span, make_replay
from qfleet.run.replay_post import NOTHING, WORDS_BYTES, ReplayPost, keep, shared_store, store_region
from qfleet.run.shared import Ring
from qfleet.run.supervisor import LOOK_SECONDS
from qfleet.run.wiring import ReplayLost
from qfleet.save import pack_state, unpack_state

NAP_SECONDS, END_SECONDS, START_SECONDS = 0.0002, 0.5, 30.0
ORDERS, ANSWERS = 8, 4  # slots


class RemoteReplay:
    """Stands where a Replay stands; see there for what each method means."""

    def __init__(self, plan: Plan, spec: Spec, context: ForkServerContext, runtime: Processes) -> None:
        self.plan, self.spec, self.context = plan, spec, context
        self.hung_seconds, self.budget = runtime.hung_seconds, Budget(runtime.restarts)
        self.region = store_region(plan, spec)
        # A replay like the other one, for its rows and rules; its queue stays empty.
        self.twin = shared_store(make_replay(plan, spec, plan.env.num, np.random.default_rng(0)), self.region)
        self.lanes, self.capacity = self.twin.lanes, self.twin.capacity
        self.store, self.cut = self.twin.store, self.twin.cut
        self.filter = None if self.twin.filter is None else RemoteFilter(self)
        self._fold = self.twin.fold
        self.process: BaseProcess | None = None
        self.history: Path | None = None  # where its operations are noted
        self.asked = 0  # batches asked for and not yet used
        self.waiting: deque[Batch | Sequences | None] = deque()
        self.start()

    # The process

    def start(self) -> None:
        """A process with an empty replay."""
        self.end()
        self.orders, self.answers = Ring(ORDERS, order_bytes(self.plan, self.spec)), Ring(ANSWERS, self.answer_bytes())
        self.calls, theirs = self.context.Pipe()
        self.words = Region(WORDS_BYTES)
        parts = (self.region, self.orders, self.answers, theirs, self.words)
        noted = None if self.history is None else str(self.history)
        post = ReplayPost(msgspec.json.encode(self.plan), self.spec, *parts, noted)
        self.process = self.context.Process(target=keep, args=(post,), name="qfleet-replay", daemon=True)
        with hidden_main():
            self.process.start()
        theirs.close()
        self._fold = self.twin.fold  # as the plan says, like that of the new process
        self.begun = False  # it imports and compiles before its first answer
        self.forget()

    def settle(self, folder: Path) -> None:
        """The run's folder is here: if a history is kept, so is that of the replay."""
        if self.plan.log.history:
            self.history = folder / "history" / "replay.jsonl"
            with suppress(ReplayLost):  # the next one is told when it starts
                self.call("settle", {"file": str(self.history)})

    def forget(self) -> None:
        """Batches that were asked for or have arrived are not wanted any more."""
        self.drain()
        self.asked = 0
        self.waiting.clear()

    def rest(self) -> None:
        """Return when every order so far is done: only then may its rows be written here."""
        self.counts()

    def answer_bytes(self) -> int:
        """The most that a batch can need."""
        return packed_bytes(*batch_parts(blank_batch(self.spec, batch_size(self.plan), *window(self.cut))))

    def end(self) -> None:
        """End the process."""
        if self.process is None:
            return
        self.process.kill()
        self.process.join(END_SECONDS)
        for part in (self.orders, self.answers, self.calls, self.words):
            part.close()
        self.process = None

    def wait(self, ready: Callable[[], Any]) -> Any:
        """What `ready` answers when it is something; the wait has a limit."""
        patience, waited, looked_at = self.patience(), 0.0, time.monotonic()
        while (found := ready()) is None or found is False:
            if self.process is None or not self.process.is_alive():
                raise ReplayLost(self.last_words())
            if waited > patience:
                raise ReplayLost(f"the replay's process did not answer for {patience:g} s")
            time.sleep(NAP_SECONDS)
            # Whoever was stopped together with the replay must not find it hung on waking.
            waited, looked_at = waited + min((now := time.monotonic()) - looked_at, LOOK_SECONDS), now
        return found

    def last_words(self) -> str:
        """How the process ended, as far as it could say."""
        said = bytes(self.words.view).rstrip(b"\0").decode(errors="replace")
        if said or self.process is None:
            return f"the replay's process has died: {said or 'it was ended'}"
        self.process.join(END_SECONDS)  # its end is told a moment after that of its pipe
        code = self.process.exitcode
        return f"the replay's process has died{'' if code is None else f' with exit code {code}'}"

    def order(self, facts: Facts, arrays: dict[str, Array] | None = None) -> None:
        """Something to be done, in its turn."""
        self.wait(lambda: self.orders.put(facts, arrays or {}))

    def call(self, name: str, state: State | None = None) -> State:
        """Something to be done now, and its answer; all orders before are done first."""
        self.order({"kind": "call"})
        message = {"name": name, **({} if state is None else pack_state(state))}
        try:
            with self.limit():
                self.calls.send_bytes(msgspec.msgpack.encode(message))
            self.wait(self.answered)
            with self.limit():
                answer = self.calls.recv_bytes()
        except (EOFError, OSError):
            raise ReplayLost(self.last_words()) from None
        self.begun = True
        return unpack_state(msgspec.msgpack.decode(answer, type=dict[str, bytes]))

    @contextmanager
    def limit(self) -> Iterator[None]:
        """A pipe waits for ever for who was stopped in the middle of a message: kill it then, which ends the wait."""
        process = self.process
        watchdog = threading.Timer(self.patience(), lambda: process.kill() if process is not None else None)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def patience(self) -> float:
        """Seconds without an answer until it counts as hung."""
        return self.hung_seconds if self.begun else max(self.hung_seconds, START_SECONDS)

    def answered(self) -> bool:
        """Has a call been answered?"""
        self.drain()
        return self.calls.poll(0)

    def drain(self) -> None:
        """Take batches in, so that whoever makes them has room."""
        while (parts := self.answers.get()) is not None:
            self.waiting.append(None if parts[0].get("kind") == NOTHING else as_batch(parts, self.spec))

    # What a Replay does

    def add(self, rollout: Rollout, gain: Array | None = None, lanes: slice = ALL) -> int:
        """Store rows; they are on their way when this returns."""
        begin, end, _ = lanes.indices(self.lanes)
        facts, arrays = rollout_parts(rollout)
        extra = {"gain": gain} if gain is not None and self.store.gain is not None else {}
        self.order({**facts, "kind": "add", "begin": begin, "end": end}, {**arrays, **extra})
        return count_steps(rollout)

    def seal(self, lanes: slice = ALL) -> int:
        """End the episodes of these lanes."""
        begin, end, _ = lanes.indices(self.lanes)
        return int(self.call("seal", {"begin": begin, "end": end})["turned"])

    def sample(self, size: int) -> Batch | Sequences | None:
        """The batch that was asked for last time; the next one is asked for."""
        if not self.asked and not len(self):
            return None
        while self.asked < 2:
            self.order({"kind": "draw", "size": size})
            self.asked += 1
        self.wait(self.arrived)
        self.asked -= 1
        return self.waiting.popleft()

    def arrived(self) -> bool:
        """Has a batch come, or the word that there is none?"""
        self.drain()
        return bool(self.waiting)

    def update(self, ids: Array, priority: Array) -> None:
        """New priorities, on their way."""
        facts, arrays = priority_parts(ids, priority.astype(np.float32))
        self.order(facts, arrays)

    @property
    def fold(self) -> Fold:
        """How rewards are summed."""
        return self._fold

    @fold.setter
    def fold(self, fold: Fold) -> None:
        if fold != self._fold:
            self._fold = fold
            self.order({"kind": "fold", **asdict(fold)})

    def counts(self) -> State:
        """Serial numbers and how many items were ready."""
        return self.call("counts")

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
        items = self.call("items", {"serials": serials})["items"]
        return self.cut.cut(self.store, items, self.fold, weight, serials)

    def spans(self) -> list[Span]:
        """The rows that are needed, by lanes."""
        return [(slice(a, b), begin, end) for a, b, begin, end in self.call("spans")["spans"]]

    def clear(self) -> None:
        """Forget everything."""
        self.call("clear")
        self.forget()

    def state_dict(self) -> State:
        """All but the rows."""
        return self.call("state")

    def load_state_dict(self, state: State) -> None:
        """Come back; the rows were restored here."""
        self.call("load", state)
        self.forget()

    def reseed(self, rng: np.random.Generator) -> None:
        """Draw other batches from here on."""
        self.call("reseed", {"rng": rng.bit_generator.state})

    def close(self) -> None:
        """End the process and free its memory."""
        self.end()
        self.region.close()


class RemoteFilter:
    """What is known here of the filter there."""

    def __init__(self, replay: RemoteReplay) -> None:
        self.replay = replay

    @property
    def share(self) -> float:
        """The share of items that it kept out."""
        return float(self.replay.counts()["filtered"])


def order_bytes(plan: Plan, spec: Spec) -> int:
    """The most that an order can need: a rollout with the world's own rewards beside it, or a batch's priorities."""
    rows, size = int(getattr(plan.runtime, "chunk_rows", 1)), batch_size(plan)
    rollout = rollout_bytes(spec, plan.env.num, rows) + 4 * rows * plan.env.num + 4096
    return max(rollout, packed_bytes(*priority_parts(np.zeros(size, np.int64), np.zeros(size, np.float32))))


def window(cut: Cut) -> tuple[int, int]:
    """Rows of a window and how many are learned from; zeros for single steps."""
    return (getattr(cut, "rows", 0), getattr(cut, "length", 0))


def batch_size(plan: Plan) -> int:
    """Items of the largest batch there will be."""
    steer = plan.steer.batch
    largest = steer.largest if isinstance(steer, GrowingBatch) else plan.algo.batch_size
    return largest * plan.population.num
