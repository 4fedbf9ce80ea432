"""Rings between processes: nothing is lost, doubled or changed, whenever a writer dies and whatever a reader sees."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from qfleet.act import acting
from qfleet.data import Array, Rollout, Spec
from qfleet.data.wire_format import MessageTooLarge
from qfleet.distributed.actors.weights_board import SharedWeightsBoard, layout_of
from qfleet.system.ring import Counter, Ring, RolloutRing, SharedCounters
from tests.act.test_actor import counting, make_actor

CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE_SECONDS = 90.0


def message(number: int) -> Array:
    """Numbers that follow from the message's own; a few messages are long."""
    rng = random.Random(number)
    size = rng.randrange(100_000, 130_000) if number % 100 == 0 else rng.randrange(3000)
    return (np.arange(size, dtype=np.uint64) * np.uint64(number + 1)).astype(np.uint8)


def send(ring: Ring, first: int, last: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    for number in range(first, last):
        content = message(number)
        while not ring.put({"number": number}, {"a": content}):
            time.sleep(0.0002)
            assert time.monotonic() < deadline


def take(ring: Ring) -> Iterator[int]:
    """Numbers of the messages that come, each checked; one after the other as they are waiting."""
    while (parts := ring.get()) is not None:
        meta, arrays = parts
        number = meta["number"]
        assert isinstance(number, int)
        assert np.array_equal(arrays["a"], message(number))
        yield number


def waiting_for(process: multiprocessing.process.BaseProcess) -> Iterator[None]:
    """Again and again while it lives, and once more; with a limit."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    alive = True
    while alive:
        assert time.monotonic() < deadline
        alive = process.is_alive()
        yield


def test_first_in_first_out_until_full() -> None:
    ring = Ring(3, 1000)
    assert ring.get() is None
    for turn in range(5):
        assert [ring.put({"n": n}, {"a": np.full(turn, n)}) for n in range(4)] == [True, True, True, False]
        assert len(ring) == 3
        assert [ring.get()[0]["n"] for _ in range(3)] == [0, 1, 2]  # type: ignore[index]
        assert ring.get() is None
        assert len(ring) == 0


def test_what_is_too_large_leaves_the_ring_as_it_was() -> None:
    ring = Ring(2, 400, compress=("zeros",))
    for name in ("a", "zeros"):
        with pytest.raises(MessageTooLarge):
            ring.put({}, {name: np.zeros(1000)})
    assert ring.get() is None
    assert ring.put({"n": 1}, {"zeros": np.zeros(20)})
    meta, arrays = ring.get() or ({}, {})
    assert meta == {"n": 1}
    assert arrays["zeros"].tolist() == [0.0] * 20


def test_what_was_read_stays_when_the_slot_is_used_again() -> None:
    ring = Ring(1, 1000)
    ring.put({}, {"a": np.zeros(50)})
    _, arrays = ring.get() or ({}, {})
    ring.put({}, {"a": np.ones(50)})
    assert not arrays["a"].any()


@pytest.mark.parametrize("size", [40, 9000])  # the longer one's checksum is folded
def test_half_a_slot_is_never_accepted(size: int) -> None:
    """All that a reader may see of a put: any mixture of the slot before and after, by words of eight bytes."""
    rng = np.random.default_rng(0)
    ring, content = Ring(1, 100_000), np.arange(size)
    ring.put({"n": 1}, {"a": content})
    assert ring.get() is not None
    slot = np.frombuffer(ring.memory[0], np.uint64, 100_000 // 8)
    before = slot.copy()
    ring.put({"n": 2}, {"a": np.roll(content, 3)})
    after = slot.copy()
    changed = np.flatnonzero(before != after)
    cuts = changed if size < 100 else rng.choice(changed, 100)
    seen = [np.arange(len(slot)) < cut for cut in cuts] + [np.arange(len(slot)) >= cut for cut in cuts]
    seen += [rng.random(len(slot)) < rng.random() for _ in range(200)]
    for new in seen:
        slot[:] = np.where(new, after, before)
        assert new[changed].all() or ring.get() is None
    slot[:] = after
    meta, arrays = ring.get() or ({}, {})
    assert meta == {"n": 2}
    assert np.array_equal(arrays["a"], np.roll(content, 3))


def test_a_slot_is_not_used_again_before_it_was_read() -> None:
    ring = Ring(2, 500)
    ring.put({"n": 0}, {})
    ring.put({"n": 1}, {})
    before = bytes(ring.region.view)
    assert not ring.put({"n": 2}, {})
    assert bytes(ring.region.view) == before
    words = ring.taken.words
    for torn in ((1, 0), (0, 1), (2**40, 2**64 - 1), (1, 2**64 - 1)):  # halves that do not belong together
        words[0], words[1] = torn
        assert not ring.put({"n": 2}, {})
    words[0], words[1] = 1, 2**64 - 2
    assert ring.put({"n": 2}, {})
    assert not ring.put({"n": 3}, {})


def test_a_counter_never_goes_back() -> None:
    memory = memoryview(bytearray(16))
    writer, reader = Counter(memory), Counter(memory)
    assert reader.read() == 0
    writer.write(5)
    assert reader.read() == 5
    writer.write(3)
    assert reader.read() == 5


def test_nonsense_in_a_whole_slot_is_said_once() -> None:
    ring = Ring(2, 500)
    ring.put({"n": 0, "nested": [[1]]}, {})  # type: ignore[dict-item]
    ring.put({"n": 1}, {})
    with pytest.raises(ValueError, match="table"):
        ring.get()
    assert ring.get() == ({"n": 1}, {})


def test_twenty_thousand_messages_between_two_processes() -> None:
    ring, num = Ring(7, 140_000), 20_000
    process = CONTEXT.Process(target=send, args=(ring, 0, num))
    process.start()
    rng, found = random.Random(1), []
    for _ in waiting_for(process):
        for number in take(ring):
            found.append(number)
            if rng.random() < 0.001:
                time.sleep(0.01)  # a slow reader: the ring fills, and the writer waits
    process.join(10)
    assert process.exitcode == 0
    assert found == list(range(num))
    assert len(ring) == 0


def kill_writers(rings: list[Ring], seed: int) -> None:
    """One writer after the other, each killed at some moment."""
    rng = random.Random(seed)
    for ring in rings:
        child = os.fork()
        if child == 0:
            send(ring, 0, 10**9)
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.chaos
def test_a_killed_writer_leaves_whole_messages_only() -> None:
    rings = [Ring(3, 140_000) for _ in range(40)]
    process = CONTEXT.Process(target=kill_writers, args=(rings, 3))
    process.start()
    found: list[list[int]] = [[] for _ in rings]
    for _ in waiting_for(process):
        for ring, numbers in zip(rings, found, strict=True):
            numbers += take(ring)
    process.join(10)
    assert process.exitcode == 0
    assert all(numbers == list(range(len(numbers))) for numbers in found)
    assert sum(map(len, found)) > 100
    assert all(len(ring) == 0 and ring.get() is None for ring in rings)


def test_a_ring_gives_its_memory_back() -> None:
    before = set(os.listdir("/proc/self/fd"))
    ring = Ring(3, 1000)
    ring.put({}, {"a": np.zeros(3)})
    assert set(os.listdir("/proc/self/fd")) > before
    ring.close()
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="released"):
        len(ring)


def test_an_actor_hands_rollouts_over_by_belt_and_board() -> None:
    actor = make_actor(counting(3))
    weights = actor.policy.net.state_dict()  # type: ignore[union-attr]
    belt, board = RolloutRing(actor.world.spec, 3, 2, slots=2), SharedWeightsBoard(layout_of(weights))
    board.publish(4, {name: weight * 0 + 7 for name, weight in weights.items()})
    ticks = acting(actor, belt, board, rows=2)
    got: list[Rollout] = []
    for _ in range(40):
        next(ticks)
    assert len(belt) == 2  # full: the actor waits
    for _ in range(200):
        next(ticks)
        if (rollout := belt.get()) is not None:
            got.append(rollout)
    assert [rollout.source for rollout in got] == [(0, 0, number) for number in range(len(got))]
    assert {rollout.version for rollout in got} == {4}
    obs = np.concatenate([rollout.obs for rollout in got])
    again = make_actor(counting(3))
    again.policy.load(4, {name: weight * 0 + 7 for name, weight in weights.items()})  # type: ignore[arg-type]
    for row in obs:
        again.send()
        assert np.array_equal(again.receive()[0].obs[0], row)
    assert sum(len(rollout.finished) for rollout in got) > 3


def count(gauges: SharedCounters) -> None:
    for worker in range(3):
        for _ in range(worker + 1):
            gauges.add(worker, steps=2)
        gauges.set(worker, version=10 * worker)


def test_gauges_of_each_worker_are_its_own() -> None:
    gauges = SharedCounters(("steps", "version"), 3)
    process = CONTEXT.Process(target=count, args=(gauges,))
    process.start()
    process.join(PATIENCE_SECONDS)
    assert gauges.column("steps") == [2, 4, 6]
    assert gauges.read(2) == {"steps": 6, "version": 20}
    gauges.clear(1)
    assert [gauges.read(worker)["version"] for worker in range(3)] == [0, 0, 20]
    gauges.close()


def test_a_belt_takes_only_rollouts_of_its_world() -> None:
    belt = RolloutRing(Spec((2,), "float32", (3,)), 1, 1, slots=2)
    row, lanes = np.zeros((1, 2), np.float32), np.zeros((1, 2), np.int64)
    wrong = Rollout(np.zeros((1, 2, 2), np.float32), lanes, row, row, row > 0, (0, 0, 0), 1)
    belt.put(wrong)
    with pytest.raises(ValueError, match="obs"):
        belt.get()
