"""A replay on a node of a Ray cluster: calls of one process, obeyed one after the other; batches are what calls answer.

Whatever goes there and comes back is a flat parcel, checked on arrival. Its rows lie there alone, so a checkpoint asks
for them. A replay that has failed once answers everything with that failure: nothing is made of what it lacks.
"""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from qfleet.build.components import ReplayLost, own_replay
from qfleet.build.memory_check import require_here, sample_replay
from qfleet.data import Batch, Sequences, Spec, State
from qfleet.data.array_messages import as_batch
from qfleet.data.wire_format import Arrays, Facts, Parts, to_bytes, unpack
from qfleet.distributed.actors.main import words_of
from qfleet.distributed.actors.pool import IN_FLIGHT
from qfleet.distributed.replay.client import RemoteReplay, RemoteRows, batch_bytes, buffer_of
from qfleet.distributed.replay.server import NOTHING, ReplayServer
from qfleet.errors import UsageError
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.replay import ring_rows
from qfleet.replay.warm import warm
from qfleet.save import pack_state, unpack_state

START_SECONDS = 120.0  # until its first answer: a node has to be found, and its process imports and compiles
LOOK_SECONDS = 0.25
ORDERS = 8  # on their way at most
MOST_BYTES = 1 << 32  # of a parcel
FAILED = "failed"
SQUEEZED = (*IN_FLIGHT, "next_obs")  # the arrays that travel compressed, if any do


# There


class ReplayHost:
    """The process of the replay, on whatever node Ray chose."""

    def __init__(self) -> None:
        self.keeping: ReplayServer | None = None
        self.failure = b""
        self.compress: tuple[str, ...] = ()

    def obey(self, parcel: bytes) -> bytes:
        """Do what a parcel says; a draw and a call are answered with a parcel, everything else with nothing."""
        try:
            return self.failure or self.done(parcel)
        except Exception as error:
            self.failure = to_bytes({"kind": FAILED, **msgspec.structs.asdict(words_of(error))}, {})
            return self.failure

    def done(self, parcel: bytes) -> bytes:
        """The answer to a parcel."""
        facts, arrays = unpack(parcel, limit_bytes=MOST_BYTES)
        if facts["kind"] == "start":
            self.begin(facts)
            return b""
        if self.keeping is None:
            raise ValueError("an order before the start")
        if facts["kind"] == "call":
            return to_bytes(*state_parts({}, self.keeping.answer(str(facts["name"]), state_in(arrays))))
        batch = self.keeping.obey((facts, arrays))
        return b"" if batch is None else to_bytes(*batch, compress=self.compress)

    def begin(self, facts: Any) -> None:
        """Become an empty replay, if this node has the memory for it when it is full."""
        plan = msgspec.json.decode(facts["plan"], type=Plan)
        spec = msgspec.json.decode(facts["spec"], type=Spec)
        require_here(plan, spec)
        warm(replace(spec, state=()))  # before the first order: compiled loops take their time to load
        self.keeping = ReplayServer(own_replay(plan, spec), facts["history"])
        self.compress = squeezed(plan)


def squeezed(plan: Plan) -> tuple[str, ...]:
    """The arrays that this plan wants compressed on their way."""
    return SQUEEZED if isinstance(plan.runtime, RayRuntime) and plan.runtime.compress else ()


def state_parts(facts: Facts, state: State) -> Parts:
    """A tree of state as a parcel carries it."""
    return facts, {name: np.frombuffer(file, np.uint8) for name, file in pack_state(state).items()}


def state_in(arrays: Arrays) -> State:
    """The tree that a parcel carries."""
    return unpack_state({name: array.tobytes() for name, array in arrays.items()})


# Here


class RayReplayConnection:
    """Starts a replay's process on any node that has room, and calls it."""

    def __init__(self, plan: Plan, spec: Spec, runtime: RayRuntime, answer_bytes: int) -> None:
        self.plan = plan
        self.spec = spec
        self.runtime = runtime
        self.answer_bytes = answer_bytes
        self.compress = squeezed(plan)
        self.host: Any = None
        self.begun = self.proven = False  # has this process answered, has any?
        self.orders: deque[Any] = deque()  # calls that nobody has looked at the end of
        self.draws: deque[Any] = deque()

    def start(self, history: Path | None) -> None:
        """A process with an empty replay."""
        self.close()
        # Calls of one caller are obeyed in their order by a process that obeys one at a time.
        options = {"num_cpus": self.runtime.replay_cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        self.host = ray.remote(ReplayHost).options(**options, max_concurrency=1).remote()
        self.begun = False
        plan, spec = (msgspec.json.encode(part).decode() for part in (self.plan, self.spec))
        noted = None if history is None else str(history)
        self.order({"kind": "start", "plan": plan, "spec": spec, "history": noted})

    def order(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Something to be done, in its turn; so many may be under way, and each is looked at in the end."""
        call = self.send(facts, arrays or {})
        if facts["kind"] == "draw":
            self.draws.append(call)
            return
        self.orders.append(call)
        if len(self.orders) > ORDERS:
            self.answer(self.orders.popleft())

    def batch(self) -> Batch | Sequences | None:
        """The oldest batch that was asked for."""
        parts = self.answer(self.draws.popleft(), self.answer_bytes)
        try:
            return None if parts[0].get("kind") == NOTHING else as_batch(parts, self.spec)
        except ValueError as error:
            raise ReplayLost(f"the replay's process on Ray sent no batch: {error}") from error

    def call(self, name: str, state: State | None = None) -> State:
        """Something to be done now, and its answer; all orders before are done first."""
        _, arrays = self.answer(self.send(*state_parts({"kind": "call", "name": name}, state or {})))
        self.orders.clear()  # had one of them failed, so had the call
        return state_in(arrays)

    def forget(self) -> None:
        """Batches that were asked for or have arrived are not wanted any more."""
        self.draws.clear()

    def close(self) -> None:
        """End the process."""
        self.orders.clear()
        self.draws.clear()
        if self.host is not None:
            ray.kill(self.host, no_restart=True)
        self.host = None

    def send(self, facts: Facts, arrays: Arrays) -> Any:
        """Call it."""
        if self.host is None:
            raise ReplayLost("the replay's process on Ray was ended")
        try:
            return self.host.obey.remote(to_bytes(facts, arrays, compress=self.compress))
        except RayError as error:  # no room for the parcel, for one
            raise gone(error) from error

    def answer(self, call: Any, limit_bytes: int = MOST_BYTES) -> Parts:
        """What a call was answered with, unless that is a failure."""
        found = self.fetched(call)
        try:
            parts: Parts = unpack(found, limit_bytes=limit_bytes) if found else ({}, {})
        except ValueError as error:
            raise ReplayLost(f"the replay's process on Ray sent no whole parcel: {error}") from error
        if parts[0].get("kind") == FAILED:
            raise failure(parts[0], first=not self.proven)
        self.begun = self.proven = True
        return parts

    def fetched(self, call: Any) -> bytes:
        """The answer as it came; the wait has a limit."""
        patience = self.patience()
        try:
            # Looks are counted, not seconds: who was stopped together with the replay must not find it hung on waking.
            for _ in range(1 + int(patience / LOOK_SECONDS)):
                if ray.wait([call], timeout=LOOK_SECONDS)[0]:
                    return bytes(ray.get(call, timeout=patience))
        except GetTimeoutError:
            pass
        except RayError as error:
            raise gone(error) from error
        raise ReplayLost(f"the replay's process on Ray did not answer for {patience:g} s")

    def patience(self) -> float:
        """Seconds without an answer until it counts as hung."""
        hung = self.runtime.hung_seconds
        return hung if self.begun else max(hung, START_SECONDS)


def gone(error: RayError) -> ReplayLost:
    """Ray cannot reach it."""
    return ReplayLost(f"the replay's process on Ray is gone: {' '.join(str(error).split())[:200]}")


def failure(facts: Facts, *, first: bool) -> Exception:
    """What went wrong there. An error of usage ends a run that begins: another try cannot mend it.

    Later another try can: a node that has just lost a replay may not have its memory back yet.
    """
    if first and facts["exit_code"] == UsageError.exit_code:
        return UsageError(str(facts["what"]), str(facts["why"]), str(facts["fix"]))
    return ReplayLost(f"the replay's process on Ray has failed: {facts['what']}")


def make_ray_replay(plan: Plan, spec: Spec, runtime: RayRuntime) -> RemoteReplay:
    """A replay on Ray, not started yet. Of its size nothing is made here: it may be more than this node has."""
    like = sample_replay(plan, spec)
    lanes = plan.env.num
    way = RayReplayConnection(plan, spec, runtime, batch_bytes(plan, spec, like.cut))
    rows = ring_rows(buffer_of(plan).capacity, spec, lanes, like.cut.window)
    store = RemoteRows(way, like.store, lanes, rows)
    return RemoteReplay(plan, way, like, store, runtime.restarts)
