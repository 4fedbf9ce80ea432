"""Groups of lanes: several actors at different speeds, with episode ends, deaths and restarts.

An observation holds its origin: (lane, incarnation, episode, step), counted from 1. So every item can be
checked against what was produced. Shapes: T rows, B lanes of one actor, L lanes in all.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qfleet.data import Array, Batch, Sequences, Spec, State
from qfleet.replay import NStepReturn, Prioritized, Replay, SequenceCut, StepCut, Store, Uniform
from qfleet.replay.samplers import Sampler
from tests.replay.streams import Episode, PlainReplay, random_stream, read_rows, restore_rows, rollout

GAMMA = 0.97
SMALL = Spec((4,), "float32", (4,))
STACKED = Spec((4,), "uint8", (4,), stack=3, masked=True)
# Above the size from which the ring has little spare room, so that rows run out before the capacity is reached.
LARGE = Spec((1100,), "uint8", (4,), stack=3)


class EveryThird:
    """A filter that rejects every third item."""

    def reject_copies(self, store: Store, n_step: NStepReturn, items: Array, begin: int, end: int) -> int:
        kept = [item for item in items[np.arange(begin, end) % len(items)].tolist() if item % 3]
        items[np.arange(begin, begin + len(kept)) % len(items)] = kept
        return begin + len(kept)

    def remove_oldest(self, num: int) -> None:
        assert num >= 0

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State, num: int) -> None:
        assert not state


@dataclass
class Actor:
    """A worker's lanes, whose observations hold their origin. `kill` begins the next incarnation."""

    spec: Spec
    worker: int
    width: int
    end: float
    rng: np.random.Generator
    incarnation: int = 0
    place: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # [B, 2]: episode, step
    last: Array = field(default_factory=lambda: np.zeros(0, np.bool_))

    def __post_init__(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.incarnation += 1
        self.place, self.last = np.ones((self.width, 2), np.int64), np.zeros(self.width, np.bool_)

    def rows(self, num: int) -> dict[str, Array]:
        stream = random_stream(self.rng, self.spec, self.width, num, 0.0)
        stream["obs"][:] = 0
        for time in range(num):
            lane = self.worker * self.width + np.arange(self.width) + 1
            origins = np.column_stack([lane, np.full(self.width, self.incarnation), self.place])
            stream["obs"].reshape(num, self.width, -1)[time, :, :4] = origins
            stream["last"][time] = self.last
            ended = (self.rng.random(self.width) < self.end) & ~self.last
            stream["discount"][time] = ~(ended & (self.rng.random(self.width) < 0.5))
            self.place[self.last] += np.array([1, 0])
            self.place[:, 1] = np.where(self.last, 1, self.place[:, 1] + 1)
            self.last = ended
        return stream


@dataclass(frozen=True)
class Case:
    spec: Spec
    workers: int
    width: int
    capacity: int
    n_step: int
    ends: list[float]
    moves: list[tuple[int, int, str]]  # worker, rows, event after them
    prioritized: bool
    filtered: bool
    seed: int
    packed: bool = False

    @property
    def lanes(self) -> int:
        return self.workers * self.width

    def replay(self, cut: StepCut | SequenceCut) -> Replay:
        items = cut.items_in(self.capacity)
        sampler: Sampler = Prioritized(items) if self.prioritized else Uniform()
        filter = EveryThird() if self.filtered and isinstance(cut, StepCut) else None
        rng, n_step = np.random.default_rng(self.seed), NStepReturn(self.n_step, GAMMA)
        return Replay(
            self.spec,
            self.lanes,
            self.capacity,
            sampler,
            rng,
            cut=cut,
            n_step=n_step,
            filter=filter,  # type: ignore[arg-type]
            compress=self.packed,
        )

    def actors(self) -> list[Actor]:
        seeds = np.random.SeedSequence(self.seed).spawn(self.workers)
        return [
            Actor(self.spec, worker, self.width, self.ends[worker], np.random.default_rng(seed))
            for worker, seed in enumerate(seeds)
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    workers = draw(st.integers(1, 3))
    # The first worker is often the fastest by far.
    worker = st.one_of(st.just(0), st.integers(0, workers - 1))
    event = st.sampled_from(["", "", "", "seal", "kill", "lose", "restore"])
    return Case(
        spec=draw(st.sampled_from([SMALL, STACKED, LARGE])),
        workers=workers,
        width=draw(st.integers(1, 2)),
        capacity=draw(st.integers(1, 60)),
        n_step=draw(st.integers(1, 4)),
        ends=[draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) for _ in range(workers)],
        moves=draw(st.lists(st.tuples(worker, st.integers(1, 12), event), min_size=1, max_size=40)),
        prioritized=draw(st.booleans()),
        filtered=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        packed=draw(st.booleans()),
    )


class Scenario:
    """A replay, its actors, and the items it must hold."""

    def __init__(self, case: Case, cut: StepCut | SequenceCut) -> None:
        self.case, self.cut, self.replay, self.actors = case, cut, case.replay(cut), case.actors()

    def lanes(self, worker: int) -> range:
        return range(worker * self.case.width, (worker + 1) * self.case.width)

    def play(self) -> None:
        """Make every move, and check everything after each."""
        for worker, num, event in self.case.moves:
            lanes, rows = self.lanes(worker), self.actors[worker].rows(num)
            if event == "lose":  # its last rollout never arrived
                event = "kill"
            else:
                part = slice(lanes.start, lanes.stop)
                assert self.replay.add(rollout(rows), lanes=part) == np.count_nonzero(~rows["last"])
                self.added(rows, lanes)
            if event == "kill":
                self.actors[worker].kill()
            if event in ("kill", "seal"):
                marked = self.sealed(lanes)
                assert self.replay.seal(slice(lanes.start, lanes.stop)) == marked
                self.actors[worker].kill()
            if event == "restore":
                self.restore()
            self.check()

    def restore(self) -> None:
        """Go on with what a checkpoint would bring back."""
        again = self.case.replay(self.cut)
        restore_rows(again, read_rows(self.replay))
        again.load_state_dict(self.replay.state_dict())
        self.replay = again

    def live(self) -> Any:
        """All live items as a batch; also samples once and checks the ids."""
        replay = self.replay
        batch = replay.sample(4)
        assert (batch is None) == (len(replay) == 0)
        if batch is not None:
            assert replay.tail <= batch.ids.min()
            assert batch.ids.max() < replay.head
            replay.update(batch.ids, np.ones(4, np.float32))
        return replay.read_batch(np.arange(replay.tail, replay.head), np.ones(len(replay), np.float32))

    def places(self) -> list[tuple[int, int]]:
        """(lane, row) of every item that can be drawn."""
        items = self.replay.items_at(np.arange(self.replay.tail, self.replay.head)).tolist()
        return [(item % self.case.lanes, item // self.case.lanes) for item in items]

    def added(self, rows: dict[str, Array], lanes: range) -> None:
        raise AssertionError

    def sealed(self, lanes: range) -> int:
        raise AssertionError

    def check(self) -> None:
        raise AssertionError


def origin(obs: Array, case: Case) -> Array:
    """The origin of observations [..., 4], or [..., stack, 4]."""
    depth = (case.spec.stack,) if case.spec.stack > 1 else ()
    lead = obs.ndim - 1 - len(depth)
    found: Array = obs.reshape(*obs.shape[:lead], *depth, -1)[..., :4].astype(np.int64)
    return found


class Steps(Scenario):
    """Single steps beside a plain replay."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, StepCut(case.n_step))
        self.plain = PlainReplay(case.spec, case.lanes, case.n_step, GAMMA, False)
        self.heads, self.tail = [0] * case.lanes, 0
        self.begun: dict[int, tuple[Episode, int, int]] = {}  # by the id of an episode: its lane and first row

    def added(self, rows: dict[str, Array], lanes: range) -> None:
        for time in range(len(rows["last"])):
            for lane in lanes:
                episode = self.plain.episodes[lane]
                self.begun.setdefault(id(episode), (episode, lane, self.heads[lane]))
                self.heads[lane] += 1
            self.plain.add(rows, time, lanes.start)

    def sealed(self, lanes: range) -> int:
        return self.plain.seal(lanes)

    def place(self, number: int) -> tuple[int, int]:
        """Lane and row of an item of the plain replay."""
        episode, step = self.plain.items[number]
        _, lane, first = self.begun[id(episode)]
        return lane, first + step

    def check(self) -> None:
        numbers = {self.place(number): number for number in range(len(self.plain.items))}
        assert len(numbers) == len(self.plain.items)
        places = self.places()
        assert len(set(places)) == len(places) <= self.case.capacity
        if not self.case.filtered:
            assert [numbers[place] for place in places] == list(range(self.expected_tail(), len(self.plain.items)))
        assert all(not self.overwritten(place) for place in places)
        if not places:
            return
        batch = self.live()
        assert isinstance(batch, Batch)
        batch.ids = np.array([numbers[place] for place in places])
        self.plain.assert_equal(batch)
        self.check_frames(batch)

    def overwritten(self, place: tuple[int, int]) -> bool:
        """Was a row that it needs overwritten?"""
        lane, row = place
        return row - self.case.spec.stack + 1 < self.heads[lane] - self.replay.store.rows

    def expected_tail(self) -> int:
        """The oldest item that must stay: an overwritten item is removed with all before it."""
        head = len(self.plain.items)
        overwritten = [number for number in range(self.tail, head) if self.overwritten(self.place(number))]
        self.tail = max(self.tail, head - self.case.capacity, *(number + 1 for number in overwritten), 0)
        return self.tail

    def check_frames(self, batch: Batch) -> None:
        """Nothing in an item comes from another lane, incarnation or episode; steps follow each other."""
        now, then = origin(batch.obs, self.case), origin(batch.next_obs, self.case)
        for frames, after in zip(now, then, strict=True):
            newest, target = (frames[-1], after[-1]) if frames.ndim == 2 else (frames, after)
            assert newest[:3].tolist() == target[:3].tolist()
            assert 1 <= target[3] - newest[3] <= self.case.n_step
            for stack in (frames, after) if frames.ndim == 2 else ():
                assert all(
                    older[3] == max(0, newer[3] - 1) and (not older.any() or older[:3].tolist() == newer[:3].tolist())
                    for older, newer in pairwise(stack)
                )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_lanes_at_different_speeds_hold_the_expected_items(case: Case) -> None:
    Steps(case).play()


class Windows(Scenario):
    """Windows beside lists of all rows of each life of each lane."""

    def __init__(self, case: Case, cut: SequenceCut) -> None:
        super().__init__(case, cut)
        self.made: list[list[list[tuple[Array, bool]]]] = [[[]] for _ in range(case.lanes)]
        self.expected: list[tuple[int, int, int]] = []  # lane, life, first row within it

    def added(self, rows: dict[str, Array], lanes: range) -> None:
        for time in range(len(rows["last"])):
            for i, lane in enumerate(lanes):
                life = self.made[lane][-1]
                life.append((rows["obs"][time, i].ravel()[:4].astype(np.int64), bool(rows["last"][time, i])))
                begin = len(life) - self.cut.window - 1
                if begin >= 0 and begin % self.cut.stride == 0:
                    self.expected.append((lane, len(self.made[lane]) - 1, begin))

    def sealed(self, lanes: range) -> int:
        marked = 0
        for lane in lanes:
            life = self.made[lane][-1]
            if life and not life[-1][1]:
                life[-1] = (life[-1][0], True)
                marked += 1
            if life:
                self.made[lane].append([])
        return marked

    def check(self) -> None:
        replay = self.replay
        assert replay.head == len(self.expected)
        assert len(replay) <= self.cut.items_in(self.case.capacity)
        if not len(replay):
            return
        batch = self.live()
        assert isinstance(batch, Sequences)
        for at, (lane, life, begin) in enumerate(self.expected[replay.tail : replay.head]):
            rows = self.made[lane][life][begin : begin + self.cut.window + 1]
            assert batch.last[:, at].tolist() == [last for _, last in rows]
            frames = origin(batch.obs[:, at], self.case)
            newest = frames[:, -1] if frames.ndim == 3 else frames
            assert newest.tolist() == [obs.tolist() for obs, _ in rows]
            assert len(set(newest[:, 1])) == 1  # one incarnation
            if frames.ndim == 3:
                assert all(not older.any() or older[3] == newer[3] - 1 for older, newer in pairwise(frames[0]))


@example(
    Case(SMALL, 2, 1, 1, 1, [0.0, 0.0], [(1, 1, "seal"), (0, 1, "restore"), (1, 1, "lose")], False, False, 0, False),
    SequenceCut(1, 0, 1, 1),
)  # a lane that was sealed before the checkpoint has nothing to be sealed after it
@settings(max_examples=80, deadline=None)
@given(cases(), st.builds(SequenceCut, st.integers(1, 3), st.integers(0, 2), st.integers(1, 4), st.integers(1, 9)))
def test_windows_at_different_speeds_hold_the_expected_items(case: Case, cut: SequenceCut) -> None:
    Windows(case, cut).play()


def test_groups_in_lockstep_queue_the_same_items_as_one_rollout() -> None:
    whole, parts = (Case(SMALL, 2, 2, 40, 3, [], [], False, False, 1).replay(StepCut(3)) for _ in range(2))
    rows = random_stream(np.random.default_rng(1), SMALL, 4, 60, end=0.2)
    for row in range(60):
        whole.add(rollout(rows, row, row + 1))
        for begin in (0, 2):
            half = {name: column[:, begin : begin + 2] for name, column in rows.items()}
            parts.add(rollout(half, row, row + 1), lanes=slice(begin, begin + 2))
    assert (whole.head, whole.tail) == (parts.head, parts.tail)
    assert np.array_equal(whole.items, parts.items)
    assert [(lanes.start, lanes.stop) for lanes, _, _ in whole.spans()] == [(0, 4)]
    assert [(lanes.start, lanes.stop) for lanes, _, _ in parts.spans()] == [(0, 2), (2, 4)]


def test_a_lost_actors_items_are_replaced_by_the_others_items() -> None:
    case = Case(SMALL, 2, 1, 40, 1, [0.0, 0.0], [], False, False, 1)
    replay, (lively, dead) = case.replay(StepCut(1)), case.actors()
    replay.add(rollout(dead.rows(10)), lanes=slice(1, 2))
    replay.seal(slice(1, 2))
    sizes = []
    for _ in range(40):
        replay.add(rollout(lively.rows(25)), lanes=slice(0, 1))
        sizes.append(len(replay))
    lanes = set((replay.items_at(np.arange(replay.tail, replay.head)) % 2).tolist())
    assert (sizes[-1], lanes) == (40, {0})  # capacity 40 in a ring of 40 rows and as many spare ones per lane


def test_a_rollout_of_another_width_is_refused() -> None:
    case = Case(SMALL, 2, 2, 40, 1, [0.0, 0.0], [], False, False, 1)
    with pytest.raises(ValueError, match="2 lanes does not fit lanes 0 to 4"):
        case.replay(StepCut(1)).add(rollout(case.actors()[0].rows(3)))


@pytest.mark.parametrize(
    "spans",
    [
        [[0, 1, 0, 5]],
        [[1, 2, 0, 5]],
        [[0, 2, 6, 5]],
        [[0, 2, 0, 99_999]],
        [[0, 1, 0, 5], [0, 2, 0, 5]],
        [],
        [[0, 3, 0, 5]],
    ],
)
def test_saved_groups_that_do_not_fit_are_refused(spans: list[list[int]]) -> None:
    case = Case(SMALL, 2, 1, 40, 1, [0.0, 0.0], [], False, False, 1)
    replay = case.replay(StepCut(1))
    saved = replay.state_dict()
    with pytest.raises(ValueError, match="spans"):
        replay.load_state_dict({**saved, "spans": spans})
