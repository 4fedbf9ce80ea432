"""A replay in a Ray actor: messages are remote calls, handled in order, and batches are their return values.

Messages and replies are flat array messages, checked on arrival. The rows exist only there, so a checkpoint requests
them. A replay that has failed once replies to everything with that failure, so no message after it has an effect.
"""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from qfleet.build.components import ReplayLost
from qfleet.build.make import own_replay
from qfleet.build.memory_check import require_replay, sample_replay
from qfleet.data import Batch, Sequences, Spec, State
from qfleet.data.array_messages import as_batch
from qfleet.data.wire_format import Arrays, Facts, Parts, to_bytes, unpack
from qfleet.distributed.actors.launcher import COMPRESSED_COLUMNS
from qfleet.distributed.replay.client import RemoteReplay, RemoteRows, batch_bytes, buffer_of
from qfleet.distributed.replay.server import NO_BATCH, ReplayServer
from qfleet.errors import UsageError
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.replay import ring_rows
from qfleet.replay.warm import warm
from qfleet.save import pack_state, unpack_state
from qfleet.system.worker_process import final_error_of

START_SECONDS = 120.0  # until its first reply: Ray finds a node, and the process imports and compiles
POLL_SECONDS = 0.25
MAX_PENDING = 8  # calls whose result was not checked yet
MAX_MESSAGE_BYTES = 1 << 32
FAILED = "failed"
COMPRESSED_ARRAYS = (*COMPRESSED_COLUMNS, "next_obs")


# In the replay's process


class ReplayHost:
    """The replay's process, on a node that Ray chose."""

    def __init__(self) -> None:
        self.server: ReplayServer | None = None
        self.failure = b""
        self.compress: tuple[str, ...] = ()

    def handle_message(self, message: bytes) -> bytes:
        """Handle a message; a draw and a request return a message, the others empty bytes."""
        try:
            return self.failure or self.reply_to(message)
        except Exception as error:
            self.failure = to_bytes({"kind": FAILED, **msgspec.structs.asdict(final_error_of(error))}, {})
            return self.failure

    def reply_to(self, message: bytes) -> bytes:
        """The reply to a message."""
        facts, arrays = unpack(message, limit_bytes=MAX_MESSAGE_BYTES)
        if facts["kind"] == "start":
            self.start_server(facts)
            return b""
        if self.server is None:
            raise ValueError("a message before the start")
        if facts["kind"] == "request":
            return to_bytes(*state_parts({}, self.server.handle_request(str(facts["name"]), state_in(arrays))))
        batch = self.server.handle_message((facts, arrays))
        return b"" if batch is None else to_bytes(*batch, compress=self.compress)

    def start_server(self, facts: Any) -> None:
        """Make an empty replay, if this node has the memory for it when it is full."""
        plan = msgspec.json.decode(facts["plan"], type=Plan)
        spec = msgspec.json.decode(facts["spec"], type=Spec)
        require_replay(plan, spec)
        warm(replace(spec, state=()))  # before the first message: compiled loops take long to load
        self.server = ReplayServer(own_replay(plan, spec), facts["history"])
        self.compress = compressed_arrays(plan)


def compressed_arrays(plan: Plan) -> tuple[str, ...]:
    """The arrays that this plan compresses in messages."""
    return COMPRESSED_ARRAYS if isinstance(plan.runtime, RayRuntime) and plan.runtime.compress else ()


def state_parts(facts: Facts, state: State) -> Parts:
    """A state tree as the parts of a message."""
    return facts, {name: np.frombuffer(file, np.uint8) for name, file in pack_state(state).items()}


def state_in(arrays: Arrays) -> State:
    """The state tree in a message."""
    return unpack_state({name: array.tobytes() for name, array in arrays.items()})


# In the learner's process


class RayReplayConnection:
    """Starts a replay's process on any node that has room, and calls it."""

    def __init__(self, plan: Plan, spec: Spec, runtime: RayRuntime, batch_limit_bytes: int) -> None:
        self.plan = plan
        self.spec = spec
        self.runtime = runtime
        self.batch_limit_bytes = batch_limit_bytes
        self.compress = compressed_arrays(plan)
        self.host: Any = None
        self.has_replied = False  # this process
        self.has_ever_replied = False  # any process
        self.pending: deque[Any] = deque()  # calls whose result was not checked yet
        self.draws: deque[Any] = deque()

    def start(self, history: Path | None) -> None:
        """Start a process with an empty replay."""
        self.close()
        # With max_concurrency=1 Ray runs the calls of one caller in order.
        options = {"num_cpus": self.runtime.replay_cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        self.host = ray.remote(ReplayHost).options(**options, max_concurrency=1).remote()
        self.has_replied = False
        plan, spec = (msgspec.json.encode(part).decode() for part in (self.plan, self.spec))
        history_file = None if history is None else str(history)
        self.send({"kind": "start", "plan": plan, "spec": spec, "history": history_file})

    def send(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Send a message; with more than MAX_PENDING under way, check the result of the oldest first."""
        call = self.submit(facts, arrays or {})
        if facts["kind"] == "draw":
            self.draws.append(call)
            return
        self.pending.append(call)
        if len(self.pending) > MAX_PENDING:
            self.receive(self.pending.popleft())

    def receive_batch(self) -> Batch | Sequences | None:
        """The oldest batch that was drawn."""
        parts = self.receive(self.draws.popleft(), self.batch_limit_bytes)
        try:
            return None if parts[0].get("kind") == NO_BATCH else as_batch(parts, self.spec)
        except ValueError as error:
            raise ReplayLost(f"the replay's process on Ray sent an invalid batch: {error}") from error

    def request(self, name: str, state: State | None = None) -> State:
        """Send a request and wait for the reply; all messages before it are handled first."""
        _, arrays = self.receive(self.submit(*state_parts({"kind": "request", "name": name}, state or {})))
        self.pending.clear()  # a failure of any of them would have failed this request
        return state_in(arrays)

    def discard_batches(self) -> None:
        """Discard the batches that were requested or have arrived."""
        self.draws.clear()

    def close(self) -> None:
        """Kill the process."""
        self.pending.clear()
        self.draws.clear()
        if self.host is not None:
            ray.kill(self.host, no_restart=True)
        self.host = None

    def submit(self, facts: Facts, arrays: Arrays) -> Any:
        """Start a remote call; returns its future."""
        if self.host is None:
            raise ReplayLost("the replay's process on Ray was stopped")
        try:
            return self.host.handle_message.remote(to_bytes(facts, arrays, compress=self.compress))
        except RayError as error:  # for example no room for the message
            raise replay_lost(error) from error

    def receive(self, call: Any, limit_bytes: int = MAX_MESSAGE_BYTES) -> Parts:
        """The reply to a call; raises if it is a failure."""
        reply = self.wait_for_reply(call)
        try:
            parts: Parts = unpack(reply, limit_bytes=limit_bytes) if reply else ({}, {})
        except ValueError as error:
            raise ReplayLost(f"the replay's process on Ray sent a damaged message: {error}") from error
        if parts[0].get("kind") == FAILED:
            raise failure_error(parts[0], first=not self.has_ever_replied)
        self.has_replied = True
        self.has_ever_replied = True
        return parts

    def wait_for_reply(self, call: Any) -> bytes:
        """The reply as bytes; waits at most timeout() seconds."""
        timeout = self.timeout()
        try:
            # Count polls, not seconds: a learner that was stopped with the replay must not find it hung afterwards.
            for _ in range(1 + int(timeout / POLL_SECONDS)):
                if ray.wait([call], timeout=POLL_SECONDS)[0]:
                    return bytes(ray.get(call, timeout=timeout))
        except GetTimeoutError:
            pass
        except RayError as error:
            raise replay_lost(error) from error
        raise ReplayLost(f"the replay's process on Ray did not answer for {timeout:g} s")

    def timeout(self) -> float:
        """Seconds without a reply until the process counts as hung."""
        hung = self.runtime.hung_seconds
        return hung if self.has_replied else max(hung, START_SECONDS)


def replay_lost(error: RayError) -> ReplayLost:
    """The loss that an error of Ray's means."""
    return ReplayLost(f"the replay's process on Ray is lost: {' '.join(str(error).split())[:200]}")


def failure_error(facts: Facts, *, first: bool) -> Exception:
    """The failure as an exception. A UsageError ends a run that begins, because a restart cannot fix it.

    Later a restart can: a node that has just lost a replay may not have its memory back yet.
    """
    if first and facts["exit_code"] == UsageError.exit_code:
        return UsageError(str(facts["what"]), str(facts["why"]), str(facts["fix"]))
    return ReplayLost(f"the replay's process on Ray has failed: {facts['what']}")


def make_ray_replay(plan: Plan, spec: Spec, runtime: RayRuntime) -> RemoteReplay:
    """A replay on Ray, not started yet. Nothing of its size is allocated here: it may exceed this node's memory."""
    template = sample_replay(plan, spec)
    lanes = plan.env.num
    connection = RayReplayConnection(plan, spec, runtime, batch_bytes(plan, spec, template.cut))
    rows = ring_rows(buffer_of(plan).capacity, spec, lanes, template.cut.window)
    store = RemoteRows(connection, template.store, lanes, rows)
    return RemoteReplay(plan, connection, template, store, runtime.restarts)
