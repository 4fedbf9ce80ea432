"""Both ends of the messages on Ray, without Ray: retries, back-pressure, stops, weights, and the relay."""

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.act.policy import NonFiniteValues
from qfleet.data import Rollout, Spec
from qfleet.data.array_messages import pack_rollout
from qfleet.data.wire_format import to_bytes, unpack
from qfleet.distributed.actors.messages import ActorReply, ActorReport, EnvFaultMessage, PublishedWeights
from qfleet.distributed.actors.weights_board import layout_of
from qfleet.distributed.ray import rpc
from qfleet.distributed.ray.relay import RelayReader, WatcherRelay
from qfleet.distributed.ray.rpc import (
    ActorCounters,
    FlatWeights,
    LearnerEndpoint,
    NoReply,
    RolloutInbox,
    RolloutSender,
    WeightsView,
)
from qfleet.envs.workers.pool import EnvFault

SPEC = Spec((3,), "float32", (2,))
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.int64)}


def rollout(sequence: int, worker: int = 0, incarnation: int = 0, rows: int = 2) -> Rollout:
    shape = (rows, 2)
    return Rollout(
        np.full((*shape, 3), sequence, np.float32),
        np.zeros(shape, np.int64),
        np.ones(shape, np.float32),
        np.ones(shape, np.float32),
        np.zeros(shape, np.bool_),
        (worker, incarnation, sequence),
        1,
    )


def make_inbox(slots: int = 2, incarnation: int = 0) -> RolloutInbox:
    return RolloutInbox(SPEC, lanes=2, rows=2, slots=slots, source=(0, incarnation))


def report(incarnation: int = 0, **counters: int) -> ActorReport:
    return ActorReport(0, incarnation, counters)


def env_fault(seconds: float) -> EnvFaultMessage:
    return EnvFaultMessage(EnvFault("raised", 0, (0,), (0,), "it raised", "Traceback ...", seconds))


def sequences(inbox: RolloutInbox) -> list[int]:
    return [found.source[2] for found in iter(inbox.get, None)]


# The learner's end


def test_an_inbox_accepts_each_rollout_once_and_in_order() -> None:
    inbox = make_inbox(slots=4)
    assert all(inbox.put(pack_rollout(rollout(number)), 0) for number in (0, 0, 1, 0, 1, 2))
    with pytest.raises(ValueError, match="expected"):
        inbox.put(pack_rollout(rollout(4)), 0)
    assert sequences(inbox) == [0, 1, 2]


def test_a_full_inbox_accepts_nothing_and_loses_nothing() -> None:
    inbox = make_inbox(slots=2)
    assert [inbox.put(pack_rollout(rollout(number)), 0) for number in (0, 1, 2, 2)] == [True, True, False, False]
    inbox.get()
    assert inbox.put(pack_rollout(rollout(2)), 0)
    assert sequences(inbox) == [1, 2]


def test_a_call_waits_for_room_and_concurrent_duplicates_are_accepted_once() -> None:
    inbox, replies = make_inbox(slots=1), list[bool]()
    inbox.put(pack_rollout(rollout(0)), 0)
    message = pack_rollout(rollout(1))
    calls = [threading.Thread(target=lambda: replies.append(inbox.put(message, 5.0))) for _ in range(2)]
    for call in calls:
        call.start()
    time.sleep(0.05)
    assert inbox.get() is not None
    time.sleep(0.05)
    assert sequences(inbox) == [1]
    for call in calls:
        call.join(timeout=5)
    assert replies == [True, True]


@pytest.mark.parametrize(
    "wrong",
    [
        rollout(0, worker=1),
        rollout(0, incarnation=3),
        rollout(0, rows=100),
        replace(rollout(0), obs=np.zeros((2, 2, 4), np.float32)),
    ],
    ids=["another worker", "another incarnation", "too long", "another world"],
)
def test_a_rollout_of_another_source_or_shape_is_refused(wrong: Rollout) -> None:
    inbox = make_inbox()
    with pytest.raises(ValueError, match="expected"):
        inbox.put(pack_rollout(wrong), 0)
    assert inbox.get() is None


def test_a_damaged_message_is_not_accepted() -> None:
    inbox, message = make_inbox(), bytearray(pack_rollout(rollout(0)))
    message[-3] ^= 1
    assert not inbox.put(bytes(message), 0)
    assert inbox.put(pack_rollout(rollout(0)), 0)


def test_the_endpoint_accepts_the_newest_incarnation_and_tells_others_to_stop() -> None:
    endpoint = LearnerEndpoint()
    assert endpoint.receive(report(), b"").stop
    endpoint.open(make_inbox(incarnation=0))
    endpoint.env_steps = 7
    assert endpoint.receive(report(progress=5), pack_rollout(rollout(0))) == ActorReply(True, 0, False, 7)
    assert endpoint.inboxes[0].counters == {"progress": 5}
    assert endpoint.inboxes[0].progress() == 5
    old = endpoint.inboxes[0]
    endpoint.open(make_inbox(incarnation=1))
    assert endpoint.receive(report(), pack_rollout(rollout(1))) == ActorReply(False, 0, True, 7)
    assert sequences(old) == [0]
    assert not endpoint.receive(report(1), b"").accepted
    endpoint.inboxes[0].request_stop()
    assert endpoint.receive(report(1), pack_rollout(rollout(0, incarnation=1))).stop


def test_reports_and_replies_are_packed_and_checked() -> None:
    endpoint = LearnerEndpoint()
    endpoint.open(make_inbox())
    told = ActorReport(0, 0, {"progress": 3}, 0, (env_fault(1.0),))
    reply = endpoint.receive_packed(to_bytes(told), pack_rollout(rollout(0)))
    assert unpack(reply, ActorReply, limit_bytes=1000)[0] == ActorReply(True, 0, False, 0)
    assert endpoint.inboxes[0].env_faults() == [env_fault(1.0)]
    assert endpoint.inboxes[0].env_faults() == []
    for wrong in (b"", to_bytes(PublishedWeights(1)), to_bytes(report(progress="many"))):  # type: ignore[arg-type]
        with pytest.raises(ValueError):  # noqa: PT011
            endpoint.receive_packed(wrong, b"")


def test_weights_are_returned_if_newer() -> None:
    endpoint = LearnerEndpoint()
    assert endpoint.weights(0) is None
    endpoint.publish(3, "a place")
    assert (endpoint.weights(2), endpoint.weights(3)) == ((3, "a place"), None)


# The weights


def test_received_weights_equal_the_sent_ones_and_do_not_change() -> None:
    own = {name: value.clone() for name, value in WEIGHTS.items()}
    flat, weights_view = FlatWeights(layout_of(own)), WeightsView(layout_of(own))
    assert weights_view.read(0) is None
    weights_view.newest = (4, flat.pack(4, own))
    own["a"].zero_()
    flat.pack(5, own)
    version, found = weights_view.read(3) or (0, {})
    assert version == 4
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    assert weights_view.read(4) is None


def test_each_member_of_a_population_gets_its_weights() -> None:
    both = [WEIGHTS, {name: value + 1 for name, value in WEIGHTS.items()}]
    weights_view = WeightsView(layout_of(both))
    weights_view.newest = (1, FlatWeights(layout_of(both)).pack(1, both))
    _, found = weights_view.read(0) or (0, [])
    assert torch.equal(found[1]["a"], WEIGHTS["a"] + 1)


def test_weights_that_are_not_finite_are_not_packed() -> None:
    with pytest.raises(NonFiniteValues):
        FlatWeights(layout_of(WEIGHTS)).pack(1, {**WEIGHTS, "a": torch.full((2, 3), torch.nan)})


def test_weights_of_another_version_are_refused() -> None:
    weights_view = WeightsView(layout_of(WEIGHTS))
    weights_view.newest = (2, FlatWeights(layout_of(WEIGHTS)).pack(1, WEIGHTS))
    with pytest.raises(ValueError, match="version 2"):
        weights_view.read(0)


# The actor's end


class FaultyConnection:
    """A connection to a learner that loses calls and replies."""

    def __init__(self, slots: int = 2) -> None:
        self.endpoint = LearnerEndpoint()
        self.inbox = self.endpoint.open(make_inbox(slots))
        self.faults: list[str] = []
        self.calls = 0

    def send(self, told: ActorReport, packed: bytes) -> ActorReply:
        self.calls += 1
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "lost":
            raise NoReply
        if fault == "dead":
            raise ConnectionError("the learner is lost")
        reply = self.endpoint.receive(told, packed)
        if fault == "reply lost":
            raise NoReply
        return reply

    def fetch(self, newer_than: int) -> tuple[int, bytes] | None:
        found: tuple[int, bytes] | None = self.endpoint.weights(newer_than)
        return found


@pytest.fixture(autouse=True)
def no_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOM_SECONDS", "HEARTBEAT_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(rpc, name, 0.001)
    monkeypatch.setattr(RolloutInbox.put, "__defaults__", (0.001,))


def make_sender(connection: FaultyConnection, slots: int = 2) -> RolloutSender:
    view = WeightsView(layout_of(WEIGHTS))
    return RolloutSender((0, 0), connection.send, connection.fetch, view, ActorCounters(), slots)


def test_a_rollout_is_sent_again_after_a_lost_call_or_reply() -> None:
    connection = FaultyConnection(slots=4)
    sender = make_sender(connection, slots=4)
    connection.faults = ["lost", "reply lost", "", "reply lost", "lost", "reply lost", ""]
    assert all(sender.put(rollout(number)) for number in range(3))
    for _ in range(9):
        sender.step()
    assert sequences(connection.inbox) == [0, 1, 2]
    assert not sender.outbox


def test_back_pressure_reaches_the_actor() -> None:
    connection = FaultyConnection(slots=1)
    sender = make_sender(connection, slots=2)
    taken = 0
    for number in range(20):
        taken += sender.put(rollout(taken))
        sender.step()
        assert len(sender.outbox) <= 2, number
    assert taken == 3  # one at the learner, two here
    assert connection.inbox.get() is not None
    sender.step()
    assert sender.put(rollout(taken))


def test_a_reply_brings_steps_weights_and_stop() -> None:
    connection = FaultyConnection()
    sender = make_sender(connection)
    connection.endpoint.env_steps = 99
    connection.endpoint.publish(2, FlatWeights(layout_of(WEIGHTS)).pack(2, WEIGHTS))
    sender.step()
    assert sender.weights_view.numbers() == {"env_steps": 99}
    assert not sender.stopped
    assert (sender.weights_view.read(0) or (0,))[0] == 2
    connection.inbox.request_stop()
    sender.run()
    assert sender.stopped
    assert sender.failure is None


def test_heartbeats_carry_the_progress_of_the_actor_not_of_its_sender() -> None:
    connection = FaultyConnection()
    sender = make_sender(connection)
    sender.counters.add(0, progress=3)
    for _ in range(3):
        sender.step()
    assert connection.inbox.counters["progress"] == 3
    assert connection.calls == 3


def test_faults_are_received_once_though_replies_are_lost() -> None:
    connection = FaultyConnection()
    sender = make_sender(connection)
    connection.faults = ["reply lost", "lost"]
    sender.report_fault(env_fault(1.0))
    sender.step()
    sender.report_fault(env_fault(2.0))
    sender.report_fault(env_fault(3.0))
    for _ in range(3):
        sender.step()
    sender.report_fault(env_fault(4.0))
    sender.step()
    assert connection.inbox.env_faults() == [env_fault(number) for number in (1.0, 2.0, 3.0, 4.0)]
    assert sender.faults == []


def test_a_lost_learner_ends_the_actor() -> None:
    connection = FaultyConnection()
    sender = make_sender(connection)
    connection.faults = ["lost", "dead"]
    sender.run()
    assert sender.stopped
    with pytest.raises(ConnectionError):
        sender.put(rollout(0))


# The relay to the driver


class RecordingWatcher:
    """A watcher that records its calls."""

    def __init__(self) -> None:
        self.every_seconds, self.received = 0.0, list[tuple[str, Any]]()

    def start(self, info: Mapping[str, Any]) -> None:
        self.received.append(("start", info["run"]))

    def row(self, row: Mapping[str, Any]) -> None:
        self.received.append(("row", row["n"]))

    def live(self, snapshot: Mapping[str, Any]) -> None:
        self.received.append(("live", snapshot["n"]))

    def stop(self, status: Mapping[str, Any]) -> None:
        self.received.append(("stop", status["state"]))


def test_items_are_delivered_once_and_in_order_though_replies_are_lost() -> None:
    relay, watcher, rows = WatcherRelay(), RecordingWatcher(), list[int]()
    reader = RelayReader(watcher, [lambda row: rows.append(row["n"])])
    relay.start({"run": "here"})
    relay.row({"n": np.int64(1)})
    relay.call({"n": 1})
    relay.news_since(reader.num_received)  # its reply is lost
    relay.row({"n": 2})
    first = relay.news_since(reader.num_received)
    reader.receive(first)
    reader.receive(first)
    relay.call({"n": 2})
    relay.stop({"state": "done"})
    reader.receive(relay.news_since(reader.num_received))
    assert watcher.received == [("start", "here"), ("row", 1), ("row", 2), ("stop", "done")]
    assert (rows, reader.run) == ([1, 2], "here")
    assert len(relay.items) == 2  # received items are dropped with the next call


def test_the_newest_snapshot_is_delivered_but_not_after_the_end() -> None:
    relay, watcher = WatcherRelay(), RecordingWatcher()
    reader = RelayReader(watcher, [])
    relay.live({"n": 1})
    relay.live({"n": 2})
    reader.receive(relay.news_since(0))
    relay.stop({"state": "done"})
    reader.receive(relay.news_since(0))
    reader.receive(relay.news_since(1))
    assert [item for item in watcher.received if item[0] == "live"] == [("live", 2), ("live", 2)]


def test_a_callback_can_end_the_run() -> None:
    relay = WatcherRelay()
    reader = RelayReader(None, [lambda row: row["n"] > 1, lambda row: None])
    assert not relay.call({"n": 1})
    assert not reader.receive(relay.news_since(reader.num_received))
    assert not relay.call({"n": 2})
    assert reader.receive(relay.news_since(reader.num_received))
    relay.stop_requested = True
    assert relay.call({"n": 3})
