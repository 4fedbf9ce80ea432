"""Messages between the learner and its actors on Ray, without Ray itself: both ends, and their rules.

The learner's endpoint has an inbox for each actor. An actor's sender has one call under way at a time and sends the
same rollout again until a reply comes, so a lost reply costs one call and nothing else. A full inbox lets the call wait
a little and then replies "not accepted": that is the back-pressure. An older incarnation of an actor is told to stop.

A call carries two packed messages: the actor's report, which is new each time, and its oldest rollout, which is packed
once, however often it is sent.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from qfleet.act.policy import NonFiniteValues
from qfleet.data import Rollout, Spec
from qfleet.data.array_messages import CompressionStats, pack_rollout, rollout_bytes, unpack_rollout
from qfleet.data.wire_format import HEADER_BYTES, MessageNotWhole, to_bytes, unpack
from qfleet.distributed.actors.messages import ActorReply, ActorReport, EnvFaultMessage, PublishedWeights
from qfleet.distributed.actors.weights_board import Weights, WeightsLayout, all_finite

ROOM_SECONDS = 0.25  # how long a call waits for room
HEARTBEAT_SECONDS = 0.5  # the longest time between two messages
RETRY_SECONDS = 0.1  # after a call without a reply
TABLE_BYTES = HEADER_BYTES + 4096  # for the header and the array table of a message
REPORT_BYTES = 1 << 24  # the largest report: faults of environments wait until a reply comes


class NoReply(Exception):
    """A call had no reply in time; it may have arrived or not."""


Send: TypeAlias = Callable[[ActorReport, bytes], ActorReply]  # a report, and a packed rollout or nothing
Fetch: TypeAlias = Callable[[int], tuple[int, bytes] | None]  # weights newer than this version


class RolloutInbox:
    """Rollouts of one incarnation of an actor: each once, in order, and `slots` of them at most."""

    def __init__(
        self, spec: Spec, lanes: int, rows: int, slots: int, source: tuple[int, int], num_info: int = 0
    ) -> None:
        self.spec = spec
        self.num_info = num_info  # numbers of `log.info` for each episode
        self.lanes = lanes
        self.slots = slots
        self.source = source
        self.limit_bytes = rollout_bytes(spec, lanes, rows, num_info)
        self.waiting: deque[Rollout] = deque()
        self.expected = 0
        self.closed = False
        self.counters: dict[str, int] = {}
        self.faults: list[EnvFaultMessage] = []
        self.num_faults = 0  # received so far
        self.changed = threading.Condition()

    def put(self, message: bytes, wait_seconds: float = ROOM_SECONDS) -> bool:
        """Receive a packed rollout; False if it must be sent again. An invalid one is a ValueError."""
        if len(message) > self.limit_bytes:
            raise ValueError(f"a rollout of {len(message)} bytes; {self.limit_bytes} at most were expected")
        try:
            rollout = unpack_rollout(
                message, self.spec, self.lanes, limit_bytes=self.limit_bytes, num_info=self.num_info
            )
        except MessageNotWhole:
            return False  # damaged in transit
        sequence = rollout.source[2]
        if rollout.source[:2] != self.source or sequence > self.expected:
            raise ValueError(f"{rollout.source} came where {(*self.source, self.expected)} was expected")
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.waiting) < self.slots, wait_seconds)
            if sequence < self.expected:
                return True  # the reply was lost
            if self.closed or len(self.waiting) >= self.slots:
                return False
            self.waiting.append(rollout)
            self.expected += 1
            return True

    def record(self, report: ActorReport) -> None:
        """Record counters, and faults that are new: they are sent again if a reply was lost."""
        with self.changed:
            self.counters = report.counters
            new_faults = report.faults[max(0, self.num_faults - report.first_fault) :]
            self.faults.extend(new_faults)
            self.num_faults += len(new_faults)

    def get(self) -> Rollout | None:
        """The oldest rollout waiting, if any."""
        with self.changed:
            if not self.waiting:
                return None
            self.changed.notify_all()
            return self.waiting.popleft()

    def progress(self) -> int:
        """The progress counter in the actor's last report."""
        return self.counters.get("progress", 0)

    def env_faults(self) -> list[EnvFaultMessage]:
        """Environment faults reported since the last call."""
        with self.changed:
            faults = self.faults
            self.faults = []
        return faults

    def request_stop(self) -> None:
        """Reply "stop" from now on, and accept nothing more; waiting rollouts can still be read."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def close(self) -> None:
        """Free the rollouts that nobody will read."""
        self.request_stop()
        self.waiting.clear()


class LearnerEndpoint:
    """The learner's end of all channels, and the newest weights; called from many threads."""

    def __init__(self) -> None:
        self.inboxes: dict[int, RolloutInbox] = {}
        self.version = 0
        self.env_steps = 0
        self.published: Any = None  # version and place of the newest weights

    def open(self, inbox: RolloutInbox) -> RolloutInbox:
        """Receive messages of this inbox's incarnation only, from now on."""
        self.inboxes[inbox.source[0]] = inbox
        return inbox

    def receive_packed(self, report: bytes, rollout: bytes) -> bytes:
        """Receive a call of an actor; returns the packed reply."""
        message, _ = unpack(report, ActorReport, limit_bytes=REPORT_BYTES)
        return to_bytes(self.receive(message, rollout))

    def receive(self, report: ActorReport, rollout: bytes) -> ActorReply:
        """Receive a report, and a packed rollout if there is one."""
        inbox = self.inboxes.get(report.worker)
        if inbox is None or inbox.closed or inbox.source != (report.worker, report.incarnation):
            return ActorReply(False, self.version, True, self.env_steps)
        inbox.record(report)
        accepted = bool(rollout) and inbox.put(rollout)
        return ActorReply(accepted, self.version, False, self.env_steps)

    def publish(self, version: int, place: Any) -> None:
        """Publish the place of new weights."""
        self.published = (version, place)
        self.version = version

    def weights(self, newer_than: int) -> Any:
        """The version and the place of the newest weights, if newer."""
        return self.published if self.version > newer_than else None


class FlatWeights:
    """Packs weights into messages."""

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout = layout
        self.bytes = np.zeros(layout.size, np.uint8)
        self.targets = [part for member in layout.views(torch.from_numpy(self.bytes)) for part in member.values()]

    def pack(self, version: int, weights: Weights) -> bytes:
        """A message with a copy of these weights, which must be finite."""
        tensors = self.layout.tensors(weights)
        if not all_finite(tensors):
            raise NonFiniteValues("weights are not finite")
        with torch.no_grad():
            torch._foreach_copy_(self.targets, tensors)
        return to_bytes(PublishedWeights(version), {"flat": self.bytes})


class WeightsView:
    """The actor's copy of the weights board, updated by replies."""

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout = layout
        self.device = torch.device("cpu")
        self.newest: tuple[int, bytes] = (0, b"")  # version and message
        self.weights: tuple[int, Any] = (0, None)  # version and tensors
        self.env_steps = 0  # in the last reply

    def numbers(self) -> dict[str, int]:
        """The numbers of the last reply."""
        return {"env_steps": self.env_steps}

    def publish(self, version: int, weights: Any) -> None:
        """Not used by an actor."""

    def read(self, newer_than: int) -> tuple[int, Any] | None:
        """The newest weights, if newer than this version."""
        version, message = self.newest
        if version <= newer_than:
            return None
        if version != self.weights[0]:
            self.weights = (version, self.unpack_weights(version, message))
        return self.weights

    def unpack_weights(self, version: int, message: bytes) -> Any:
        """The tensors in a message."""
        found, arrays = unpack(message, PublishedWeights, limit_bytes=self.layout.size + TABLE_BYTES)
        flat = arrays.get("flat")
        if found.version != version or flat is None or flat.shape != (self.layout.size,):
            raise ValueError(f"not the weights of version {version}: {found}")
        members = self.layout.views(torch.from_numpy(flat))
        return members[0] if self.layout.single else members


class ActorCounters:
    """An actor's counters, which are sent with every message."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {"progress": 0}

    def add(self, worker: int, **values: int) -> None:
        """Add to some counters."""
        for name, value in values.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def set(self, worker: int, **values: int) -> None:
        """Replace some counters."""
        self.counts.update(values)


@dataclass(eq=False)
class RolloutSender:
    """An actor's end of its channel. `put` never blocks; a thread calls `step` to send."""

    source: tuple[int, int]  # worker and incarnation
    send: Send
    fetch: Fetch
    weights_view: WeightsView
    counters: ActorCounters
    slots: int
    compress: Collection[str] = ()
    compression_stats: CompressionStats = field(default_factory=CompressionStats)
    faults: list[EnvFaultMessage] = field(default_factory=list)  # not received by the learner yet
    num_faults_sent: int = 0
    outbox: deque[Rollout] = field(default_factory=deque)
    packed: bytes = b""  # the oldest rollout, once packed
    changed: threading.Condition = field(default_factory=threading.Condition)
    stopped: bool = False  # the learner replied "stop", or cannot be reached
    failure: BaseException | None = None

    def put(self, rollout: Rollout) -> bool:
        """Queue a rollout; False when there is no room. Raises the error that ended the sending thread."""
        if self.failure is not None:
            raise self.failure
        with self.changed:
            if len(self.outbox) >= self.slots:
                return False
            self.outbox.append(rollout)
            self.changed.notify()
            return True

    def get(self) -> Rollout | None:
        """Not used by an actor."""
        return None

    def report_fault(self, message: EnvFaultMessage) -> None:
        """Report a fault of an environment, with the next call."""
        with self.changed:
            self.faults.append(message)

    def run(self) -> None:
        """Send until the learner replies "stop"."""
        try:
            while not self.stopped:
                self.step()
        except BaseException as error:
            self.failure = error
            self.stopped = True

    def step(self) -> None:
        """Send one report, with the oldest rollout if any, and fetch new weights if there are any."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.outbox), HEARTBEAT_SECONDS)
            oldest = self.outbox[0] if self.outbox else None
            faults = tuple(self.faults)
        if oldest is not None and not self.packed:
            stats = self.compression_stats if self.compress else None
            self.packed = pack_rollout(oldest, compress=self.compress, compression_stats=stats)
        report = ActorReport(*self.source, dict(self.counters.counts), self.num_faults_sent, faults)
        try:
            self.on_reply(self.send(report, self.packed), len(faults))
        except NoReply:
            time.sleep(RETRY_SECONDS)

    def on_reply(self, reply: ActorReply, num_faults: int) -> None:
        """Forget what the learner has received, and fetch new weights if there are any."""
        with self.changed:
            self.num_faults_sent += num_faults
            del self.faults[:num_faults]
        self.weights_view.env_steps = reply.env_steps
        self.stopped = reply.stop
        if reply.accepted and self.packed:
            self.outbox.popleft()
            self.packed = b""
        version = self.weights_view.newest[0]
        if reply.version > version and (found := self.fetch(version)) is not None:
            self.weights_view.newest = found
