"""The replay against a plain one that keeps whole episodes, and what it promises about its items."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.data import Array, Batch, Rollout, Spec
from qfleet.replay import NStepReturn, Prioritized, Replay, StepCut, Store, Uniform, ring_rows
from qfleet.replay.samplers import Sampler
from qfleet.replay.store import row_bytes
from tests.replay.streams import PlainReplay, one_lane, random_stream, read_rows, restore_rows, rollout

VECTOR = Spec((3,), "float32", (4,))
FRAMES = Spec((5, 2), "uint8", (4,), stack=4, masked=True)
# Above the size from which the ring has little spare room, so that rows run out before the capacity is reached.
LARGE = Spec((1100,), "uint8", (4,), stack=4)


@dataclass(frozen=True)
class Case:
    spec: Spec
    lanes: int
    capacity: int
    n_step: int
    end: float
    num: int
    rows_per_add: int
    prioritized: bool
    clip: bool
    seed: int


def specs() -> st.SearchStrategy[Spec]:
    small = st.builds(
        Spec,
        st.sampled_from([(3,), (2, 2)]),
        st.sampled_from(["float32", "uint8"]),
        st.just((4,)),
        stack=st.sampled_from([1, 4]),
        masked=st.booleans(),
    )
    return st.one_of(small, small, st.just(LARGE))


CASES = st.builds(
    Case,
    spec=specs(),
    lanes=st.integers(1, 4),
    capacity=st.integers(1, 60),
    n_step=st.integers(1, 5),
    end=st.sampled_from([0.0, 0.05, 0.3, 0.8, 1.0]),
    num=st.integers(1, 160),
    rows_per_add=st.sampled_from([1, 3, 8]),
    prioritized=st.booleans(),
    clip=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


def make(case: Case) -> Replay:
    sampler: Sampler = Prioritized(case.capacity) if case.prioritized else Uniform()
    return steps(case.spec, case.lanes, case.capacity, sampler, case.n_step, 0.97, case.clip, case.seed)


def steps(
    spec: Spec,
    lanes: int,
    capacity: int,
    sampler: Sampler,
    n: int = 1,
    gamma: float = 0.99,
    clip: bool = False,
    seed: int = 0,
) -> Replay:
    """A replay of single steps."""
    rng = np.random.default_rng(seed)
    return Replay(spec, lanes, capacity, sampler, rng, cut=StepCut(n), n_step=NStepReturn(n, gamma, clip))


def check_queue(replay: Replay, plain: PlainReplay, case: Case) -> None:
    assert replay.head == len(plain.items)  # every step an item, once, in order: tails too, last rows never
    assert len(replay) <= case.capacity
    if row_bytes(case.spec) < 1024:
        assert len(replay) == min(case.capacity, replay.head)  # capacity counts steps, however short the episodes


@settings(max_examples=120)
@given(CASES)
def test_batches_equal_a_plain_replay_byte_for_byte(case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    ends = rng.choice([0.0, case.end], case.lanes)  # lanes of long episodes beside lanes of short ones
    check_stream(case, random_stream(rng, case.spec, case.lanes, case.num, ends))


def check_stream(case: Case, rows: dict[str, Array]) -> None:
    replay = make(case)
    plain = PlainReplay(case.spec, case.lanes, case.n_step, replay.n_step.gamma, case.clip)
    for begin in range(0, case.num, case.rows_per_add):
        end = min(begin + case.rows_per_add, case.num)
        assert replay.add(rollout(rows, begin, end)) == np.count_nonzero(~rows["last"][begin:end])
        for row in range(begin, end):
            plain.add(rows, row)
        check_queue(replay, plain, case)
        batch = replay.sample(8)
        assert (batch is None) == (len(replay) == 0)
        if batch is not None:
            assert replay.tail <= batch.ids.min()
            assert batch.ids.max() < replay.head
            assert isinstance(batch, Batch)
            plain.assert_equal(batch)
            replay.update(batch.ids, np.abs(batch.reward))
    live = np.arange(replay.tail, replay.head)
    if len(live):
        batch = replay.read_batch(live, np.ones(len(live), np.float32))
        assert isinstance(batch, Batch)
        plain.assert_equal(batch)


def test_stacks_before_and_after_a_single_step_share_memory() -> None:
    rows = random_stream(np.random.default_rng(0), FRAMES, 2, 40, 0.1)
    for n_step, shared in ((1, True), (2, False)):
        replay = Replay(FRAMES, 2, 50, Uniform(), np.random.default_rng(0), **one_n(n_step))
        replay.add(rollout(rows))
        first, second, third = (replay.sample(8) for _ in range(3))
        assert np.shares_memory(first.obs, first.next_obs) == shared
        assert np.shares_memory(first.obs, third.obs), "the memory of the batch before the last is reused"
        assert not np.shares_memory(first.obs, second.obs)


def one_n(n_step: int) -> dict[str, Any]:
    return {"cut": StepCut(n_step), "n_step": NStepReturn(n_step, 0.99)}


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("n_step", [2, 5])
def test_items_are_removed_before_they_are_overwritten_when_episodes_differ_most(n_step: int, stack: int) -> None:
    # The short lane's tails are queued before steps of the long lane that began up to n rows earlier, and its many
    # final rows make the ring, not the capacity, the limit.
    spec = Spec((1100,), "uint8", (4,), stack=stack)
    rows = random_stream(np.random.default_rng(6), spec, 2, 300, np.array([0.0, 1.4]))
    case = Case(spec, 2, 60, n_step, 0.0, 300, 1, False, False, seed=7)
    check_stream(case, rows)


def test_every_step_of_a_finished_stream_is_an_item_once() -> None:
    rows = random_stream(np.random.default_rng(3), VECTOR, 2, 300, end=0.2)
    rows["last"][-1] |= ~rows["last"][-2]  # the stream ends with every episode over
    rows["discount"][-2] = 1.0
    replay = steps(VECTOR, 2, 1_000, Uniform(), n=4)
    num = replay.add(rollout(rows))
    items = replay.items[: replay.head]
    assert num == len(replay) == len(set(items.tolist()))
    assert {(item // 2, item % 2) for item in items.tolist()} == set(zip(*np.nonzero(~rows["last"]), strict=True))


@pytest.mark.parametrize("prioritized", [False, True])
def test_overwritten_items_are_never_drawn(prioritized: bool) -> None:
    capacity = 10
    replay = steps(VECTOR, 1, capacity, Prioritized(capacity) if prioritized else Uniform(), seed=1)
    rows = random_stream(np.random.default_rng(2), VECTOR, 1, 200, end=0.1)
    drawn: set[int] = set()
    for row in range(200):
        replay.add(rollout(rows, row, row + 1))
        if (batch := replay.sample(64)) is None:
            continue
        assert batch.ids.min() >= replay.head - capacity
        if row == 199:
            drawn = set(batch.ids.tolist())
    assert drawn == set(range(replay.head - capacity, replay.head))


def test_a_late_priority_never_hits_a_reused_slot() -> None:
    sampler = Prioritized(4)
    replay = steps(VECTOR, 1, 4, sampler, seed=1)
    rows = random_stream(np.random.default_rng(2), VECTOR, 1, 9, end=0.0)
    replay.add(rollout(rows, 0, 5))
    early = np.arange(replay.tail, replay.head)
    replay.update(early, np.array([1.0, 2.0, 3.0, 4.0], np.float32))
    replay.add(rollout(rows, 5, 7))  # the two oldest are removed, two new items take their slots
    before = sampler.tree.copy()
    replay.update(early[:2], np.full(2, 1e6, np.float32))
    assert np.array_equal(sampler.tree, before)
    assert sampler.largest == pytest.approx(4.0, abs=1e-5)
    replay.update(early, np.full(4, 9.0, np.float32))  # late for two, in time for two
    changed = np.flatnonzero(sampler.leaves != before[:4])
    assert set(changed) == {int(serial) % 4 for serial in early[2:]}


@pytest.mark.parametrize("spec", [VECTOR, FRAMES, LARGE], ids=["vector", "frames", "large"])
@pytest.mark.parametrize("n_step", [1, 5])
@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "prioritized"])
def test_a_restored_replay_samples_the_same(spec: Spec, n_step: int, prioritized: bool) -> None:
    case = Case(spec, 3, 40, n_step, 0.2, 120, 1, prioritized, False, seed=5)
    rows = random_stream(np.random.default_rng(4), spec, 3, 120, np.array([0.0, 0.2, 1.4]))

    def add_and_sample(replay: Replay, begin: int, end: int) -> list[Array]:
        seen: list[Array] = []
        for row in range(begin, end):
            replay.add(rollout(rows, row, row + 1))
            if (batch := replay.sample(16)) is not None:
                seen += [
                    getattr(batch, name).copy() for name in ("ids", "weight", "obs", "next_obs", "reward", "discount")
                ]
                replay.update(batch.ids, np.abs(batch.reward))
        return seen

    first, second = make(case), make(case)
    add_and_sample(first, 0, 70)
    state = first.state_dict()
    saved = read_rows(first)
    add_and_sample(second, 0, 90)  # the other has a past of its own, as after a roll-back
    expected = add_and_sample(first, 70, 120)
    for restored in (second, make(case)):
        restored.load_state_dict(state)
        restore_rows(restored, saved)
        got = add_and_sample(restored, 70, 120)
        assert len(got) == len(expected)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(got, expected, strict=True))


def test_no_item_is_live_before_its_window_is_complete() -> None:
    replay = steps(Spec((1,), "float32", (2,)), 1, 10, Uniform(), n=3)
    stream = one_lane([0, 1, 2], [1, 1, 1], [1, 1, 1], [False] * 3)
    assert replay.add(stream) == 3
    assert replay.sample(1) is None


def test_rewards_are_clipped_at_the_cut_and_stored_raw() -> None:
    replay = steps(Spec((1,), "float32", (2,)), 1, 10, Uniform(), n=2, clip=True)
    replay.add(one_lane([0, 1, 2], [7, -0.5, 0], [1, 1, 1], [False] * 3))
    assert replay.store.reward[0, 0] == 7
    batch = replay.read_batch(np.array([0]), np.ones(1, np.float32))
    assert batch.reward[0] == np.float32(1 - 0.99 * 0.5)


@pytest.mark.parametrize("n_step", [1, 3, 10])
def test_an_atari_step_takes_at_most_7400_bytes(n_step: int) -> None:
    spec, capacity, lanes = Spec((84, 84), "uint8", (18,), stack=4), 1_000_000, 8
    ring = ring_rows(capacity, spec, lanes, n_step) * lanes * row_bytes(spec)
    queue = 8 * (capacity + lanes * (n_step + 1))
    tree = Prioritized(capacity).tree.nbytes
    assert (ring + queue) / capacity <= 7_400
    assert (ring + queue + tree) / capacity <= 7_400


@pytest.mark.parametrize("spec", [VECTOR, FRAMES, LARGE], ids=["vector", "frames", "large"])
def test_row_bytes_are_what_the_store_really_takes(spec: Spec) -> None:
    store = Store(spec, 3, 7)
    assert sum(column.nbytes for column in store.columns().values()) == 3 * 7 * row_bytes(spec)


def test_a_cleared_replay_starts_over_and_keeps_its_serial_numbers() -> None:
    spec = Spec((1,), "float32", (2,))
    replay = steps(spec, 1, 8, Uniform())

    def add(values: list[float]) -> None:
        for value in values:
            zero = np.zeros((1, 1), np.float32)
            obs, last = np.full((1, 1, 1), value, np.float32), np.zeros((1, 1), np.bool_)
            replay.add(Rollout(obs, np.zeros((1, 1), np.int64), zero, zero + 1, last, (0, 0, 0), 0))

    add([1, 2, 3])
    before = replay.head
    replay.clear()
    assert len(replay) == 0
    assert replay.sample(4) is None
    add([7, 8, 9])
    batch = replay.sample(32)
    assert batch is not None
    assert {7.0, 8.0} == set(batch.obs.ravel().tolist())  # nothing joins 3 and 7
    assert batch.ids.min() >= before
