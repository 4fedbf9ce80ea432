"""Windows of rows against a plain copy of the stream, their actor priorities, and restarts.

Shapes: R rows, L lanes, W rows of a window, N windows.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.data import Array, Sequences, Spec
from qfleet.replay import NStepReturn, Prioritized, Replay, SequenceCut, StepCut, Uniform
from qfleet.replay.samplers import Sampler
from qfleet.replay.store import row_bytes
from tests.replay.streams import one_lane, random_stream, read_rows, restore_rows, rollout

Rows = dict[str, Array]
VECTOR = Spec((3,), "float32", (4,), state=(2,))
FRAMES = Spec((5, 2), "uint8", (4,), stack=4, masked=True, state=(3,))
# Above the size from which the ring has little spare room, so that rows run out before the capacity is reached.
LARGE = Spec((1100,), "uint8", (4,), stack=4, state=(1,))


@dataclass(frozen=True)
class Case:
    spec: Spec
    lanes: int
    capacity: int
    cut: SequenceCut
    end: float
    num: int
    rows_per_add: int
    prioritized: bool
    clip: bool
    seed: int
    n: int  # of the n-step return: it may be smaller than the cut's
    values: bool = False

    def replay(self) -> Replay:
        items = self.cut.items_in(self.capacity)
        sampler: Sampler = Prioritized(items) if self.prioritized else Uniform()
        rng, n_step = np.random.default_rng(self.seed), NStepReturn(self.n, 0.97, self.clip)
        return Replay(
            self.spec, self.lanes, self.capacity, sampler, rng, cut=self.cut, n_step=n_step, actor_priority=self.values
        )


SPECS = st.builds(
    Spec,
    st.sampled_from([(3,), (2, 2)]),
    st.sampled_from(["float32", "uint8"]),
    st.just((4,)),
    stack=st.sampled_from([1, 4]),
    masked=st.booleans(),
    state=st.sampled_from([(), (2,)]),
)
CUTS = st.builds(SequenceCut, st.integers(1, 4), st.integers(0, 4), st.integers(1, 6), st.integers(1, 20))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cut = draw(CUTS)
    return Case(
        spec=draw(st.one_of(SPECS, SPECS, st.just(LARGE))),
        lanes=draw(st.integers(1, 3)),
        capacity=draw(st.integers(1, 80)),
        cut=cut,
        end=draw(st.sampled_from([0.0, 0.05, 0.3, 0.8, 1.0])),
        num=draw(st.integers(1, 160)),
        rows_per_add=draw(st.sampled_from([1, 3, 8])),
        prioritized=draw(st.booleans()),
        clip=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        n=draw(st.integers(1, cut.n)),
    )


# The reference implementation


def frames(case: Case, rows: Rows, row: int, lane: int) -> Array:
    """What the network sees at a row: the newest frames of its episode, zeros before it began."""
    if case.spec.stack == 1:
        newest: Array = rows["obs"][row, lane]
        return newest
    found = [np.zeros(case.spec.obs, case.spec.dtype)] * case.spec.stack
    for back in range(case.spec.stack):
        at = row - back
        if at < 0 or (back > 0 and rows["last"][at, lane]):
            break
        found[case.spec.stack - 1 - back] = rows["obs"][at, lane]
    return np.stack(found)


def returns(case: Case, rows: Rows, row: int, lane: int) -> tuple[float, float, int]:
    """Reward, discount, and the row to look at n steps on or at the episode's end."""
    if rows["last"][row, lane]:
        return 0.0, 0.0, row
    total, keep, at = 0.0, 1.0, row
    while at < row + case.n:
        reward = float(rows["reward"][at, lane])
        total += keep * (min(max(reward, -1.0), 1.0) if case.clip else reward)
        keep *= 0.97 * float(rows["discount"][at, lane])
        at += 1
        if rows["last"][at, lane]:
            break
    return total, keep, at


def window(case: Case, rows: Rows, serial: int) -> dict[str, Array]:
    """Window number `serial`: they are numbered lane by lane, stride by stride."""
    cut, lane, begin = case.cut, serial % case.lanes, serial // case.lanes * case.cut.stride
    span = range(begin, begin + cut.burn_in + cut.length + cut.n)
    learned = [returns(case, rows, begin + cut.burn_in + at, lane) for at in range(cut.length)]
    found = {
        "obs": np.stack([frames(case, rows, row, lane) for row in span]),
        "action": np.array([rows["action"][row, lane] for row in span], np.int64),
        "gain": np.array([rows["reward"][row, lane] for row in span], np.float32),
        "last": np.array([rows["last"][row, lane] for row in span]),
        "reward": np.array([total for total, _, _ in learned], np.float32),
        "discount": np.array([keep for _, keep, _ in learned], np.float32),
        "ahead": np.array([at - begin for _, _, at in learned], np.int64),
    }
    if case.spec.masked:
        found["mask"] = np.stack([rows["mask"][row, lane] for row in span])
    return found


def assert_equal(case: Case, rows: Rows, batch: Sequences) -> None:
    """Every window of the batch is byte for byte what it must be."""
    serials = batch.ids.tolist()
    expected = [window(case, rows, serial) for serial in serials]
    for name in expected[0]:
        want = np.stack([one[name] for one in expected], 1)
        got = getattr(batch, name)
        assert got.dtype == want.dtype, name
        assert got.shape == want.shape, name
        assert got.tobytes() == want.tobytes(), name
    if not case.spec.masked:
        assert batch.mask is None
    firsts = [(serial // case.lanes * case.cut.stride, serial % case.lanes) for serial in serials]
    state = [rows["state"][at] for at in firsts] if case.spec.state else np.zeros((len(serials), 0), np.float32)
    assert batch.state.tobytes() == np.array(state, np.float32).tobytes()
    assert batch.state.shape == (len(serials), *(case.spec.state or (0,)))


# Windows


@settings(max_examples=150)
@given(cases())
def test_windows_equal_a_plain_copy_byte_for_byte(case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    ends = rng.choice([0.0, case.end], case.lanes)  # lanes of long episodes beside lanes of short ones
    rows = random_stream(rng, case.spec, case.lanes, case.num, ends)
    replay = case.replay()
    for begin in range(0, case.num, case.rows_per_add):
        end = min(begin + case.rows_per_add, case.num)
        assert replay.add(rollout(rows, begin, end)) == np.count_nonzero(~rows["last"][begin:end])
        check_queue(case, replay, end)
        batch = replay.sample(5)
        assert (batch is None) == (len(replay) == 0)
        if batch is not None:
            assert isinstance(batch, Sequences)
            assert replay.tail <= batch.ids.min()
            assert batch.ids.max() < replay.head
            assert_equal(case, rows, batch)
            replay.update(batch.ids, np.abs(batch.reward).sum(0))
    if len(replay):
        live = np.arange(replay.tail, replay.head)
        assert_equal(case, rows, replay.read_batch(live, np.ones(len(live), np.float32)))  # type: ignore[arg-type]


def check_queue(case: Case, replay: Replay, num: int) -> None:
    """Every window is queued once, as soon as it is complete; a full replay holds `capacity` steps' windows."""
    whole = max(0, (num - case.cut.rows) // case.cut.stride + 1) * case.lanes
    assert replay.head == whole
    most = -(-case.capacity // case.cut.stride)
    assert len(replay) <= most
    room = case.capacity >= case.lanes * case.cut.rows and case.cut.stride <= case.cut.rows  # as plans must have it
    if room and row_bytes(case.spec) < 1024:
        assert len(replay) == min(most, whole)


def test_a_window_by_hand() -> None:
    spec = Spec((1,), "float32", (2,), state=(1,))
    cut = SequenceCut(n=2, burn_in=1, length=3, stride=3)
    replay = Replay(spec, 1, 12, Uniform(), np.random.default_rng(0), cut=cut, n_step=NStepReturn(2, 0.5))
    # An episode of three steps that ends by death, its final observation, and the beginning of the next.
    stream = one_lane(
        [0, 1, 2, 3, 4, 5], [1, 2, 4, 99, 8, 16], [1, 1, 0, 1, 1, 1], [False, False, False, True, False, False]
    )
    stream.state = np.arange(10.0, 16.0, dtype=np.float32).reshape(6, 1, 1)
    assert replay.add(stream) == 5
    batch = replay.sample(1)
    assert isinstance(batch, Sequences)
    assert batch.obs.ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.gain.ravel().tolist() == [1, 2, 4, 99, 8, 16]
    assert batch.last.ravel().tolist() == [False, False, False, True, False, False]
    assert batch.state.tolist() == [[10]]
    # Rows 1 to 3 are learned from: 2 + 0.5 * 4 and then death; 4 and then death; the final observation, not a step.
    assert batch.reward.ravel().tolist() == [4, 4, 0]
    assert batch.discount.ravel().tolist() == [0, 0, 0]
    assert batch.ahead.ravel().tolist() == [3, 3, 3]


def test_windows_begin_every_stride_in_every_lane_and_wait_for_their_last_row() -> None:
    cut = SequenceCut(n=2, burn_in=1, length=3, stride=4)
    replay = Replay(VECTOR, 2, 100, Uniform(), np.random.default_rng(0), cut=cut, n_step=NStepReturn(2, 0.9))
    rows = random_stream(np.random.default_rng(1), VECTOR, 2, 15, end=0.3)
    counts = []
    for row in range(15):
        replay.add(rollout(rows, row, row + 1))
        counts.append(len(replay))
    assert counts == [0] * 5 + [2] * 4 + [4] * 4 + [6] * 2
    assert [(item // 2, item % 2) for item in replay.items[:6].tolist()] == [
        (r, lane) for r in (0, 4, 8) for lane in (0, 1)
    ]


def test_a_cleared_replay_starts_windows_over() -> None:
    case = Case(VECTOR, 2, 60, SequenceCut(1, 1, 2, 3), 0.2, 40, 1, True, False, 3, 1)
    replay, rows = case.replay(), random_stream(np.random.default_rng(3), VECTOR, 2, 40, end=0.2)
    replay.add(rollout(rows, 0, 13))
    before = replay.head
    replay.clear()
    assert replay.sample(4) is None
    replay.add(rollout(rows, 13, 40))
    later = {name: column[13:] for name, column in rows.items()}
    batch = replay.sample(16)
    assert isinstance(batch, Sequences)
    assert batch.ids.min() >= before
    assert_equal(case, later, replace(batch, ids=batch.ids - before))


# Priorities from the actor's TD error


def expected_error(case: Case, rows: Rows, row: int, lane: int) -> float:
    """|R + discount * best value ahead - value of the action taken|, with value rescaling if the replay says so."""
    total, keep, at = returns(case, rows, row, lane)
    taken, best = float(rows["value"][row, lane, 0]), float(rows["value"][at, lane, 1])
    return abs(total + keep * best - taken)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_steps_get_the_td_error_of_their_actor(n: int, clip: bool) -> None:
    case = Case(VECTOR, 2, 60, SequenceCut(n, 0, 1, 1), 0.3, 40, 1, True, clip, 5, n, values=True)
    rows = random_stream(np.random.default_rng(5), VECTOR, 2, 40, end=0.3, values=True)
    sampler = Prioritized(60)
    replay = Replay(
        VECTOR,
        2,
        60,
        sampler,
        np.random.default_rng(0),
        cut=StepCut(n),
        n_step=NStepReturn(n, 0.97, clip),
        actor_priority=True,
    )
    replay.add(rollout(rows))
    assert len(replay) > 40
    for serial in range(replay.tail, replay.head):
        item = int(replay.items_at(np.array([serial]))[0])
        error = expected_error(case, rows, item // 2, item % 2)
        assert leaf(sampler, serial) == pytest.approx((error + sampler.eps) ** sampler.alpha, rel=1e-4)
    assert sampler.tree[-1] == pytest.approx(sampler.leaves.sum())


def leaf(sampler: Prioritized, serial: int) -> float:
    """An item's leaf of the sum tree."""
    return float(sampler.leaves[serial % sampler.capacity])


@settings(max_examples=40)
@given(cases(), st.sampled_from([0.0, 0.9, 1.0]))
def test_windows_get_the_mixed_td_error_of_their_actor(case: Case, eta: float) -> None:
    case = replace(case, prioritized=True, values=True, cut=replace(case.cut, eta=eta))
    rows = random_stream(np.random.default_rng(case.seed), case.spec, case.lanes, case.num, case.end, values=True)
    replay = case.replay()
    replay.add(rollout(rows))
    assert isinstance(replay.sampler, Prioritized)
    for serial in range(replay.tail, replay.head):
        begin, lane = serial // case.lanes * case.cut.stride + case.cut.burn_in, serial % case.lanes
        steps = [row for row in range(begin, begin + case.cut.length) if not rows["last"][row, lane]]
        errors = [expected_error(case, rows, row, lane) for row in steps] or [0.0]
        mixed = eta * max(errors) + (1 - eta) * sum(errors) / len(errors)
        expected = (mixed + replay.sampler.eps) ** replay.sampler.alpha
        assert leaf(replay.sampler, serial) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_errors_of_rescaled_values_are_measured_on_their_scale() -> None:
    spec = Spec((1,), "float32", (2,))
    sampler, n_step = Prioritized(4, alpha=1.0, eps=1e-12), NStepReturn(1, 0.5, rescale=True)
    replay = Replay(spec, 1, 4, sampler, np.random.default_rng(0), cut=StepCut(1), n_step=n_step, actor_priority=True)
    stream = one_lane([0, 1], [10, 0], [1, 1], [False, False])
    stream.value = np.array([[[3.0, 99.0]], [[99.0, 24.0]]], np.float32)  # returns: of the action, and of the best
    replay.add(stream)
    # h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x, of 10 + 0.5 * 24 and of 3.
    target = 23**0.5 - 1 + 0.022
    value = 4**0.5 - 1 + 0.003
    assert leaf(sampler, 0) == pytest.approx(target - value, rel=1e-4)


def test_new_items_with_large_errors_are_drawn_more_often() -> None:
    spec = Spec((1,), "float32", (2,))
    sampler = Prioritized(3, alpha=1.0)
    replay = Replay(
        spec, 1, 3, sampler, np.random.default_rng(0), cut=StepCut(1), n_step=NStepReturn(1, 0.9), actor_priority=True
    )
    stream = one_lane([0, 1, 2, 3], [1, 8, 1, 0], [1] * 4, [False] * 4)
    stream.value = np.zeros((4, 1, 2), np.float32)
    replay.add(stream)
    drawn = np.bincount(sampler.draw(1_000, np.random.default_rng(1))[0], minlength=3)
    assert drawn == pytest.approx([100, 800, 100], abs=2)  # one per equal slice, so nearly exact


# Restarts


@pytest.mark.parametrize("spec", [VECTOR, FRAMES, LARGE], ids=["vector", "frames", "large"])
@pytest.mark.parametrize("cut", [SequenceCut(1, 0, 4, 4), SequenceCut(3, 2, 5, 2), SequenceCut(1, 1, 2, 11)], ids=str)
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "actor"])
def test_a_restored_replay_samples_the_same_windows(spec: Spec, cut: SequenceCut, kind: str) -> None:
    case = Case(spec, 3, 60, cut, 0.2, 140, 1, kind != "uniform", False, 5, cut.n, values=kind == "actor")
    ends = np.array([0.0, 0.2, 1.4])
    rows = random_stream(np.random.default_rng(4), spec, 3, 140, ends, values=case.values)

    def add_and_sample(replay: Replay, begin: int, end: int) -> list[Any]:
        seen: list[Any] = []
        for row in range(begin, end):
            replay.add(rollout(rows, row, row + 1))
            if (batch := replay.sample(6)) is not None:
                seen += [value.tobytes() for name in batch.__slots__ if (value := getattr(batch, name)) is not None]
                replay.update(batch.ids, np.abs(batch.reward).max(0))
        return seen

    for stop in (3, 40, 85):
        first, second = case.replay(), case.replay()
        add_and_sample(first, 0, stop)
        state = first.state_dict()
        saved = read_rows(first)
        add_and_sample(second, 0, 90)  # the other has a past of its own, as after a roll-back
        expected = add_and_sample(first, stop, 140)
        for restored in (second, case.replay()):
            restored.load_state_dict(state)
            restore_rows(restored, saved)
            assert add_and_sample(restored, stop, 140) == expected


# Compiling


WARMED = """
import json
import numpy as np
from dataclasses import replace
from qfleet.data import Spec
from qfleet.replay import NStepReturn, Prioritized, Replay, SequenceCut, StepCut, intake, kernels, tree, warm
from tests.replay.streams import random_stream, rollout

found = vars(intake) | vars(kernels) | vars(tree)
every = {name: kernel for name, kernel in found.items() if hasattr(kernel, "signatures")}
known = lambda: json.dumps({name: len(kernel.signatures) for name, kernel in every.items()})

spec = Spec((6,), "float32", (2,))
warm.warm(spec)
print(known())
spec = replace(spec, state=(3,), masked=True)
rows = random_stream(np.random.default_rng(1), spec, 2, 20, end=0.3, values=True)
for cut in (StepCut(2), SequenceCut(2, 1, 2, 1)):
    rng = np.random.default_rng(0)
    replay = Replay(spec, 2, 16, Prioritized(16), rng, cut=cut, n_step=NStepReturn(2, 0.99), actor_priority=True)
    replay.add(rollout(rows))
    batch = replay.sample(4)
    replay.update(batch.ids, np.ones(4, np.float32))
    replay.seal()
    replay.load_state_dict(replay.state_dict())
print(known())
"""


INNER = {
    "branch_at",
    "branch_sum",
    "copy_frames",
    "frame_at",
    "n_step_sum",
    "queue_episode_tail",
    "stack_into",
    "tree_find",
}  # which are called by other loops only


def test_warming_up_compiles_every_loop_of_a_run() -> None:
    # In a process of its own: here other tests have compiled everything already.
    command, root = [sys.executable, "-c", WARMED], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    warmed, after = done.stdout.splitlines()
    assert warmed == after
    assert {name for name, count in json.loads(after).items() if not count} == INNER


def test_the_store_keeps_state_and_values_with_its_rows() -> None:
    case = Case(FRAMES, 2, 40, SequenceCut(1, 1, 2, 3), 0.2, 20, 1, True, False, 3, 1, values=True)
    rows = random_stream(np.random.default_rng(3), FRAMES, 2, 20, end=0.2, values=True)
    replay = case.replay()
    replay.add(rollout(rows))
    kept = replay.store.read(0, 20)
    assert kept.keys() == rows.keys()
    assert all(np.array_equal(kept[name], rows[name]) for name in rows)
