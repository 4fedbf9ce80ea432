"""Copies are rejected exactly: compared with a plain replay that compares bytes, through the ring and restores."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.data import Array, Rollout, Spec
from qfleet.replay import NStepReturn, Prioritized, Replay, StepCut, Uniform
from qfleet.replay.duplicates import DuplicateFilter
from qfleet.replay.samplers import Sampler
from tests.replay.streams import FIELDS, PlainReplay, one_lane, read_rows, restore_rows, rollout

GAMMA = 0.9


@dataclass(frozen=True)
class Case:
    spec: Spec
    lanes: int
    capacity: int
    n_step: int
    end: float
    num: int
    copies: int
    still: bool
    prioritized: bool
    seed: int


CASES = st.builds(
    Case,
    spec=st.builds(
        Spec,
        st.sampled_from([(1,), (3,), (2, 1), (4,)]),
        st.sampled_from(["float32", "uint8"]),
        st.just((2,)),
        stack=st.sampled_from([1, 3]),
        masked=st.booleans(),
    ),
    lanes=st.integers(1, 3),
    capacity=st.integers(1, 60),
    n_step=st.integers(1, 3),
    end=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    num=st.integers(1, 150),
    copies=st.integers(1, 3),
    still=st.booleans(),
    prioritized=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


def repetitive_stream(case: Case) -> dict[str, Array]:
    """A stream with so few different values that copies are common."""
    rng, shape = np.random.default_rng(case.seed), (case.num, case.lanes)
    terminated, truncated = rng.random((2, *shape)) < case.end / 2
    last = np.zeros(shape, np.bool_)
    for row in range(1, case.num):
        last[row] = (terminated[row - 1] | truncated[row - 1]) & ~last[row - 1]
    # The numbers of one observation are all the same, so that wide ones repeat as often as narrow ones.
    seen = rng.integers(0, 2, (*shape, *(1 for _ in case.spec.obs)))
    stream: dict[str, Array] = {
        "obs": np.broadcast_to(seen, (*shape, *case.spec.obs)).astype(case.spec.dtype),
        "action": rng.integers(0, 2, shape),
        "reward": rng.integers(0, 2, shape).astype(np.float32),
        "discount": (~terminated | last).astype(np.float32),
        "last": last,
    }
    if case.spec.masked:
        stream["mask"] = rng.random((*shape, 1)) < np.array([1.0, 0.5])
    return stream


def make(case: Case) -> Replay:
    sampler: Sampler = Prioritized(case.capacity) if case.prioritized else Uniform()
    rng, n_step = np.random.default_rng(case.seed), NStepReturn(case.n_step, GAMMA)
    filter = DuplicateFilter(case.copies, still=case.still)
    return Replay(
        case.spec, case.lanes, case.capacity, sampler, rng, cut=StepCut(case.n_step), n_step=n_step, filter=filter
    )


def key(item: dict[str, Array]) -> bytes:
    return b"".join(item[name].tobytes() for name in FIELDS if name in item)


def is_still(item: dict[str, Array]) -> bool:
    same = item["obs"].tobytes() == item["next_obs"].tobytes()
    return bool(same and item["reward"] == 0 and item["discount"] > 0)


class PlainFilter:
    """Which items of a plain replay can be drawn, by comparing whole items."""

    def __init__(self, case: Case) -> None:
        self.case, self.plain = case, PlainReplay(case.spec, case.lanes, case.n_step, GAMMA, False)
        self.kept: list[int] = []  # numbers of the plain replay's items, in the order of serial numbers
        self.keys: list[bytes] = []  # of all the plain replay's items

    def add(self, rows: dict[str, Array], row: int, tail: int) -> None:
        """Add one row; the items before serial number `tail` had been removed before."""
        self.plain.add(rows, row)
        live = Counter(self.keys[number] for number in self.kept[tail:])
        for number in range(len(self.keys), len(self.plain.items)):
            item = self.plain.item(number)
            self.keys.append(key(item))
            if (self.case.still and is_still(item)) or live[self.keys[number]] >= self.case.copies:
                continue
            live[self.keys[number]] += 1
            self.kept.append(number)

    def check(self, replay: Replay) -> None:
        """The replay holds exactly these items, and its counts are right."""
        assert replay.head == len(self.kept)
        assert replay.filter is not None
        assert (replay.filter.offered, replay.filter.kept_out) == (len(self.keys), len(self.keys) - len(self.kept))
        serials = np.arange(replay.tail, replay.head)
        if len(serials):
            batch = replay.read_batch(serials, np.ones(len(serials), np.float32))
            expected = [self.plain.item(number) for number in self.kept[replay.tail :]]
            for name in expected[0]:
                assert getattr(batch, name).tobytes() == np.stack([item[name] for item in expected]).tobytes(), name
            assert max(Counter(map(key, expected)).values()) <= self.case.copies


@settings(max_examples=80)
@given(CASES)
def test_the_filter_accepts_the_same_items_as_comparing_bytes(case: Case) -> None:
    rows, replay, plain = repetitive_stream(case), make(case), PlainFilter(case)
    for row in range(case.num):
        tail = replay.tail
        steps = replay.add(rollout(rows, row, row + 1))
        assert steps == np.count_nonzero(~rows["last"][row])  # rejected copies count as steps
        plain.add(rows, row, tail)
        if row % 16 == 0 or row + 1 == case.num:
            plain.check(replay)
        batch = replay.sample(4)
        assert (batch is None) == (len(replay) == 0)
        if batch is not None:
            replay.update(batch.ids, np.abs(batch.reward))


@settings(max_examples=40)
@given(CASES)
def test_a_restored_filter_continues_as_before(case: Case) -> None:
    rows, replay, again = repetitive_stream(case), make(case), make(case)
    half = case.num // 2
    for row in range(half):
        replay.add(rollout(rows, row, row + 1))
    saved = replay.state_dict()
    restore_rows(again, read_rows(replay))
    again.load_state_dict(saved)
    for row in range(half, case.num):
        for each in (replay, again):
            each.add(rollout(rows, row, row + 1))
    assert_same(replay.state_dict(), again.state_dict())


def assert_same(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    else:
        assert np.array_equal(np.asarray(one), np.asarray(other))


def single(filter: DuplicateFilter | None, capacity: int = 100, n: int = 1) -> Replay:
    spec, rng = Spec((1,), "float32", (2,)), np.random.default_rng(0)
    return Replay(spec, 1, capacity, Uniform(), rng, cut=StepCut(n), n_step=NStepReturn(n, GAMMA), filter=filter)


def circle(num: int, around: int = 4, reward: float = 1.0) -> Rollout:
    """An environment that visits `around` states in a circle."""
    obs = [float(row % around) for row in range(num)]
    return one_lane(obs, [reward] * num, [1.0] * num, [False] * num)


def test_an_environment_of_four_steps_fills_four_items() -> None:
    replay = single(DuplicateFilter())
    assert replay.add(circle(41)) == 41
    assert len(replay) == 4
    assert replay.filter is not None
    assert replay.filter.share == 36 / 40
    assert len(single(None)) == 0


def test_the_number_of_copies_can_be_set() -> None:
    replay = single(DuplicateFilter(copies=3))
    replay.add(circle(41))
    assert len(replay) == 12


def test_a_copy_is_accepted_after_the_last_one_was_removed() -> None:
    replay = single(DuplicateFilter(), capacity=3)  # four steps never fit: each is removed before its copy comes
    replay.add(circle(41))
    assert replay.head == 40
    assert len(replay) == 3


def test_a_late_duplicate_after_the_ring_has_moved_on() -> None:
    replay = single(DuplicateFilter(), capacity=20)
    replay.add(circle(400))
    # A step whose rows are overwritten leaves, and its next copy, at most a circle later, takes its place.
    assert replay.head > 4
    assert 3 <= len(replay) <= 4


def test_still_rejects_steps_that_change_nothing_unless_rewarded_or_final() -> None:
    obs, reward = [1.0, 1.0, 1.0, 2.0, 2.0], [0.0, 0.5, 0.0, 0.0, 0.0]
    replay = single(DuplicateFilter(copies=9, still=True))
    replay.add(one_lane(obs, reward, [1.0, 1.0, 1.0, 0.0, 1.0], [False] * 4 + [True]))
    batch = replay.read_batch(np.arange(replay.tail, replay.head), np.ones(len(replay), np.float32))
    assert batch.reward.tolist() == [0.5, 0.0, 0.0]
    assert batch.discount.tolist() == pytest.approx([GAMMA, GAMMA, 0.0])  # the last of them ended the episode


@pytest.mark.parametrize("field", ["obs", "action", "reward", "discount"])
def test_steps_that_differ_in_one_thing_are_no_copies(field: str) -> None:
    first, second = (one_lane([1.0, 2.0], [1.0, 0.0], [1.0, 1.0], [False, True]) for _ in range(2))
    replay = single(DuplicateFilter())
    getattr(second, field)[0] = getattr(second, field)[0] + 1 if field != "discount" else 0
    for each in (first, second, first, second):
        replay.add(each)
    assert len(replay) == 2


def test_steps_with_different_next_observations_are_no_copies() -> None:
    replay = single(DuplicateFilter())
    for goal in (2.0, 3.0, 2.0):
        replay.add(one_lane([1.0, goal], [1.0, 0.0], [1.0, 1.0], [False, True]))
    assert len(replay) == 2


def test_steps_with_different_older_frames_are_no_copies() -> None:
    spec, rng = Spec((1,), "uint8", (2,), stack=2), np.random.default_rng(0)
    replay = Replay(spec, 1, 50, Uniform(), rng, cut=StepCut(1), n_step=NStepReturn(1, GAMMA), filter=DuplicateFilter())
    for frames in ([5, 1, 2], [6, 1, 2], [5, 1, 2]):
        rows = one_lane([float(frame) for frame in frames], [0.0] * 3, [1.0] * 3, [False, False, True])
        rows.obs = rows.obs.astype(np.uint8)
        replay.add(rows)
    assert len(replay) == 4  # 5 -> 1, 6 -> 1, and 1 -> 2 with a 5 or a 6 before it


def test_a_cleared_replay_forgets_its_copies() -> None:
    replay = single(DuplicateFilter())
    replay.add(circle(9))
    replay.clear()
    assert len(replay) == replay.items_added == 0
    replay.add(circle(9))
    assert len(replay) == 4
    assert replay.items_added == 8


def test_saved_keys_that_do_not_fit_are_refused() -> None:
    replay = single(DuplicateFilter())
    replay.add(circle(9))
    saved = replay.state_dict()
    saved["filter"]["keys"] = saved["filter"]["keys"][:-1]
    with pytest.raises(ValueError, match="keys"):
        single(DuplicateFilter()).load_state_dict(saved)
    del saved["filter"]
    with pytest.raises(ValueError, match="filter is missing"):
        single(DuplicateFilter()).load_state_dict(saved)
