"""The bonus for rare observations: exact counts, paid on top of clipped rewards, saved and restored."""

from typing import Any

import numpy as np
import pytest

from qfleet.data import Array, Rollout, Spec
from qfleet.learn.count_bonus import VisitCounts, make_count_bonus
from qfleet.plan.schema import Algo, CountBonus, Env, Plan
from tests.replay.streams import random_stream, rollout

PAIR = Spec((2,), "float32", (2,))
IMAGE = Spec((84, 84), "uint8", (2,), stack=4)


def counts(spec: Spec = PAIR, **more: Any) -> VisitCounts:
    return VisitCounts(spec, np.random.default_rng(0), **{"scale": 2.0, "grid": 1.0, "settle_steps": 4, **more})


def rows(obs: list[list[list[float]]], reward: float = 0.0, last: list[list[bool]] | None = None) -> Rollout:
    """Observations [T, B, 2], each with the same reward."""
    shape = np.shape(obs)[:2]
    return Rollout(
        obs=np.array(obs, np.float32),
        action=np.zeros(shape, np.int64),
        reward=np.full(shape, reward, np.float32),
        discount=np.ones(shape, np.float32),
        last=np.zeros(shape, np.bool_) if last is None else np.array(last),
        source=(0, 0, 0),
        version=1,
    )


# Mean 0 and deviation 1 in both numbers, so that a cell of the grid is a unit square.
SETTLING = [[[1.0, 1.0], [-1.0, 1.0]], [[1.0, -1.0], [-1.0, -1.0]]]


def ready_counts(**more: Any) -> VisitCounts:
    bonus = counts(**more)
    bonus.with_bonus(rows(SETTLING))
    return bonus


def test_the_bonus_is_scale_over_the_root_of_visits() -> None:
    bonus = ready_counts()
    visits = [bonus.with_bonus(rows([[[0.5, 0.5]]])).reward[0, 0] for _ in range(9)]
    assert visits == pytest.approx([2.0 / np.sqrt(n) for n in range(1, 10)])
    assert bonus.with_bonus(rows([[[0.9, 0.1]]])).reward[0, 0] == pytest.approx(2.0 / np.sqrt(10))  # the same cell
    assert bonus.with_bonus(rows([[[1.1, 0.1]]])).reward[0, 0] == pytest.approx(2.0)  # the next one


def test_lanes_with_the_same_observation_share_its_count() -> None:
    paid = ready_counts().with_bonus(rows([[[0.5, 0.5], [0.5, 0.5], [-0.5, 0.5]]])).reward
    assert paid[0].tolist() == pytest.approx([2 / np.sqrt(2), 2 / np.sqrt(2), 2.0])


def test_no_bonus_until_the_statistics_are_complete_and_fixed() -> None:
    bonus = counts()
    assert bonus.with_bonus(rows(SETTLING)).reward.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert bonus.visits == {}
    bonus.with_bonus(rows([[[50.0, 50.0], [9.0, -7.0]]]))
    assert bonus.statistics.standardize(np.array([[3.0, -2.0]])).tolist() == [[3.0, -2.0]]


def test_final_observations_have_no_count_and_no_bonus() -> None:
    bonus = ready_counts()
    paid = bonus.with_bonus(
        rows([[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]], 7.0, [[False, True], [True, True]])
    )
    assert paid.reward.tolist() == [[9.0, 7.0], [7.0, 7.0]]
    assert list(bonus.visits.values()) == [1]


def test_rewards_are_clipped_before_the_bonus_is_added_to_a_copy() -> None:
    given = rows([[[0.5, 0.5]]], reward=-30.0)
    assert ready_counts(clip=True).with_bonus(given).reward.tolist() == [[1.0]]
    assert ready_counts(clip=False).with_bonus(given).reward.tolist() == [[-28.0]]
    assert given.reward.tolist() == [[-30.0]]


def test_hyperplanes_separate_directions_and_follow_from_the_seed() -> None:
    near, far = np.array([[1.0, 0.0], [1.0, 0.001]]), np.array([[1.0, 0.0], [-1.0, 0.0]])
    bonus = ready_counts(grid=None, bits=16)
    assert len(set(bonus.keys(near).tolist())) == 1
    assert len(set(bonus.keys(far).tolist())) == 2
    assert bonus.keys(far).sum() == 2**16 - 1  # opposite sides of every plane
    assert bonus.keys(near).tolist() == ready_counts(grid=None, bits=16).keys(near).tolist()
    other = VisitCounts(PAIR, np.random.default_rng(1), scale=1.0, bits=16)
    assert other.keys(near).tolist() != bonus.keys(near).tolist()


def test_cells_of_a_grid_do_not_share_keys() -> None:
    spec = Spec((3,), "float32", (2,))
    bonus = VisitCounts(spec, np.random.default_rng(0), scale=1.0, grid=0.5)
    cells = np.stack(np.meshgrid(*[np.arange(-20, 20)] * 3), -1).reshape(-1, 3)
    assert len(np.unique(bonus.keys(0.5 * cells + 0.25))) == len(cells)


def test_images_are_shrunk_to_the_means_of_blocks() -> None:
    bonus = counts(IMAGE, grid=None)
    picture = np.random.default_rng(0).integers(0, 256, (3, 84, 84)).astype(np.uint8)
    flat = bonus.statistics.flatten(picture)
    assert flat.shape == (3, 64)
    assert flat[1, 0] == pytest.approx(picture[1, :10, :10].mean() / 255)
    assert flat[2, 63] == pytest.approx(picture[2, 73:, 73:].mean() / 255)
    small = Spec((4, 10, 10), "uint8", (2,))
    assert counts(small).statistics.flatten(np.zeros((2, *small.obs), np.uint8)).shape == (2, 400)


def test_a_constant_number_gives_a_finite_bonus() -> None:
    bonus = counts(settle_steps=2)
    bonus.with_bonus(rows([[[3.0, 1.0], [3.0, 2.0]]]))
    assert np.isfinite(bonus.with_bonus(rows([[[3.0, 1.0], [4.0, 2.0]]])).reward).all()
    assert len(bonus.visits) == 2


def stream(seed: int, num: int, lanes: int = 3) -> dict[str, Array]:
    made = random_stream(np.random.default_rng(seed), PAIR, lanes, num, end=0.2)
    return {**made, "obs": made["obs"].round(1)}


@pytest.mark.parametrize("grid", [None, 0.5])
@pytest.mark.parametrize("half", [1, 20])  # before and after the statistics are complete
def test_a_restored_bonus_is_the_same(grid: float | None, half: int) -> None:
    whole, bonus, again = (counts(grid=grid, settle_steps=10) for _ in range(3))
    made = stream(1, 60)
    expected = whole.with_bonus(rollout(made)).reward
    first = bonus.with_bonus(rollout(made, 0, half)).reward
    again.load_state_dict(bonus.state_dict())
    paid = np.concatenate([first, again.with_bonus(rollout(made, half)).reward])
    assert paid.tobytes() == expected.tobytes()
    assert again.visits == whole.visits
    assert again.take_metrics() == whole.take_metrics()


def test_metrics_are_the_mean_since_the_last_call_and_the_count_so_far() -> None:
    bonus = ready_counts()
    assert bonus.take_metrics() == {"bonus_mean": 0.0, "states_seen": 0}
    bonus.with_bonus(rows([[[0.5, 0.5], [-0.5, 0.5]]]))
    bonus.with_bonus(rows([[[0.5, 0.5], [-0.5, 0.5]]]))
    assert bonus.take_metrics() == pytest.approx({"bonus_mean": (2 + 2 / np.sqrt(2)) / 2, "states_seen": 2})
    assert bonus.take_metrics() == {"bonus_mean": 0.0, "states_seen": 2}


def test_saved_state_of_another_shape_is_refused() -> None:
    bonus = ready_counts()
    bonus.with_bonus(rows([[[0.5, 0.5]]]))
    saved = bonus.state_dict()
    for name, wrong in (("visits", np.zeros(1, np.int64)), ("sum", np.zeros(3)), ("keys", np.zeros(2, np.int64))):
        with pytest.raises(ValueError, match="expected"):
            counts().load_state_dict({**saved, name: wrong})


def test_the_plan_decides() -> None:
    rng = np.random.default_rng(0)
    assert make_count_bonus(Plan(env=Env(id="x")), PAIR, rng) is None
    algo = Algo(bonus=CountBonus(scale=0.3, bits=8, grid=0.25, settle_steps=5))
    made = make_count_bonus(Plan(env=Env(id="x", clip_reward=True), algo=algo), PAIR, rng)
    assert made is not None
    assert (made.scale, made.grid, made.clip, made.statistics.settle_steps) == (0.3, 0.25, True, 5)
    assert made.planes.shape == (2, 8)
