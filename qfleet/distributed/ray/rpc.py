"""Messages between the learner and its actors on Ray, without Ray itself: both ends, and their rules.

The learner's endpoint has an inbox for each actor. An actor's sender has one call under way at a time and sends the
same message again until a reply comes, so a lost reply costs one call and nothing else. A full inbox lets the call wait
a little and then replies "not accepted": that is the back-pressure. An older incarnation of an actor is told to stop.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from qfleet.act.policy import NonFiniteValues
from qfleet.data import Rollout, Spec
from qfleet.data.array_messages import CompressionStats, pack_rollout, rollout_bytes, unpack_rollout
from qfleet.data.wire_format import HEADER_BYTES, MessageNotWhole, to_bytes, unpack
from qfleet.distributed.actors.weights_board import Weights, WeightsLayout, all_finite

ROOM_SECONDS = 0.25  # how long a call waits for room
HEARTBEAT_SECONDS = 0.5  # the longest time between two messages
RETRY_SECONDS = 0.1  # after a call without a reply
TABLE_BYTES = HEADER_BYTES + 4096  # for the header and the array table of a message


class NoReply(Exception):
    """A call had no reply in time; it may have arrived or not."""


class RolloutReply(NamedTuple):
    """The learner's reply to every message of an actor."""

    accepted: bool  # the rollout need not be sent again
    version: int  # of the newest weights
    stop: bool
    env_steps: int  # of all actors


class RolloutMessage(NamedTuple):
    """A message from an actor to the learner."""

    counters: Mapping[str, int]
    rollout: bytes  # empty for a heartbeat
    first_fault: int = 0  # the serial number of the first fault in `faults`
    faults: Sequence[bytes] = ()  # encoded EnvFaultMessages


Send: TypeAlias = Callable[[RolloutMessage], RolloutReply]
Fetch: TypeAlias = Callable[[int], tuple[int, bytes] | None]  # weights newer than this version


class RolloutInbox:
    """Rollouts of one incarnation of an actor: each once, in order, and `slots` of them at most."""

    def __init__(self, spec: Spec, lanes: int, rows: int, slots: int, source: tuple[int, int]) -> None:
        self.spec = spec
        self.lanes = lanes
        self.slots = slots
        self.source = source
        self.limit_bytes = rollout_bytes(spec, lanes, rows)
        self.waiting: deque[Rollout] = deque()
        self.expected = 0
        self.closed = False
        self.counters: dict[str, int] = {}
        self.faults: deque[bytes] = deque()
        self.num_faults = 0  # received so far
        self.changed = threading.Condition()

    def put(self, message: bytes, wait_seconds: float = ROOM_SECONDS) -> bool:
        """Receive a packed rollout; False if it must be sent again. An invalid one is a ValueError."""
        if len(message) > self.limit_bytes:
            raise ValueError(f"a rollout of {len(message)} bytes; {self.limit_bytes} at most were expected")
        try:
            rollout = unpack_rollout(message, self.spec, self.lanes, limit_bytes=self.limit_bytes)
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

    def record(self, message: RolloutMessage) -> None:
        """Record counters, and faults that are new: they are sent again if a reply was lost."""
        with self.changed:
            self.counters = dict(message.counters)
            new_faults = message.faults[max(0, self.num_faults - message.first_fault) :]
            self.faults.extend(new_faults)
            self.num_faults += len(new_faults)

    def get(self) -> Rollout | None:
        """The oldest rollout waiting, if any."""
        with self.changed:
            if not self.waiting:
                return None
            self.changed.notify_all()
            return self.waiting.popleft()

    def close(self) -> None:
        """Accept nothing more; waiting rollouts can still be read."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


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

    def receive(self, worker: int, incarnation: int, message: RolloutMessage) -> RolloutReply:
        """Receive a message of an actor."""
        inbox = self.inboxes.get(worker)
        if inbox is None or inbox.closed or inbox.source != (worker, incarnation):
            return RolloutReply(False, self.version, True, self.env_steps)
        inbox.record(message)
        accepted = bool(message.rollout) and inbox.put(message.rollout)
        return RolloutReply(accepted, self.version, False, self.env_steps)

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
        return to_bytes({"kind": "weights", "version": version}, {"flat": self.bytes})


class WeightsView:
    """The actor's copy of the weights board, updated by replies."""

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout = layout
        self.device = torch.device("cpu")
        self.newest: tuple[int, bytes] = (0, b"")  # version and message
        self.weights: tuple[int, Any] = (0, None)  # version and tensors
        self.last_numbers = {"env_steps": 0, "stop": 0}

    def update(self, reply: RolloutReply) -> None:
        """Take the numbers of a reply."""
        self.last_numbers = {"env_steps": reply.env_steps, "stop": int(reply.stop)}

    def set_newest(self, version: int, message: bytes) -> None:
        """Keep a message with newer weights."""
        self.newest = (version, message)

    def numbers(self) -> dict[str, int]:
        """The numbers of the last reply."""
        return self.last_numbers

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
        facts, arrays = unpack(message, limit_bytes=self.layout.size + TABLE_BYTES)
        flat = arrays.get("flat")
        if facts != {"kind": "weights", "version": version} or flat is None or flat.shape != (self.layout.size,):
            raise ValueError(f"not the weights of version {version}: {facts}")
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


class RolloutSender:
    """An actor's end of its channel. `put` never blocks; a thread calls `step` to send."""

    def __init__(
        self,
        send: Send,
        fetch: Fetch,
        weights_view: WeightsView,
        counters: ActorCounters,
        slots: int,
        read_faults: Callable[[], list[bytes]],
        compress: Collection[str] = (),
    ) -> None:
        self.send = send
        self.fetch = fetch
        self.weights_view = weights_view
        self.counters = counters
        self.slots = slots
        self.read_faults = read_faults
        self.compress = compress
        self.compression_stats = CompressionStats()
        self.unsent_faults = list[bytes]()
        self.num_faults_sent = 0
        self.outbox: deque[Rollout] = deque()
        self.packed = b""  # the oldest rollout, once packed
        self.changed = threading.Condition()
        self.failure: BaseException | None = None

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

    def run(self) -> None:
        """Send until the learner replies "stop"."""
        try:
            while not self.weights_view.last_numbers["stop"]:
                self.step()
        except BaseException as error:
            self.failure = error
            self.weights_view.last_numbers = {**self.weights_view.last_numbers, "stop": 1}

    def step(self) -> None:
        """Send one message, with the oldest rollout if any, and fetch new weights if there are any."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.outbox), HEARTBEAT_SECONDS)
            oldest = self.outbox[0] if self.outbox else None
        if oldest is not None and not self.packed:
            stats = self.compression_stats if self.compress else None
            self.packed = pack_rollout(oldest, compress=self.compress, compression_stats=stats)
        self.unsent_faults += self.read_faults()
        faults = tuple(self.unsent_faults)
        try:
            reply = self.send(RolloutMessage(dict(self.counters.counts), self.packed, self.num_faults_sent, faults))
            self.num_faults_sent += len(faults)
            self.unsent_faults = []
            self.weights_view.update(reply)
            if reply.accepted and self.packed:
                self.outbox.popleft()
                self.packed = b""
            version = self.weights_view.newest[0]
            if reply.version > version and (found := self.fetch(version)) is not None:
                self.weights_view.set_newest(*found)
        except NoReply:
            time.sleep(RETRY_SECONDS)
