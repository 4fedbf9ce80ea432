"""Partners and shards on Ray: each in a process of a node that has room, reached by calls and by gloo's sockets.

An order is a call, and its word is what the call answers with: flat parcels, checked on arrival. Gradients of a group
go by gloo; one for a server's shard is a call too, answered when the shard's rule says so.
"""

import importlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from qfleet.data import Array, Spec
from qfleet.data.wire_format import Arrays, Facts, Parts, to_bytes, unpack
from qfleet.distributed.actors.main import MOST_CHARACTERS
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.learners.launcher import NOTHING_OWN, Own, ShardGroup, by_sockets, orders_for
from qfleet.distributed.learners.worker import LearnerSetup, LearnerWorker, join_group
from qfleet.distributed.parameter_server.driver import Blocks, standing
from qfleet.distributed.parameter_server.shard import VERDICTS, WeightBlock, read
from qfleet.distributed.ray.rpc import TABLE_BYTES
from qfleet.learn import Learner
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.make import make_codec
from qfleet.sync.packed import PackedGradient, push_parcel, pushed
from qfleet.sync.process_groups import make_store
from qfleet.sync.served import ShardConnection
from qfleet.sync.shard import Push, Verdict, cuts_of

START_SECONDS = 120.0
LOOK_SECONDS = 0.25
TICK_SECONDS = 0.005
LIFE_SECONDS = 0.01
YIELD_SECONDS = 0.0001
MOST_BYTES = 1 << 32  # of a parcel


def lost(error: Exception) -> CommLost:
    """What an error of Ray's means."""
    return CommLost("its process on Ray is gone: " + " ".join(str(error).split())[:200])


# Partners


class ReplyQueue:
    """What a partner says; not a part of its host, because Ray sends the annotations of a host's methods along."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()

    def say(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Answer the call that is being obeyed."""
        self.waiting.append(to_bytes(facts, arrays or {}))


class LearnerHost:
    """A partner in a process of Ray's."""

    def __init__(self) -> None:
        self.partner: LearnerWorker | None = None
        self.words = ReplyQueue()
        self.turn = threading.Lock()  # of acting, or of obeying

    def live(self) -> None:
        """Never answered: who waits for it learns of the end. A bundle acts meanwhile."""
        while True:
            with self.turn:
                busy = self.partner is not None and self.partner.idle()
            time.sleep(YIELD_SECONDS if busy else LIFE_SECONDS)

    def start(self, orders: LearnerSetup) -> bytes:
        """Become a partner; the answer is its first word."""
        self.partner = LearnerWorker(orders, RayPeerConnections, self.words.say)
        return to_bytes({"kind": "ready"}, {})

    def obey(self, parcel: bytes) -> bytes:
        """An order, and the word for it."""
        try:
            if self.partner is None:
                raise ValueError("an order before the start")
            with self.turn:
                self.partner.obey(unpack(parcel, limit_bytes=MOST_BYTES))
            return self.words.waiting.popleft()
        except Exception as error:
            return to_bytes({"kind": "failed", "what": f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]}, {})


class RayPeerConnections:
    """A partner's ways to the others: gloo between nodes, calls to shards that are known by name."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        importlib.import_module("torch.distributed")  # now, while nobody waits for us in a group

    def join(self, facts: Facts) -> Comm:
        """The group that an order names."""
        return join_group(self.plan, facts, ray.util.get_node_ip_address())

    def seats(self, agreement: Serving, learner: Learner, facts: Facts) -> Sequence[ShardConnection]:
        """The ways to the shards that an order names."""
        names = cast(list[str], facts["shards"])
        rank = int(facts["rank"])  # type: ignore[arg-type]
        cuts = cuts_of(sum(weight.numel() for weight in learner.parameters), agreement.shards)
        limit = self.plan.learners.timeout_seconds
        return [RayPort(found(name), rank, end - begin, limit) for name, (begin, end) in zip(names, cuts, strict=True)]

    def leave(self) -> None:
        """Calls need not be closed."""


def found(name: str) -> Any:
    """A shard by its name."""
    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise CommLost(f"there is no shard {name}") from error


class CallTransport:
    """The driver's end of what connects it with a partner."""

    def __init__(self, host: Any, first: Any) -> None:
        self.host = host
        self.calls = deque([first])

    def say(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Call it."""
        self.calls.append(self.host.obey.remote(to_bytes(facts, arrays or {})))

    def hear(self, limit_seconds: float) -> Parts | None:
        """The answer to the oldest call."""
        if not self.calls or not self.waits(limit_seconds):
            return None
        try:
            return unpack(ray.get(self.calls.popleft(), timeout=START_SECONDS), limit_bytes=MOST_BYTES)
        except (RayError, GetTimeoutError) as error:
            raise lost(error) from error

    def waits(self, limit_seconds: float) -> bool:
        """Has the oldest call been answered, or will it never be?"""
        return bool(self.calls and ray.wait([self.calls[0]], timeout=limit_seconds)[0])


class RayProcessControl:
    """A partner's process, as the driver sees it; asking Ray takes its time, so that is not done for every update."""

    def __init__(self, host: Any, life: Any) -> None:
        self.host = host
        self.life = life
        self.gone = False
        self.next_at = 0.0

    def is_alive(self) -> bool:
        """Has its life not been answered for?"""
        now = time.monotonic()
        if not self.gone and now >= self.next_at:
            self.gone = bool(ray.wait([self.life], timeout=0)[0])
            self.next_at = now + LOOK_SECONDS
        return not self.gone

    def end(self) -> None:
        """Kill it."""
        self.gone = True
        ray.kill(self.host, no_restart=True)


class RayLearnerLauncher:
    """Any node that has room."""

    replaces = True

    def __init__(self, plan: Plan, shown: Spec, spec: Spec, own: Own = NOTHING_OWN) -> None:
        self.plan = plan
        self.shown = shown
        self.spec = spec
        self.own = own
        self.address = ray.util.get_node_ip_address()
        self.store = make_store(self.address)

    def hire(self, number: int, incarnation: int) -> LearnerHandle:
        """Start a partner; Ray finds a node for it."""
        runtime = cast(RayRuntime, self.plan.runtime)
        # One thread for its life and one for orders, which are obeyed one after the other.
        options = {"num_cpus": runtime.learner_cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        host = ray.remote(LearnerHost).options(**options, max_concurrency=2).remote()
        life = RayProcessControl(host, host.live.remote())
        orders = orders_for(self.plan, self.shown, self.spec, number, incarnation, self.own)
        return LearnerHandle(number, CallTransport(host, host.start.remote(orders)), life, time.monotonic())

    def meet(self, group: Sequence[LearnerHandle], facts: Facts, learner: Learner) -> Comm:
        """By sockets, at our store."""
        return by_sockets(self.plan, group, {**facts, "address": self.address, "port": self.store.port}, self.address)

    def serve(self, agreement: Serving, learner: Learner) -> ShardGroup:
        """A process for each shard."""
        return RayShards(self.plan, agreement, learner)


# A parameter server


class ShardHost:
    """A shard in a process of Ray's; every learner calls from a thread of its own."""

    def __init__(self, plan: bytes, sync: bytes, pieces: list[int], state: bytes) -> None:
        torch.set_num_threads(1)
        decode = msgspec.json.decode
        agreement = decode(sync, type=Serving)
        self.block = WeightBlock(decode(plan, type=Plan), agreement, pieces)
        self.codec = make_codec(agreement.codec, [], 0, 0)
        self.block.load(rows_in(state))
        self.changed = threading.Condition()
        self.releases = 0
        if self.block.shard.window_seconds < float("inf"):
            threading.Thread(target=self.tick, daemon=True).start()

    def tick(self) -> None:
        """Close windows in time."""
        while True:
            time.sleep(TICK_SECONDS)
            with self.changed:
                if self.block.shard.tend(time.monotonic()):
                    self.changed.notify_all()

    def enlist(self, learners: int) -> int:
        """So many will push; how many there are."""
        with self.changed:
            for _ in range(learners):
                self.block.shard.enlist()
            return self.block.shard.workers

    def push(self, rank: int, sequence: int, version: int, rate: float, parcel: bytes, limit_seconds: float) -> bytes:
        """A gradient; the answer is what became of it, and the newest weights."""
        block = self.block
        shard = self.block.shard
        gradient = pushed(parcel, self.codec, len(shard.weights), MOST_BYTES)
        with self.changed:
            block.rate = rate
            made = shard.version + 1
            verdict: Verdict = shard.push(Push((rank, 0, sequence), version, gradient), time.monotonic())
            if verdict == "applied":
                verdict = block.verdict(made)
                self.changed.notify_all()
            elif verdict == "waiting" and block.waits:
                verdict = self.awaited(made, rank, limit_seconds)
                if verdict == "waiting":
                    return b""
            facts: Facts = {"verdict": VERDICTS.index(verdict), "version": shard.version}
            return to_bytes(facts, {"0": shard.weights.numpy()})

    def awaited(self, made: int, rank: int, limit_seconds: float) -> Verdict:
        """What became of a gradient that waits for the step to version `made`; still waiting after the limit."""
        block = self.block
        shard = self.block.shard
        before = self.releases
        limit = min(limit_seconds, block.hold_seconds) if rank else limit_seconds

        def is_over() -> bool:
            return shard.version >= made or self.releases > before

        if not self.changed.wait_for(is_over, limit):
            if limit < limit_seconds and not shard.holds(0):
                shard.excuse(rank)  # it waits for rank 0, not for others
            elif not self.changed.wait_for(is_over, limit_seconds - limit):
                return "waiting"
        return block.verdict(made) if shard.version >= made else "stale"

    def release(self) -> None:
        """Nobody waits for a step any more."""
        with self.changed:
            self.block.shard.release()
            self.releases += 1
            self.changed.notify_all()

    def state(self) -> tuple[bytes, bytes]:
        """Everything it holds, and how things stand."""
        with self.changed:
            self.block.shard.settle()
            rows = [np.zeros(sum(self.block.pieces), np.float32) for _ in self.block.kept]
            for tensors, row in zip(self.block.kept, rows, strict=True):
                read(tensors, row)
            return parcel_of(rows), msgspec.json.encode(self.block.counts())


def parcel_of(rows: Sequence[Array]) -> bytes:
    """Rows as a parcel."""
    return to_bytes({"rows": len(rows)}, {str(at): np.ascontiguousarray(row) for at, row in enumerate(rows)})


def rows_in(parcel: bytes) -> list[Array]:
    """The rows of a parcel."""
    facts, arrays = unpack(parcel, limit_bytes=MOST_BYTES)
    return [arrays[str(at)] for at in range(int(facts["rows"]))]  # type: ignore[arg-type]


class RayPort:
    """A learner's way to a shard of n numbers."""

    def __init__(self, shard: Any, rank: int, num: int, limit_seconds: float) -> None:
        self.shard = shard
        self.rank = rank
        self.num = num
        self.limit_seconds = limit_seconds
        self.call: Any = None
        self.sent_bytes = 0

    def push(
        self, gradient: Tensor, sequence: int, version: int, rate: float, packed: PackedGradient | None = None
    ) -> None:
        """Call it, with the fewer bytes."""
        parcel = push_parcel(gradient, packed)
        self.sent_bytes += len(parcel)
        self.call = self.shard.push.remote(self.rank, sequence, version, rate, parcel, self.limit_seconds)

    def reply(self) -> tuple[Verdict, int, Tensor]:
        """Wait for the answer."""
        try:
            answer = ray.get(self.call, timeout=self.limit_seconds)
        except (RayError, GetTimeoutError) as error:
            raise lost(error) from error
        if not answer:
            raise CommLost("others did not push to a server's shard in time")
        facts, arrays = unpack(answer, limit_bytes=4 * self.num + TABLE_BYTES)
        return VERDICTS[int(facts["verdict"])], int(facts["version"]), torch.from_numpy(arrays["0"])  # type: ignore[arg-type]


class RayShards:
    """All shards of a parameter server, begun with what a learner has."""

    def __init__(self, plan: Plan, sync: Serving, learner: Learner) -> None:
        self.limit = plan.learners.timeout_seconds
        self.blocks = Blocks(learner, sync.shards)
        told = (msgspec.json.encode(plan), msgspec.json.encode(sync))
        names = [f"qfleet-shard-{secrets.token_hex(8)}" for _ in self.blocks.cuts]
        self.facts: Facts = {"shards": list(names)}
        # They wait more than they compute. A thread for each learner that waits, and some for the driver.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        options |= {"max_concurrency": plan.learners.num + 64}
        host = ray.remote(ShardHost)
        self.shards = [
            host.options(**options, name=name).remote(*told, pieces, parcel_of(rows))
            for name, pieces, rows in zip(names, self.blocks.pieces(), self.blocks.split(learner), strict=True)
        ]

    def all(self, method: str, *arguments: Any, limit: float | None = None) -> list[Any]:
        """What every shard answers to a call."""
        try:
            calls = [getattr(shard, method).remote(*arguments) for shard in self.shards]
            return list(ray.get(calls, timeout=limit or self.limit))
        except (RayError, GetTimeoutError) as error:
            raise lost(error) from error

    def seat(self, rank: int) -> Sequence[ShardConnection]:
        """Our own ways to all shards."""
        self.all("enlist", 1, limit=START_SECONDS)  # the first call, which waits for their processes and imports
        sizes = [sum(pieces) for pieces in self.blocks.pieces()]
        return [RayPort(shard, rank, num, self.limit) for shard, num in zip(self.shards, sizes, strict=True)]

    def invite(self, group: Sequence[LearnerHandle]) -> None:
        """They find the shards by name; each is waited for."""
        self.all("enlist", len(group))

    def release(self) -> None:
        """Whoever waits for a step goes on without."""
        self.all("release")

    def gather(self, learner: Learner) -> dict[str, Any]:
        """Write what the shards have into a learner; how far they are, and how stale gradients were."""
        told = self.all("state")
        self.blocks.join([rows_in(parcel) for parcel, _ in told], learner)
        return standing([msgspec.json.decode(counts) for _, counts in told])

    def close(self) -> None:
        """End them."""
        for shard in self.shards:
            ray.kill(shard, no_restart=True)
