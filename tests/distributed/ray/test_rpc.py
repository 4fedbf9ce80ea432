"""Both ends of what Ray carries, without Ray: retries, back-pressure, stops, weights, and what a driver hears."""

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
from qfleet.distributed.actors.weights_board import layout_of
from qfleet.distributed.ray import rpc
from qfleet.distributed.ray.relay import RelayReader, WatcherRelay
from qfleet.distributed.ray.rpc import (
    ActorCounters,
    FlatWeights,
    LearnerEndpoint,
    NoReply,
    RolloutInbox,
    RolloutMessage,
    RolloutReply,
    RolloutSender,
    WeightsView,
)

SPEC = Spec((3,), "float32", (2,))
SILENT = RolloutMessage({}, b"")
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


def sequences(inbox: RolloutInbox) -> list[int]:
    return [found.source[2] for found in iter(inbox.get, None)]


# The learner's end


def test_an_inbox_takes_each_rollout_once_and_in_order() -> None:
    inbox = make_inbox(slots=4)
    assert all(inbox.put(pack_rollout(rollout(number)), 0) for number in (0, 0, 1, 0, 1, 2))
    with pytest.raises(ValueError, match="expected"):
        inbox.put(pack_rollout(rollout(4)), 0)
    assert sequences(inbox) == [0, 1, 2]


def test_a_full_inbox_says_not_yet_and_nothing_is_lost() -> None:
    inbox = make_inbox(slots=2)
    assert [inbox.put(pack_rollout(rollout(number)), 0) for number in (0, 1, 2, 2)] == [True, True, False, False]
    inbox.get()
    assert inbox.put(pack_rollout(rollout(2)), 0)
    assert sequences(inbox) == [1, 2]


def test_a_call_waits_for_room_and_the_same_parcel_twice_at_once_enters_once() -> None:
    inbox, answers = make_inbox(slots=1), list[bool]()
    inbox.put(pack_rollout(rollout(0)), 0)
    parcel = pack_rollout(rollout(1))
    calls = [threading.Thread(target=lambda: answers.append(inbox.put(parcel, 5.0))) for _ in range(2)]
    for call in calls:
        call.start()
    time.sleep(0.05)
    assert inbox.get() is not None
    time.sleep(0.05)
    assert sequences(inbox) == [1]
    for call in calls:
        call.join(timeout=5)
    assert answers == [True, True]


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
def test_what_is_not_from_this_actor_or_does_not_fit_is_refused(wrong: Rollout) -> None:
    inbox = make_inbox()
    with pytest.raises(ValueError, match="expected"):
        inbox.put(pack_rollout(wrong), 0)
    assert inbox.get() is None


def test_a_parcel_damaged_on_its_way_is_asked_for_again() -> None:
    inbox, parcel = make_inbox(), bytearray(pack_rollout(rollout(0)))
    parcel[-3] ^= 1
    assert not inbox.put(bytes(parcel), 0)
    assert inbox.put(pack_rollout(rollout(0)), 0)


def test_a_desk_hears_the_newest_incarnation_only_and_tells_the_others_to_stop() -> None:
    desk = LearnerEndpoint()
    assert desk.put(0, 0, SILENT).stop
    desk.open(make_inbox(incarnation=0))
    desk.env_steps = 7
    assert desk.put(0, 0, RolloutMessage({"progress": 5}, pack_rollout(rollout(0)))) == RolloutReply(True, 0, False, 7)
    assert desk.inboxes[0].gauges == {"progress": 5}
    old = desk.inboxes[0]
    desk.open(make_inbox(incarnation=1))
    assert desk.put(0, 0, RolloutMessage({}, pack_rollout(rollout(1)))) == RolloutReply(False, 0, True, 7)
    assert sequences(old) == [0]
    assert not desk.put(0, 1, SILENT).accepted
    desk.inboxes[0].close()
    assert desk.put(0, 1, RolloutMessage({}, pack_rollout(rollout(0, incarnation=1)))).stop


def test_weights_are_shown_by_version() -> None:
    desk = LearnerEndpoint()
    assert desk.weights(0) is None
    desk.show(3, "a place")
    assert (desk.weights(2), desk.weights(3)) == ((3, "a place"), None)


# The weights


def test_weights_arrive_as_they_left_and_stay_when_the_learner_goes_on() -> None:
    own = {name: value.clone() for name, value in WEIGHTS.items()}
    flat, window = FlatWeights(layout_of(own)), WeightsView(layout_of(own))
    assert window.read(0) is None
    window.offer(4, flat.parcel(4, own))
    own["a"].zero_()
    flat.parcel(5, own)
    version, found = window.read(3) or (0, {})
    assert version == 4
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    assert window.read(4) is None


def test_a_population_gets_one_set_each() -> None:
    both = [WEIGHTS, {name: value + 1 for name, value in WEIGHTS.items()}]
    window = WeightsView(layout_of(both))
    window.offer(1, FlatWeights(layout_of(both)).parcel(1, both))
    _, found = window.read(0) or (0, [])
    assert torch.equal(found[1]["a"], WEIGHTS["a"] + 1)


def test_weights_that_are_not_finite_do_not_leave() -> None:
    with pytest.raises(NonFiniteValues):
        FlatWeights(layout_of(WEIGHTS)).parcel(1, {**WEIGHTS, "a": torch.full((2, 3), torch.nan)})


def test_weights_of_another_version_are_refused() -> None:
    window = WeightsView(layout_of(WEIGHTS))
    window.offer(2, FlatWeights(layout_of(WEIGHTS)).parcel(1, WEIGHTS))
    with pytest.raises(ValueError, match="version 2"):
        window.read(0)


# The actor's end


class Wire:
    """A learner at the other end of a bad line."""

    def __init__(self, slots: int = 2) -> None:
        self.desk = LearnerEndpoint()
        self.inbox = self.desk.open(make_inbox(slots))
        self.faults: list[str] = []
        self.calls, self.words = 0, list[bytes]()  # what the actor says meanwhile

    def listen(self) -> list[bytes]:
        words, self.words = self.words, []
        return words

    def send(self, message: RolloutMessage) -> RolloutReply:
        self.calls += 1
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "lost":
            raise NoReply
        if fault == "dead":
            raise ConnectionError("the learner is gone")
        answer = self.desk.put(0, 0, message)
        if fault == "answer lost":
            raise NoReply
        return answer

    def fetch(self, newer_than: int) -> tuple[int, bytes] | None:
        found: tuple[int, bytes] | None = self.desk.weights(newer_than)
        return found


@pytest.fixture(autouse=True)
def no_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOM_SECONDS", "BEAT_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(rpc, name, 0.001)
    monkeypatch.setattr(RolloutInbox.put, "__defaults__", (0.001,))


def make_courier(wire: Wire, slots: int = 2) -> RolloutSender:
    return RolloutSender(wire.send, wire.fetch, WeightsView(layout_of(WEIGHTS)), ActorCounters(), slots, wire.listen)


def test_a_lost_call_and_a_lost_answer_are_retries_of_the_same() -> None:
    wire = Wire(slots=4)
    courier = make_courier(wire, slots=4)
    wire.faults = ["lost", "answer lost", "", "answer lost", "lost", "answer lost", ""]
    assert all(courier.put(rollout(number)) for number in range(3))
    for _ in range(9):
        courier.step()
    assert sequences(wire.inbox) == [0, 1, 2]
    assert not courier.outbox


def test_back_pressure_reaches_the_actor() -> None:
    wire = Wire(slots=1)
    courier = make_courier(wire, slots=2)
    taken = 0
    for number in range(20):
        taken += courier.put(rollout(taken))
        courier.step()
        assert len(courier.outbox) <= 2, number
    assert taken == 3  # one at the learner, two here
    assert wire.inbox.get() is not None
    courier.step()
    assert courier.put(rollout(taken))


def test_an_answer_brings_steps_weights_and_the_end() -> None:
    wire = Wire()
    courier = make_courier(wire)
    wire.desk.env_steps = 99
    wire.desk.show(2, FlatWeights(layout_of(WEIGHTS)).parcel(2, WEIGHTS))
    courier.step()
    assert courier.window.numbers() == {"env_steps": 99, "stop": 0}
    assert (courier.window.read(0) or (0,))[0] == 2
    wire.inbox.close()
    courier.run()
    assert courier.window.numbers()["stop"] == 1


def test_signs_of_life_tell_the_progress_of_the_actor_not_of_its_courier() -> None:
    wire = Wire()
    courier = make_courier(wire)
    courier.tally.add(0, progress=3)
    for _ in range(3):
        courier.step()
    assert wire.inbox.gauges["progress"] == 3
    assert wire.calls == 3


def test_words_are_heard_once_though_answers_are_lost() -> None:
    wire = Wire()
    courier = make_courier(wire)
    wire.words, wire.faults = [b"one"], ["answer lost", "lost"]
    courier.step()
    wire.words = [b"two", b"three"]
    for _ in range(3):
        courier.step()
    wire.words = [b"four"]
    courier.step()
    assert list(wire.inbox.words) == [b"one", b"two", b"three", b"four"]


def test_a_learner_that_is_gone_ends_the_actor() -> None:
    wire = Wire()
    courier = make_courier(wire)
    wire.faults = ["lost", "dead"]
    courier.run()
    assert courier.window.numbers()["stop"] == 1
    with pytest.raises(ConnectionError):
        courier.put(rollout(0))


# What a driver hears


class Ear:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.every_seconds, self.heard = 0.0, list[tuple[str, Any]]()

    def start(self, info: Mapping[str, Any]) -> None:
        self.heard.append(("start", info["run"]))

    def row(self, row: Mapping[str, Any]) -> None:
        self.heard.append(("row", row["n"]))

    def live(self, snapshot: Mapping[str, Any]) -> None:
        self.heard.append(("live", snapshot["n"]))

    def stop(self, status: Mapping[str, Any]) -> None:
        self.heard.append(("stop", status["state"]))


def test_everything_is_heard_once_and_in_order_though_answers_are_lost() -> None:
    relay, ear, rows = WatcherRelay(), Ear(), list[int]()
    hearing = RelayReader(ear, [lambda row: rows.append(row["n"])])
    relay.start({"run": "here"})
    relay.row({"n": np.int64(1)})
    relay.call({"n": 1})
    relay.since(hearing.heard)  # its answer is lost
    relay.row({"n": 2})
    first = relay.since(hearing.heard)
    hearing.take(first)
    hearing.take(first)
    relay.call({"n": 2})
    relay.stop({"state": "done"})
    hearing.take(relay.since(hearing.heard))
    assert ear.heard == [("start", "here"), ("row", 1), ("row", 2), ("stop", "done")]
    assert (rows, hearing.run) == ([1, 2], "here")
    assert len(relay.items) == 2  # what was heard is forgotten once that is known


def test_the_newest_snapshot_is_shown_but_not_after_the_end() -> None:
    relay, ear = WatcherRelay(), Ear()
    hearing = RelayReader(ear, [])
    relay.live({"n": 1})
    relay.live({"n": 2})
    hearing.take(relay.since(0))
    relay.stop({"state": "done"})
    hearing.take(relay.since(0))
    hearing.take(relay.since(1))
    assert [word for word in ear.heard if word[0] == "live"] == [("live", 2), ("live", 2)]


def test_a_callback_can_end_the_run() -> None:
    relay = WatcherRelay()
    hearing = RelayReader(None, [lambda row: row["n"] > 1, lambda row: None])
    assert not relay.call({"n": 1})
    assert not hearing.take(relay.since(hearing.heard))
    assert not relay.call({"n": 2})
    assert hearing.take(relay.since(hearing.heard))
    relay.stop_asked = True
    assert relay.call({"n": 3})
