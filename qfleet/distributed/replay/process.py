"""The way to a replay in a process of its own on this machine: two rings, and rows in memory that both processes see.

Orders go through one ring, batches come back through a second one, calls and their answers through a pipe. A checkpoint
reads the rows here, between two orders.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qfleet.build.components import ReplayLost
from qfleet.data import Batch, Sequences, Spec, State
from qfleet.data.array_messages import as_batch, priority_parts, rollout_bytes
from qfleet.data.wire_format import Arrays, Facts, packed_bytes
from qfleet.distributed.replay.client import RemoteReplay, batch_bytes, batch_size
from qfleet.distributed.replay.server import NOTHING, WORDS_BYTES, ReplaySetup, keep, shared_store, store_region
from qfleet.distributed.worker.supervisor import LOOK_SECONDS
from qfleet.plan.schema import Plan, ProcessesRuntime
from qfleet.replay import Cut, make_replay
from qfleet.save import pack_state, unpack_state
from qfleet.system.child_process import hidden_main
from qfleet.system.ring import Ring
from qfleet.system.shared_memory import SharedMemory

NAP_SECONDS = 0.0002
END_SECONDS = 0.5
START_SECONDS = 30.0
# slots
ORDERS = 8
ANSWERS = 4


class SharedReplayConnection:
    """Starts a replay's process and talks to it through shared memory."""

    def __init__(
        self, plan: Plan, spec: Spec, cut: Cut, region: SharedMemory, context: ForkServerContext, hung_seconds: float
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.region = region
        self.context = context
        self.hung_seconds = hung_seconds
        self.answer_bytes = batch_bytes(plan, spec, cut)
        self.process: BaseProcess | None = None
        self.waiting: deque[Batch | Sequences | None] = deque()

    def start(self, history: Path | None) -> None:
        """A process with an empty replay."""
        self.end()
        self.orders = Ring(ORDERS, order_bytes(self.plan, self.spec))
        self.answers = Ring(ANSWERS, self.answer_bytes)
        self.calls, theirs = self.context.Pipe()
        self.words = SharedMemory(WORDS_BYTES)
        parts = (self.region, self.orders, self.answers, theirs, self.words)
        noted = None if history is None else str(history)
        post = ReplaySetup(msgspec.json.encode(self.plan), self.spec, *parts, noted)
        self.process = self.context.Process(target=keep, args=(post,), name="qfleet-replay", daemon=True)
        with hidden_main():
            self.process.start()
        theirs.close()
        self.begun = False  # it imports and compiles before its first answer

    def forget(self) -> None:
        """Batches that were asked for or have arrived are not wanted any more."""
        self.drain()
        self.waiting.clear()

    def end(self) -> None:
        """End the process."""
        if self.process is None:
            return
        self.process.kill()
        self.process.join(END_SECONDS)
        for part in (self.orders, self.answers, self.calls, self.words):
            part.close()
        self.process = None

    def close(self) -> None:
        """End the process and free its memory."""
        self.end()
        self.region.close()

    # Waiting

    def wait(self, ready: Callable[[], Any]) -> Any:
        """What `ready` answers when it is something; the wait has a limit."""
        patience = self.patience()
        waited = 0.0
        looked_at = time.monotonic()
        while (found := ready()) is None or found is False:
            if self.process is None or not self.process.is_alive():
                raise ReplayLost(self.last_words())
            if waited > patience:
                raise ReplayLost(f"the replay's process did not answer for {patience:g} s")
            time.sleep(NAP_SECONDS)
            # Whoever was stopped together with the replay must not find it hung on waking.
            waited = waited + min((now := time.monotonic()) - looked_at, LOOK_SECONDS)
            looked_at = now
        return found

    def patience(self) -> float:
        """Seconds without an answer until it counts as hung."""
        return self.hung_seconds if self.begun else max(self.hung_seconds, START_SECONDS)

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

    def last_words(self) -> str:
        """How the process ended, as far as it could say."""
        said = bytes(self.words.view).rstrip(b"\0").decode(errors="replace")
        if said or self.process is None:
            return f"the replay's process has died: {said or 'it was ended'}"
        self.process.join(END_SECONDS)  # its end is told a moment after that of its pipe
        code = self.process.exitcode
        return f"the replay's process has died{'' if code is None else f' with exit code {code}'}"

    # What goes there and comes back

    def order(self, facts: Facts, arrays: Arrays | None = None) -> None:
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

    def answered(self) -> bool:
        """Has a call been answered?"""
        self.drain()
        return self.calls.poll(0)

    def batch(self) -> Batch | Sequences | None:
        """The oldest batch that was asked for."""
        self.wait(self.arrived)
        return self.waiting.popleft()

    def arrived(self) -> bool:
        """Has a batch come, or the word that there is none?"""
        self.drain()
        return bool(self.waiting)

    def drain(self) -> None:
        """Take batches in, so that whoever makes them has room."""
        while (parts := self.answers.get()) is not None:
            self.waiting.append(None if parts[0].get("kind") == NOTHING else as_batch(parts, self.spec))


def make_shared_replay(plan: Plan, spec: Spec, context: ForkServerContext, runtime: ProcessesRuntime) -> RemoteReplay:
    """A replay whose rows lie in shared memory, and whose process is not started yet."""
    region = store_region(plan, spec)
    # A replay like the other one, for its rows and rules; its queue stays empty.
    twin = shared_store(make_replay(plan, spec, plan.env.num, np.random.default_rng(0)), region)
    way = SharedReplayConnection(plan, spec, twin.cut, region, context, runtime.hung_seconds)
    return RemoteReplay(plan, way, twin, twin.store, runtime.restarts)


def order_bytes(plan: Plan, spec: Spec) -> int:
    """The most that an order can need: a rollout with the world's own rewards beside it, or a batch's priorities."""
    rows = int(getattr(plan.runtime, "chunk_rows", 1))
    size = batch_size(plan)
    rollout = rollout_bytes(spec, plan.env.num, rows) + 4 * rows * plan.env.num + 4096
    return max(rollout, packed_bytes(*priority_parts(np.zeros(size, np.int64), np.zeros(size, np.float32))))
