"""Workers on Ray: a Ray actor handles messages one after the other; a message is a call, and its result the reply.

Ray only carries calls; their content is flat messages, checked on arrival.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from qfleet.data.wire_format import Arrays, Message, Parts, to_bytes, unpack
from qfleet.distributed.ray.nodes import actor_record, name_node, node_of, require_versions, versions_here
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.messages import Failed, PeerLost, Ready
from qfleet.distributed.worker.serve import Worker
from qfleet.distributed.worker.transport import MAX_MESSAGE_BYTES
from qfleet.system.silence import SilenceTimer
from qfleet.system.worker_errors import FinalError, WorkerDied, WorkerFailed, WorkerHung, WorkerLost

START_SECONDS = 120.0  # until the first reply: Ray finds a node, and the process imports
ALIVE_CHECK_SECONDS = 0.25  # asking Ray takes its time, so that it is not asked for every message
PLACE_CHECK_SECONDS = 1.0
PENDING_STATES = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")
FINAL_ERROR_SECONDS = 2.0
ERROR_CHARS = 300
RESULT_SECONDS = 30.0  # to fetch the result of a call that has returned
PROCESS_ENDED = "its process ended: "
MAX_CALLS = 8  # whose result was not taken yet
POLL_SECONDS = 0.25
IDLE_SECONDS = 0.01
YIELD_SECONDS = 0.0001
# `run` has a thread of its own; messages are handled in order by another. With max_concurrency=2 Ray keeps no order.
IDLE_GROUP = "idle"


# In the worker's process


class WorkerHost:
    """The process of a worker on Ray. Its methods have no annotations of ours: Ray would have to pickle them."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.requests: Any = None
        self.compress: tuple[str, ...] = ()
        self.failure = b""
        self.lock: Any = threading.Lock()  # held to handle a message, or to work

    def run(self) -> bytes:
        """Work while no message waits; returns the encoded FinalError when the worker fails, and else never."""
        while True:
            try:
                with self.lock:
                    busy = self.worker is not None and not self.failure and self.worker.work_when_idle()
            except Exception as error:
                self.failure = to_bytes(Failed(name_node(error)))
                return msgspec.msgpack.encode(name_node(error))
            time.sleep(YIELD_SECONDS if busy else IDLE_SECONDS)

    def start(
        self, make_worker: Any, setup: Any, requests: Any, compress: Any, concurrent: bool, versions: Any
    ) -> bytes:
        """Make the worker, which handles these messages; the reply says that it is ready.

        A `concurrent` worker handles messages in several threads at once and has locks of its own. A node with other
        `versions` than the trainer's makes no worker.
        """
        self.requests = requests
        self.compress = compress
        if concurrent:
            self.lock = nullcontext()
        try:
            require_versions(versions, versions_here(""))
            self.worker = make_worker(setup)
        except Exception as error:
            self.failure = to_bytes(Failed(name_node(error)))
        return self.failure or to_bytes(Ready())

    def handle(self, message: bytes) -> bytes:
        """Handle a message and return its reply, if it has one; after a failure, that failure."""
        reply = None
        with self.lock:
            try:
                if not self.failure:
                    reply = self.worker.handle(*unpack(message, self.requests, limit_bytes=MAX_MESSAGE_BYTES))
            except Exception as error:
                self.failure = to_bytes(Failed(name_node(error)))
        return self.failure if reply is None else to_bytes(*reply, compress=self.compress)


# In the parent's process


@dataclass(eq=False)
class CallTransport:
    """The parent's end: a call of the worker's host for each message, in order."""

    host: Any
    first: InitVar[Any]  # the call that starts the worker
    kind: Any
    room_seconds: float
    compress: Collection[str] = ()
    start_seconds: float = START_SECONDS
    started: bool = field(default=False, init=False)  # has the first call returned?
    replies: deque[bytes] = field(default_factory=deque, init=False)

    def __post_init__(self, first: Any) -> None:
        self.calls = deque([first])

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Call the host; if too many calls are under way, wait for the oldest."""
        try:
            self.calls.append(self.host.handle.remote(to_bytes(message, arrays, compress=self.compress)))
        except RayError as error:  # for example no room for the message
            raise connection_error(error) from error
        limit = self.room_seconds if self.started else max(self.room_seconds, self.start_seconds)
        waiting = SilenceTimer(time.monotonic())
        while len(self.calls) > MAX_CALLS and not self.take_result(POLL_SECONDS):
            if waiting.elapsed(time.monotonic()) > limit:
                raise TimeoutError(f"earlier messages are still unread: it did not answer for {limit:g} s")

    def take_result(self, timeout_seconds: float) -> bool:
        """Take the result of the oldest call, if it has returned in time; an empty one is no reply."""
        try:
            if not self.calls or not ray.wait([self.calls[0]], timeout=timeout_seconds)[0]:
                return False
            result = ray.get(self.calls[0], timeout=RESULT_SECONDS)
        except GetTimeoutError as error:
            raise TimeoutError(f"its reply did not arrive: it did not answer for {RESULT_SECONDS:g} s") from error
        except RayError as error:
            raise connection_error(error) from error
        self.calls.popleft()  # one that failed stays, and fails again
        self.started = True
        if result:
            self.replies.append(result)
        return True

    def receive(self, timeout_seconds: float) -> Parts | None:
        """The next reply; None if none came in time."""
        if not self.poll(timeout_seconds):
            return None
        if not self.replies:
            self.take_result(0.0)  # raises why the connection is broken
            return None
        kind = self.kind | Ready | PeerLost | Failed
        return unpack(self.replies.popleft(), kind, limit_bytes=MAX_MESSAGE_BYTES)

    def poll(self, timeout_seconds: float) -> bool:
        """Has a reply come, or is the connection broken?"""
        until = time.monotonic() + timeout_seconds
        try:
            while not self.replies and self.take_result(max(0.0, until - time.monotonic())):
                continue
        except OSError:
            return True
        return bool(self.replies)

    def close(self) -> None:
        """Forget all calls."""
        self.calls.clear()


def connection_error(error: Exception) -> ConnectionError:
    """An error of Ray as a broken connection."""
    return ConnectionError("its process on Ray is lost: " + " ".join(str(error).split())[:200])


@dataclass(eq=False)
class ResultWatch:
    """Which of many calls have returned or failed: Ray is asked once for all of them."""

    open: set[Any] = field(default_factory=set)  # under way, when Ray was asked last
    look_at: float = 0.0  # when to ask Ray again

    def add(self, result: Any) -> None:
        """Watch a call until it has ended."""
        self.open.add(result)

    def remove(self, result: Any) -> None:
        """Forget a call."""
        self.open.discard(result)

    def has_ended(self, result: Any) -> bool:
        """Has this call returned or failed? True for one that is not watched any more."""
        now = time.monotonic()
        if self.open and now >= self.look_at:
            ended, _ = ray.wait(list(self.open), num_returns=len(self.open), timeout=0)
            self.open.difference_update(ended)
            self.look_at = time.monotonic() + ALIVE_CHECK_SECONDS
        return result not in self.open


@dataclass(eq=False)
class RayWorker:
    """The process of a worker on Ray; `result` is that of a call which returns, or fails, when the worker ends.

    Workers that are looked after together share a `watch`.
    """

    host: Any
    result: Any
    watch: ResultWatch = field(default_factory=ResultWatch)
    placed: bool = False  # has Ray found a node for it?
    look_at: float = 0.0  # when to ask Ray again for its place

    def __post_init__(self) -> None:
        self.watch.add(self.result)

    def is_alive(self) -> bool:
        """Is the call still under way?"""
        return not self.watch.has_ended(self.result)

    def is_pending(self) -> bool:
        """Has Ray not found a node for it yet?"""
        now = time.monotonic()
        if not self.placed and now >= self.look_at:
            self.placed = actor_record(self.host).get("State") not in PENDING_STATES
            self.look_at = now + PLACE_CHECK_SECONDS
        return not self.placed

    def why_lost(self) -> WorkerLost:
        """The error that the worker returned, or how its process ended."""
        try:
            encoded = ray.get(self.result, timeout=FINAL_ERROR_SECONDS)
        except GetTimeoutError:
            return WorkerHung("it did not report why")
        except RayActorError as error:
            return WorkerDied(self.on_node(PROCESS_ENDED + end_of(str(error))))
        except RayError as error:
            return WorkerDied(self.on_node(str(error).strip().splitlines()[-1][:ERROR_CHARS]))
        if not encoded:
            return WorkerDied("it was told to stop")
        return WorkerFailed(msgspec.msgpack.decode(encoded, type=FinalError))

    def on_node(self, text: str) -> str:
        """A text with the name of the worker's node, if Ray still knows it."""
        node = node_of(self.host)
        return f"on node {node}: {text}" if node else text

    def request_stop(self) -> None:
        """A host has no way to be asked: the role's own messages say it."""

    def stop(self) -> None:
        """Kill it."""
        self.watch.remove(self.result)
        ray.kill(self.host, no_restart=True)


def end_of(text: str) -> str:
    """The end of a long error, in one line: the cause comes last."""
    line = " ".join(text.split())
    return line if len(line) <= ERROR_CHARS else f"... {line[-ERROR_CHARS:]}"


def launch_on_ray(
    role: str,
    make_worker: Callable[[Any], Worker],
    setup: Any,
    requests: Any,
    replies: Any,
    *,
    number: int = 0,
    cpus: float,
    name: str | None = None,
    threads: int = 1,
    start_seconds: float = START_SECONDS,
    room_seconds: float = 0.0,
    compress: Collection[str] = (),
) -> WorkerHandle:
    """Start a worker on any node that has room for it; Ray shows it as `<role>Host`, and finds it by its name.

    Messages are handled one after the other, unless it has several threads.
    """
    options = {"num_cpus": cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0, "name": name}
    remote_class = ray.remote(concurrency_groups={IDLE_GROUP: 1})(host_class(role))
    host = remote_class.options(**options, max_concurrency=threads).remote()
    control = RayWorker(host, host.run.options(concurrency_group=IDLE_GROUP).remote())
    started = host.start.remote(make_worker, setup, requests, tuple(compress), threads > 1, versions_here(""))
    transport = CallTransport(host, started, replies, room_seconds, compress, start_seconds)
    return WorkerHandle(number, transport, control, start_seconds=start_seconds)


def host_class(role: str) -> type:
    """WorkerHost under the name of the role: Ray's tools and the process list show the name of the class."""
    members = {name: member for name, member in vars(WorkerHost).items() if name not in ("__dict__", "__weakref__")}
    return type(f"{role}Host", (), members)
