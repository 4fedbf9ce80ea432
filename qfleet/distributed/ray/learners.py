"""Learner workers on Ray: each in an actor on a node with free resources, reached by calls and by gloo's sockets.

A request is a call and its reply is the call's result: flat messages, checked on arrival. Gradients of a process group
go by gloo.
"""

import importlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError

from qfleet.build.make import NO_USER_PARTS, UserParts
from qfleet.data import Spec
from qfleet.data.wire_format import Arrays, Facts, Parts, to_bytes, unpack
from qfleet.distributed.actors.main import MAX_ERROR_CHARACTERS
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.learners.launcher import ShardGroup, form_gloo_group, make_setup
from qfleet.distributed.learners.worker import LearnerSetup, LearnerWorker, join_group
from qfleet.distributed.ray.parameter_server import (
    MAX_MESSAGE_BYTES,
    START_SECONDS,
    RayPort,
    RayShards,
    comm_lost,
    find_shard,
)
from qfleet.learn import Learner
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import Comm
from qfleet.sync.gradient_rule import shard_bounds
from qfleet.sync.process_groups import make_rendezvous_store
from qfleet.sync.served import ShardConnection

ALIVE_CHECK_SECONDS = 0.25
IDLE_SECONDS = 0.01
YIELD_SECONDS = 0.0001


class ReplyQueue:
    """Replies of a learner worker; apart from its host, because Ray pickles the annotations of a host's methods."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()

    def send(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Queue the reply to the current request."""
        self.waiting.append(to_bytes(facts, arrays or {}))


class LearnerHost:
    """A learner worker in a Ray actor."""

    def __init__(self) -> None:
        self.worker: LearnerWorker | None = None
        self.replies = ReplyQueue()
        self.lock = threading.Lock()  # held to act, or to handle a request

    def live(self) -> None:
        """Never returns, so that the driver notices the end of the process; an actor-learner acts meanwhile."""
        while True:
            with self.lock:
                busy = self.worker is not None and self.worker.act_when_idle()
            time.sleep(YIELD_SECONDS if busy else IDLE_SECONDS)

    def start(self, setup: LearnerSetup) -> bytes:
        """Make the learner worker; the reply says that it is ready."""
        self.worker = LearnerWorker(setup, RayPeerConnections, self.replies.send)
        return to_bytes({"kind": "ready"}, {})

    def handle_request(self, message: bytes) -> bytes:
        """Handle one request and return its reply."""
        try:
            if self.worker is None:
                raise ValueError("a request before the start")
            with self.lock:
                self.worker.handle_request(unpack(message, limit_bytes=MAX_MESSAGE_BYTES))
            return self.replies.waiting.popleft()
        except Exception as error:
            return to_bytes({"kind": "failed", "cause": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}, {})


class RayPeerConnections:
    """A learner worker's connections: gloo between nodes, and calls to shards found by name."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        importlib.import_module("torch.distributed")  # now, while no group waits for this process

    def join(self, facts: Facts) -> Comm:
        """Join the process group that a `form` request describes."""
        return join_group(self.plan, facts, ray.util.get_node_ip_address())

    def connect_shards(self, sync_plan: Serving, learner: Learner, facts: Facts) -> Sequence[ShardConnection]:
        """Connect to the shards that a `form` request names."""
        names = cast(list[str], facts["shards"])
        rank = int(facts["rank"])  # type: ignore[arg-type]
        bounds = shard_bounds(sum(weight.numel() for weight in learner.parameters), sync_plan.shards)
        sizes = [end - begin for begin, end in bounds]
        limit = self.plan.learners.timeout_seconds
        return [RayPort(find_shard(name), rank, num, limit) for name, num in zip(names, sizes, strict=True)]

    def disconnect_shards(self) -> None:
        """Calls need not be closed."""


class CallTransport:
    """The driver's end of a connection to a learner worker: a call per request."""

    def __init__(self, host: Any, first: Any) -> None:
        self.host = host
        self.calls = deque([first])

    def send(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Call the learner's host."""
        self.calls.append(self.host.handle_request.remote(to_bytes(facts, arrays or {})))

    def receive(self, timeout_seconds: float) -> Parts | None:
        """The result of the oldest call; None if none came in time."""
        if not self.calls or not self.poll(timeout_seconds):
            return None
        try:
            return unpack(ray.get(self.calls.popleft(), timeout=START_SECONDS), limit_bytes=MAX_MESSAGE_BYTES)
        except (RayError, GetTimeoutError) as error:
            raise comm_lost(error) from error

    def poll(self, timeout_seconds: float) -> bool:
        """Has the oldest call returned or failed?"""
        return bool(self.calls and ray.wait([self.calls[0]], timeout=timeout_seconds)[0])


class RayProcessControl:
    """A learner worker's process; asking Ray takes its time, so that it is not asked for every update."""

    def __init__(self, host: Any, live_call: Any) -> None:
        self.host = host
        self.live_call = live_call
        self.lost = False
        self.next_at = 0.0

    def is_alive(self) -> bool:
        """Is the call that never returns still under way?"""
        now = time.monotonic()
        if not self.lost and now >= self.next_at:
            self.lost = bool(ray.wait([self.live_call], timeout=0)[0])
            self.next_at = now + ALIVE_CHECK_SECONDS
        return not self.lost

    def exit_reason(self) -> str:
        """Not known: the errors of calls tell."""
        return ""

    def stop(self) -> None:
        """Kill it."""
        self.lost = True
        ray.kill(self.host, no_restart=True)


class RayLearnerLauncher:
    """Starts learner workers and shards on any node with free resources."""

    replaces = True

    def __init__(self, plan: Plan, env_spec: Spec, spec: Spec, user_parts: UserParts = NO_USER_PARTS) -> None:
        self.plan = plan
        self.env_spec = env_spec
        self.spec = spec
        self.user_parts = user_parts
        self.address = ray.util.get_node_ip_address()
        self.store = make_rendezvous_store(self.address)

    def launch(self, number: int, incarnation: int) -> LearnerHandle:
        """Start a learner worker; Ray finds a node for it."""
        runtime = cast(RayRuntime, self.plan.runtime)
        # One thread for `live` and one for requests, which are handled one after the other.
        options = {"num_cpus": runtime.learner_cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        host = ray.remote(LearnerHost).options(**options, max_concurrency=2).remote()
        control = RayProcessControl(host, host.live.remote())
        setup = make_setup(self.plan, self.env_spec, self.spec, number, incarnation, self.user_parts)
        return LearnerHandle(number, CallTransport(host, host.start.remote(setup)), control, time.monotonic())

    def form_group(self, members: Sequence[LearnerHandle], facts: Facts, learner: Learner) -> Comm:
        """Form the group with gloo, at this process's store."""
        facts = {**facts, "address": self.address, "port": self.store.port}
        return form_gloo_group(self.plan, members, facts, self.address)

    def start_server(self, sync_plan: Serving, learner: Learner) -> ShardGroup:
        """Start a process for each shard."""
        return RayShards(self.plan, sync_plan, learner)
