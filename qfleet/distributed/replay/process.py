"""The connection to a replay process on this machine: two rings, a pipe, and rows in shared memory.

Messages go through one ring and batches come back through the other; requests and replies go through the pipe. A
checkpoint reads the rows here, between two messages.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qfleet.build.components import ReplayLost
from qfleet.data import Batch, Sequences, Spec, State
from qfleet.data.array_messages import as_batch, priority_parts, rollout_bytes
from qfleet.data.wire_format import Arrays, Facts, packed_bytes
from qfleet.distributed.replay.client import RemoteReplay, batch_bytes, batch_size
from qfleet.distributed.replay.server import NO_BATCH, ReplaySetup, replay_main, shared_store, store_region
from qfleet.distributed.worker.supervisor import MAX_POLL_GAP_SECONDS
from qfleet.plan.schema import Plan, ProcessesRuntime
from qfleet.replay import Cut, make_replay
from qfleet.save import pack_state, unpack_state
from qfleet.system.ring import Ring
from qfleet.system.shared_memory import SharedMemory
from qfleet.system.worker_process import WorkerOptions, WorkerProcess

NAP_SECONDS = 0.0002
START_SECONDS = 30.0
MESSAGE_SLOTS = 8
BATCH_SLOTS = 4


class SharedReplayConnection:
    """Starts a replay process and exchanges messages with it through shared memory."""

    def __init__(
        self, plan: Plan, spec: Spec, cut: Cut, region: SharedMemory, context: ForkServerContext, hung_seconds: float
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.region = region
        self.context = context
        self.hung_seconds = hung_seconds
        self.batch_limit_bytes = batch_bytes(plan, spec, cut)
        self.process: WorkerProcess | None = None
        self.received: deque[Batch | Sequences | None] = deque()

    def start(self, history: Path | None) -> None:
        """Start a process with an empty replay."""
        self.stop()
        self.messages = Ring(MESSAGE_SLOTS, message_bytes(self.plan, self.spec))
        self.batches = Ring(BATCH_SLOTS, self.batch_limit_bytes)
        self.pipe, server_end = self.context.Pipe()
        parts = (self.region, self.messages, self.batches, server_end)
        history_file = None if history is None else str(history)
        setup = ReplaySetup(msgspec.json.encode(self.plan), self.spec, *parts, history_file)
        self.process = WorkerProcess(self.context, "replay", replay_main, setup, WorkerOptions())
        self.process.start()
        server_end.close()
        self.has_replied = False  # it imports and compiles before its first reply

    def discard_batches(self) -> None:
        """Discard the batches that were requested or have arrived."""
        self.drain()
        self.received.clear()

    def stop(self) -> None:
        """Kill the process."""
        if self.process is None:
            return
        self.process.stop()
        for part in (self.messages, self.batches, self.pipe, self.process):
            part.close()
        self.process = None

    def close(self) -> None:
        """Kill the process and free its memory."""
        self.stop()
        self.region.close()

    # Waiting

    def wait(self, ready: Callable[[], Any]) -> Any:
        """Poll `ready` until it returns something other than None or False, at most timeout() seconds."""
        timeout = self.timeout()
        waited = 0.0
        checked_at = time.monotonic()
        while (found := ready()) is None or found is False:
            if self.process is None or not self.process.is_alive():
                raise ReplayLost(self.final_error())
            if waited > timeout:
                raise ReplayLost(f"the replay's process did not answer for {timeout:g} s")
            time.sleep(NAP_SECONDS)
            # A learner that was stopped together with the replay must not find it hung afterwards.
            now = time.monotonic()
            waited += min(now - checked_at, MAX_POLL_GAP_SECONDS)
            checked_at = now
        return found

    def timeout(self) -> float:
        """Seconds without a reply until the process counts as hung."""
        return self.hung_seconds if self.has_replied else max(self.hung_seconds, START_SECONDS)

    @contextmanager
    def kill_at_timeout(self) -> Iterator[None]:
        """Kill the process at the timeout: a pipe waits forever for a process stopped in the middle of a message."""
        process = self.process
        watchdog = threading.Timer(self.timeout(), lambda: process.stop() if process is not None else None)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def final_error(self) -> str:
        """The error that the process reported, or its exit code."""
        return f"the replay is lost: {'it was stopped' if self.process is None else self.process.how_ended()}"

    # Messages, requests and batches

    def send(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Send a message, without waiting for its effect."""
        self.wait(lambda: self.messages.put(facts, arrays or {}))

    def request(self, name: str, state: State | None = None) -> State:
        """Send a request and wait for the reply; all messages before it are handled first."""
        self.send({"kind": "request"})
        message = {"name": name, **({} if state is None else pack_state(state))}
        try:
            with self.kill_at_timeout():
                self.pipe.send_bytes(msgspec.msgpack.encode(message))
            self.wait(self.has_reply)
            with self.kill_at_timeout():
                reply = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise ReplayLost(self.final_error()) from None
        self.has_replied = True
        return unpack_state(msgspec.msgpack.decode(reply, type=dict[str, bytes]))

    def has_reply(self) -> bool:
        """Has the reply to a request come?"""
        self.drain()
        return self.pipe.poll(0)

    def receive_batch(self) -> Batch | Sequences | None:
        """The oldest batch that was drawn."""
        self.wait(self.has_batch)
        return self.received.popleft()

    def has_batch(self) -> bool:
        """Has a batch come, or the message that there is none?"""
        self.drain()
        return bool(self.received)

    def drain(self) -> None:
        """Receive batches, so that the ring has room for more."""
        while (parts := self.batches.get()) is not None:
            self.received.append(None if parts[0].get("kind") == NO_BATCH else as_batch(parts, self.spec))


def make_shared_replay(plan: Plan, spec: Spec, context: ForkServerContext, runtime: ProcessesRuntime) -> RemoteReplay:
    """A replay with its rows in shared memory; its process is not started yet."""
    region = store_region(plan, spec)
    # For its rows and rules; its queue stays empty.
    template = shared_store(make_replay(plan, spec, plan.env.num, np.random.default_rng(0)), region)
    connection = SharedReplayConnection(plan, spec, template.cut, region, context, runtime.hung_seconds)
    return RemoteReplay(plan, connection, template, template.store, runtime.restarts)


def message_bytes(plan: Plan, spec: Spec) -> int:
    """The largest size of a message: a rollout with raw rewards beside it, or the priorities of a batch."""
    rows = int(getattr(plan.runtime, "chunk_rows", 1))
    size = batch_size(plan)
    rollout = rollout_bytes(spec, plan.env.num, rows) + 4 * rows * plan.env.num + 4096
    return max(rollout, packed_bytes(*priority_parts(np.zeros(size, np.int64), np.zeros(size, np.float32))))
