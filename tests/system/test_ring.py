"""Rings between processes: no message is lost, doubled or changed, even if the writer is killed at any moment."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from qfleet.act import run_actor
from qfleet.data import Array, Rollout, Spec
from qfleet.data.wire_format import Message, MessageTooLarge
from qfleet.distributed.actors.weights_board import SharedWeightsBoard, layout_of
from qfleet.system.ring import Counter, Ring, RolloutRing, SharedCounters
from tests.act.test_actor import counting, make_actor

CONTEXT = multiprocessing.get_context("forkserver")
TIMEOUT_SECONDS = 90.0


class Numbered(Message):
    """A message of these tests."""

    n: int = 0


class Other(Message):
    """A message that no ring of these tests expects."""

    n: int = 0


def message(number: int) -> Array:
    """Content that depends on the number of the message; every hundredth message is long."""
    rng = random.Random(number)
    size = rng.randrange(100_000, 130_000) if number % 100 == 0 else rng.randrange(3000)
    return (np.arange(size, dtype=np.uint64) * np.uint64(number + 1)).astype(np.uint8)


def send(ring: Ring, first: int, last: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for number in range(first, last):
        content = message(number)
        while not ring.put(Numbered(number), {"a": content}):
            time.sleep(0.0002)
            assert time.monotonic() < deadline


def take(ring: Ring) -> Iterator[int]:
    """Receive the waiting messages, check the content of each, and yield its number."""
    while (parts := ring.get()) is not None:
        note, arrays = parts
        assert np.array_equal(arrays["a"], message(note.n))
        yield note.n


def waiting_for(process: multiprocessing.process.BaseProcess) -> Iterator[None]:
    """Yield while the process lives, and once more after its end; fail after a timeout."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    alive = True
    while alive:
        assert time.monotonic() < deadline
        alive = process.is_alive()
        yield


def test_ring_is_first_in_first_out_and_refuses_when_full() -> None:
    ring = Ring(Numbered, 3, 1000)
    assert ring.get() is None
    for turn in range(5):
        assert [ring.put(Numbered(n), {"a": np.full(turn, n)}) for n in range(4)] == [True, True, True, False]
        assert len(ring) == 3
        assert [ring.get()[0].n for _ in range(3)] == [0, 1, 2]  # type: ignore[index]
        assert ring.get() is None
        assert len(ring) == 0


def test_a_message_too_large_leaves_the_ring_unchanged() -> None:
    ring = Ring(Numbered, 2, 400, compress=("zeros",))
    for name in ("a", "zeros"):
        with pytest.raises(MessageTooLarge):
            ring.put(Numbered(), {name: np.zeros(1000)})
    assert ring.get() is None
    assert ring.put(Numbered(1), {"zeros": np.zeros(20)})
    note, arrays = ring.get() or (None, {})
    assert note == Numbered(1)
    assert arrays["zeros"].tolist() == [0.0] * 20


def test_received_arrays_survive_reuse_of_their_slot() -> None:
    ring = Ring(Numbered, 1, 1000)
    ring.put(Numbered(), {"a": np.zeros(50)})
    _, arrays = ring.get() or (None, {})
    ring.put(Numbered(), {"a": np.ones(50)})
    assert not arrays["a"].any()


@pytest.mark.parametrize("size", [40, 9000])  # the longer one's checksum is folded
def test_a_partially_written_slot_is_never_accepted(size: int) -> None:
    """A reader may see any mixture of the old and new slot, in units of eight bytes."""
    rng = np.random.default_rng(0)
    ring = Ring(Numbered, 1, 100_000)
    content = np.arange(size)
    ring.put(Numbered(1), {"a": content})
    assert ring.get() is not None
    slot = np.frombuffer(ring.memory[0], np.uint64, 100_000 // 8)
    before = slot.copy()
    ring.put(Numbered(2), {"a": np.roll(content, 3)})
    after = slot.copy()
    changed = np.flatnonzero(before != after)
    cuts = changed if size < 100 else rng.choice(changed, 100)
    seen = [np.arange(len(slot)) < cut for cut in cuts] + [np.arange(len(slot)) >= cut for cut in cuts]
    seen += [rng.random(len(slot)) < rng.random() for _ in range(200)]
    for new in seen:
        slot[:] = np.where(new, after, before)
        assert new[changed].all() or ring.get() is None
    slot[:] = after
    note, arrays = ring.get() or (None, {})
    assert note == Numbered(2)
    assert np.array_equal(arrays["a"], np.roll(content, 3))


def test_a_slot_is_not_reused_before_it_was_read() -> None:
    ring = Ring(Numbered, 2, 500)
    ring.put(Numbered(0), {})
    ring.put(Numbered(1), {})
    before = bytes(ring.region.view)
    assert not ring.put(Numbered(2), {})
    assert bytes(ring.region.view) == before
    cells = ring.taken.cells
    for torn in ((1, 0), (0, 1), (2**40, 2**64 - 1), (1, 2**64 - 1)):  # halves that do not match
        cells[0], cells[1] = torn
        assert not ring.put(Numbered(2), {})
    cells[0], cells[1] = 1, 2**64 - 2
    assert ring.put(Numbered(2), {})
    assert not ring.put(Numbered(3), {})


def test_a_counter_never_decreases() -> None:
    memory = memoryview(bytearray(16))
    writer = Counter(memory)
    reader = Counter(memory)
    assert reader.read() == 0
    writer.write(5)
    assert reader.read() == 5
    writer.write(3)
    assert reader.read() == 5


MALFORMED = {
    "another class": Other(1),
    "a wrong type": Numbered("one"),  # type: ignore[arg-type]
    "an unknown field": {"type": "Numbered", "n": 1, "m": 2},
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_raises_once_and_is_skipped(malformed: Any) -> None:
    ring = Ring(Numbered, 2, 500)
    ring.put(malformed, {})
    ring.put(Numbered(1), {})
    with pytest.raises(ValueError, match="table"):
        ring.get()
    assert ring.get() == (Numbered(1), {})


def put_both(ring: Ring) -> None:
    ring.put(Other(7), {})
    ring.put(Numbered(8), {})


def test_a_ring_carries_every_class_of_its_union_to_another_process() -> None:
    ring = Ring(Numbered | Other, 3, 500)
    process = CONTEXT.Process(target=put_both, args=(ring,))
    process.start()
    process.join(TIMEOUT_SECONDS)
    assert [ring.get(), ring.get(), ring.get()] == [(Other(7), {}), (Numbered(8), {}), None]


def test_twenty_thousand_messages_between_two_processes() -> None:
    ring = Ring(Numbered, 7, 140_000)
    num = 20_000
    process = CONTEXT.Process(target=send, args=(ring, 0, num))
    process.start()
    rng = random.Random(1)
    found = []
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
    """Start one writer per ring, and kill each at a random moment."""
    rng = random.Random(seed)
    for ring in rings:
        child = os.fork()
        if child == 0:
            send(ring, 0, 10**9)
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.chaos
def test_a_killed_writer_leaves_only_whole_messages() -> None:
    rings = [Ring(Numbered, 3, 140_000) for _ in range(40)]
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


def test_close_releases_the_memory_of_a_ring() -> None:
    before = set(os.listdir("/proc/self/fd"))
    ring = Ring(Numbered, 3, 1000)
    ring.put(Numbered(), {"a": np.zeros(3)})
    assert set(os.listdir("/proc/self/fd")) > before
    ring.close()
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="released"):
        len(ring)


def test_an_actor_sends_rollouts_by_ring_and_reads_weights_from_the_board() -> None:
    actor = make_actor(counting(3))
    weights = actor.policy.net.state_dict()  # type: ignore[union-attr]
    channel = RolloutRing(actor.world.spec, 3, 2, slots=2)
    board = SharedWeightsBoard(layout_of(weights))
    board.publish(4, {name: weight * 0 + 7 for name, weight in weights.items()})
    ticks = run_actor(actor, channel, board, rows=2)
    got: list[Rollout] = []
    for _ in range(40):
        next(ticks)
    assert len(channel) == 2  # full: the actor waits
    for _ in range(200):
        next(ticks)
        if (rollout := channel.get()) is not None:
            got.append(rollout)
    assert [rollout.source for rollout in got] == [(0, 0, number) for number in range(len(got))]
    assert {rollout.version for rollout in got} == {4}
    obs = np.concatenate([rollout.obs for rollout in got])
    again = make_actor(counting(3))
    again.policy.load_weights(4, {name: weight * 0 + 7 for name, weight in weights.items()})  # type: ignore[arg-type]
    for row in obs:
        again.send()
        assert np.array_equal(again.receive()[0].obs[0], row)
    assert sum(len(rollout.finished) for rollout in got) > 3


def count(counters: SharedCounters) -> None:
    for worker in range(3):
        for _ in range(worker + 1):
            counters.add(worker, steps=2)
        counters.set(worker, version=10 * worker)


def test_each_worker_has_its_own_counters() -> None:
    counters = SharedCounters(("steps", "version"), 3)
    process = CONTEXT.Process(target=count, args=(counters,))
    process.start()
    process.join(TIMEOUT_SECONDS)
    assert counters.column("steps") == [2, 4, 6]
    assert counters.read(2) == {"steps": 6, "version": 20}
    counters.clear(1)
    assert [counters.read(worker)["version"] for worker in range(3)] == [0, 0, 20]
    counters.close()


def test_a_rollout_of_another_world_is_refused() -> None:
    channel = RolloutRing(Spec((2,), "float32", (3,)), 1, 1, slots=2)
    row = np.zeros((1, 2), np.float32)
    lanes = np.zeros((1, 2), np.int64)
    wrong = Rollout(np.zeros((1, 2, 2), np.float32), lanes, row, row, row > 0, (0, 0, 0), 1)
    channel.put(wrong)
    with pytest.raises(ValueError, match="obs"):
        channel.get()
