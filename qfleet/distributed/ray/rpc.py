"""What travels between a learner and its actors when Ray carries it, without Ray itself: both ends, and their rules.

The receiving end of every channel is a desk inside the learner. An actor's courier has one call under way at a time and
sends the same parcel again until it is answered for; so an answer that is lost costs a call and nothing else. A full
inbox lets the call wait a little and then says "not yet": that is the back-pressure. What an older incarnation still
sends is answered with "stop".
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
from qfleet.data.array_messages import SentBytes, pack_rollout, rollout_bytes, unpack_rollout
from qfleet.data.wire_format import HEADER_BYTES, MessageNotWhole, to_bytes, unpack
from qfleet.distributed.actors.weights_board import Weights, WeightsLayout, finite

ROOM_SECONDS = 0.25  # how long a call waits for room
BEAT_SECONDS = 0.5  # a sign of life is sent at least so often
RETRY_SECONDS = 0.1  # between two tries, when nobody answered
TABLE_BYTES = HEADER_BYTES + 4096  # what the description of flat weights may need


class NoReply(Exception):
    """A call was not answered in time: it may have arrived or not."""


class RolloutReply(NamedTuple):
    """What the learner answers to every call of an actor."""

    accepted: bool  # the parcel need not be sent again
    version: int  # of the newest weights
    stop: bool
    env_steps: int  # of all actors


class RolloutMessage(NamedTuple):
    """What an actor says with every call."""

    gauges: Mapping[str, int]
    parcel: bytes  # a rollout; empty for a sign of life
    first: int = 0  # the number of the first of its words
    words: Sequence[bytes] = ()  # of troubles in its environments


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
        self.shut = False
        self.gauges: dict[str, int] = {}
        self.words: deque[bytes] = deque()
        self.heard = 0  # how many words in all
        self.room = threading.Condition()

    def put(self, parcel: bytes, wait_seconds: float = ROOM_SECONDS) -> bool:
        """Take a parcel in; False: not yet. One that makes no sense is a ValueError."""
        if len(parcel) > self.limit_bytes:
            raise ValueError(f"a parcel of {len(parcel)} bytes; {self.limit_bytes} at most were expected")
        try:
            rollout = unpack_rollout(parcel, self.spec, self.lanes, limit_bytes=self.limit_bytes)
        except MessageNotWhole:
            return False  # damaged on its way
        sequence = rollout.source[2]
        if rollout.source[:2] != self.source or sequence > self.expected:
            raise ValueError(f"{rollout.source} came where {(*self.source, self.expected)} was expected")
        with self.room:
            self.room.wait_for(lambda: self.shut or len(self.waiting) < self.slots, wait_seconds)
            if sequence < self.expected:
                return True  # its answer was lost
            if self.shut or len(self.waiting) >= self.slots:
                return False
            self.waiting.append(rollout)
            self.expected += 1
            return True

    def hear(self, message: RolloutMessage) -> None:
        """Gauges, and words that were not heard before: an answer may have been lost."""
        with self.room:
            self.gauges = dict(message.gauges)
            fresh = message.words[max(0, self.heard - message.first) :]
            self.words.extend(fresh)
            self.heard += len(fresh)

    def get(self) -> Rollout | None:
        """The oldest rollout waiting, if any."""
        with self.room:
            if not self.waiting:
                return None
            self.room.notify_all()
            return self.waiting.popleft()

    def close(self) -> None:
        """Nothing more comes in; what waits can still be taken."""
        with self.room:
            self.shut = True
            self.room.notify_all()


class LearnerEndpoint:
    """The learner's end of every channel, and the newest weights; many threads call."""

    def __init__(self) -> None:
        self.inboxes: dict[int, RolloutInbox] = {}
        self.version = self.env_steps = 0
        self.shown: Any = None  # where the newest weights can be fetched

    def open(self, inbox: RolloutInbox) -> RolloutInbox:
        """From now on this incarnation is the one that is heard."""
        self.inboxes[inbox.source[0]] = inbox
        return inbox

    def put(self, worker: int, incarnation: int, message: RolloutMessage) -> RolloutReply:
        """A call of an actor."""
        inbox = self.inboxes.get(worker)
        if inbox is None or inbox.shut or inbox.source != (worker, incarnation):
            return RolloutReply(False, self.version, True, self.env_steps)
        inbox.hear(message)
        accepted = bool(message.parcel) and inbox.put(message.parcel)
        return RolloutReply(accepted, self.version, False, self.env_steps)

    def show(self, version: int, place: Any) -> None:
        """There are new weights."""
        self.shown = (version, place)
        self.version = version

    def weights(self, newer_than: int) -> Any:
        """The version of the newest weights and their place, if they are newer."""
        return self.shown if self.version > newer_than else None


class FlatWeights:
    """Weights as a parcel."""

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout = layout
        self.bytes = np.zeros(layout.size, np.uint8)
        self.targets = [part for own in layout.views(torch.from_numpy(self.bytes)) for part in own.values()]

    def parcel(self, version: int, weights: Weights) -> bytes:
        """A copy of these weights; only finite ones leave."""
        tensors = self.layout.tensors(weights)
        if not finite(tensors):
            raise NonFiniteValues("weights are not finite")
        with torch.no_grad():
            torch._foreach_copy_(self.targets, tensors)
        return to_bytes({"kind": "weights", "version": version}, {"flat": self.bytes})


class WeightsView:
    """The newest weights and numbers as an actor sees them: a board that is filled by answers."""

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout = layout
        self.device = torch.device("cpu")
        self.offered: tuple[int, bytes] = (0, b"")
        self.weights: tuple[int, Any] = (0, None)
        self.known = {"env_steps": 0, "stop": 0}

    def hear(self, answer: RolloutReply) -> None:
        """What the learner said."""
        self.known = {"env_steps": answer.env_steps, "stop": int(answer.stop)}

    def offer(self, version: int, parcel: bytes) -> None:
        """Newer weights have come."""
        self.offered = (version, parcel)

    def numbers(self) -> dict[str, int]:
        """The last ones heard."""
        return self.known

    def read(self, newer_than: int) -> tuple[int, Any] | None:
        """The newest weights, if they are newer."""
        version, parcel = self.offered
        if version <= newer_than:
            return None
        if version != self.weights[0]:
            self.weights = (version, self.opened(version, parcel))
        return self.weights

    def opened(self, version: int, parcel: bytes) -> Any:
        """The tensors that a parcel carries."""
        facts, arrays = unpack(parcel, limit_bytes=self.layout.size + TABLE_BYTES)
        flat = arrays.get("flat")
        if facts != {"kind": "weights", "version": version} or flat is None or flat.shape != (self.layout.size,):
            raise ValueError(f"not the weights of version {version}: {facts}")
        members = self.layout.views(torch.from_numpy(flat))
        return members[0] if self.layout.alone else members


class ActorCounters:
    """An actor's own counters, which go along with every call."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {"progress": 0}

    def add(self, worker: int, **values: int) -> None:
        """Raise some."""
        for name, value in values.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def set(self, worker: int, **values: int) -> None:
        """Replace some."""
        self.counts.update(values)


class RolloutSender:
    """An actor's end of its channel. `put` never blocks: a thread that turns `step` carries what it is given."""

    def __init__(
        self,
        send: Send,
        fetch: Fetch,
        window: WeightsView,
        tally: ActorCounters,
        slots: int,
        listen: Callable[[], list[bytes]],
        compress: Collection[str] = (),
    ) -> None:
        self.send = send
        self.fetch = fetch
        self.window = window
        self.tally = tally
        self.slots = slots
        self.listen = listen  # to the actor's words
        self.compress = compress
        self.freight = SentBytes()
        self.words = list[bytes]()
        self.said = 0
        self.outbox: deque[Rollout] = deque()
        self.parcel = b""  # of the oldest, once it was packed
        self.given = threading.Condition()
        self.failure: BaseException | None = None

    def put(self, rollout: Rollout) -> bool:
        """Hand one over; False when there is no room. What ended the thread ends the actor."""
        if self.failure is not None:
            raise self.failure
        with self.given:
            if len(self.outbox) >= self.slots:
                return False
            self.outbox.append(rollout)
            self.given.notify()
            return True

    def get(self) -> Rollout | None:
        """What an actor never does."""
        return None

    def run(self) -> None:
        """Carry until told to stop."""
        try:
            while not self.window.known["stop"]:
                self.step()
        except BaseException as error:
            self.failure = error
            self.window.known = {**self.window.known, "stop": 1}

    def step(self) -> None:
        """One call, with the oldest rollout if there is one, and new weights if there are any."""
        with self.given:
            self.given.wait_for(lambda: bool(self.outbox), BEAT_SECONDS)
            oldest = self.outbox[0] if self.outbox else None
        if oldest is not None and not self.parcel:
            self.parcel = pack_rollout(oldest, compress=self.compress, freight=self.freight if self.compress else None)
        self.words += self.listen()
        try:
            answer = self.send(RolloutMessage(dict(self.tally.counts), self.parcel, self.said, tuple(self.words)))
            self.said = self.said + len(self.words)
            self.words = []
            self.window.hear(answer)
            if answer.accepted and self.parcel:
                self.outbox.popleft()
                self.parcel = b""
            if answer.version > self.window.offered[0] and (found := self.fetch(self.window.offered[0])) is not None:
                self.window.offer(*found)
        except NoReply:
            time.sleep(RETRY_SECONDS)
