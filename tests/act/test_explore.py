"""Exploration: ladders, softmax and users' functions, each within the mask and with a fixed use of random numbers."""

from typing import Any

import numpy as np
import pytest

from qfleet.act import Actor, make_explorer
from qfleet.act.custom_explore import OwnExplorer
from qfleet.act.explore import (
    EpsilonGreedyExplorer,
    Explorer,
    SoftmaxExplorer,
    epsilon_greedy,
    ladder_epsilons,
    sample_softmax,
)
from qfleet.data import Array, split_actions
from qfleet.errors import UsageError
from qfleet.plan.schema import Algo, ConstantEpsilon, LadderEpsilon, LinearEpsilon, OwnExplore, SoftmaxExplore
from tests.act.test_actor import counting, policy

CHI_SQUARE_3 = 16.27  # 99.9 % quantile for 3 degrees of freedom


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def explorer(explore: Any, lanes: int = 4, counts: tuple[int, ...] = (4,)) -> Explorer:
    return make_explorer(Algo(explore=explore), counts, lanes)


# The ladder


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        (1, [0.4]),
        (4, [0.4, 0.04716, 0.00556, 0.00066]),
        (8, [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.0041, 0.00164, 0.00066]),
    ],
)
def test_the_ladder_has_the_published_epsilons(lanes: int, expected: list[float]) -> None:
    assert ladder_epsilons(0.4, 7.0, lanes) == pytest.approx(expected, abs=5e-6)


def test_every_lane_explores_by_its_own_epsilon() -> None:
    values = np.tile(np.array([0, 3, 1, 2], np.float32), (3, 1))
    chosen = explorer(LadderEpsilon(base=0.8, power=3.0), lanes=3)
    generator = rng()
    random = np.mean([chosen.choose(values, 0, generator, None) != 1 for _ in range(8_000)], 0)
    assert random == pytest.approx(0.75 * np.array([0.8, 0.8**2.5, 0.8**4]), abs=0.02)


def test_a_ladder_begins_at_random_and_reports_the_mean() -> None:
    chosen = explorer(LadderEpsilon(warm_steps=100))
    steady = float(np.mean(ladder_epsilons(0.4, 7.0, 4)))
    assert [chosen.epsilon(step) for step in (0, 99, 100, 10**9)] == pytest.approx([1.0, 1.0, steady, steady])
    values = np.tile(np.array([0, 3, 1, 2], np.float32), (4, 1))
    taken = np.concatenate([chosen.choose(values, 99, generator, None) for generator in [rng()] for _ in range(1_000)])
    counts = np.bincount(taken, minlength=4)
    assert ((counts - 1_000) ** 2 / 1_000).sum() < CHI_SQUARE_3


# More joint actions than one random number can tell apart


def test_every_choice_occurs_among_very_many_joint_actions() -> None:
    counts = (4,) * 30  # 2^60 joint actions
    values = np.zeros((2_000, 30, 4), np.float32)
    chosen = np.stack(split_actions(epsilon_greedy(values, 1.0, rng(), None, counts), counts), 1)  # [B, D]
    for dimension in range(30):
        found = np.bincount(chosen[:, dimension], minlength=4)
        assert ((found - 500) ** 2 / 500).sum() < CHI_SQUARE_3 + 8, dimension  # one of thirty may be farther out
    assert abs(np.corrcoef(chosen[:, -1], chosen[:, -2])[0, 1]) < 0.1


def test_very_many_joint_actions_draw_the_same_numbers_for_any_epsilon() -> None:
    counts, values, generators = (4,) * 30, np.zeros((3, 30, 4), np.float32), [rng(), rng()]
    for generator, epsilon in zip(generators, (0.0, 1.0), strict=True):
        epsilon_greedy(values, epsilon, generator, None, counts)
    assert generators[0].random() == generators[1].random()


@pytest.mark.parametrize("counts", [(5,), (3, 4), (2,) * 53], ids=["one", "two", "most"])
def test_fewer_joint_actions_draw_one_number(counts: tuple[int, ...]) -> None:
    values = np.zeros((64, len(counts), max(counts)), np.float32)
    explore, draw = rng(3).random((2, 64))
    found = epsilon_greedy(values, 0.5, rng(3), None, counts)
    expected = [int(number * np.prod(counts, dtype=object)) for number in draw.tolist()]
    assert found.tolist() == [number if first < 0.5 else 0 for first, number in zip(explore, expected, strict=True)]


# The policy and the actor use the same function


def test_policy_and_explorer_use_the_same_epsilon_greedy() -> None:
    obs = rng(1).normal(size=(50, 3)).astype(np.float32)
    tested = policy()
    action, _, values = tested.act(obs, epsilon=0.4, rng=rng(2))
    assert action.tolist() == EpsilonGreedyExplorer(lambda step: 0.4, (3,)).choose(values, 0, rng(2), None).tolist()


def test_drawn_numbers_are_unchanged() -> None:
    values = rng(1).normal(size=(6, 4)).astype(np.float32)
    explore, draw = rng(3).random((2, 6))
    expected = np.where(explore < 0.5, (draw * 4).astype(np.int64), values.argmax(1))
    assert epsilon_greedy(values, 0.5, rng(3), None, (4,)).tolist() == expected.tolist()


class FixedExplorer:
    """Always the same actions."""

    def __init__(self, action: Array) -> None:
        self.action = action

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        return self.action

    def epsilon(self, step: int) -> float | None:
        return 0.0


def test_the_actor_takes_what_its_explorer_chooses() -> None:
    world = counting(2)
    actor = Actor(world, policy(), FixedExplorer(np.array([2, 1])), rng())
    actor.start()
    actor.send()
    assert actor.receive()[0].action.tolist() == [[2, 1]]


def test_the_explorer_gets_the_actors_steps_and_generator() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []

    def choose(values: Array, step: int, generator: np.random.Generator, mask: Array | None) -> Array:
        assert generator is actor.rng
        assert mask is None
        seen.append((step, values.shape))
        return np.zeros(2, np.int64)

    actor = Actor(counting(2), policy(), OwnExplorer(choose, (3,)), rng())
    actor.start()
    for _ in range(3):
        actor.send()
        actor.receive()
    assert seen == [(0, (2, 3)), (2, (2, 3)), (4, (2, 3))]


# Softmax


def test_softmax_draws_by_the_exponential_of_values() -> None:
    values = np.tile(np.array([0.0, 1.0, 2.0, 0.5], np.float32), (40_000, 1))
    counts = np.bincount(sample_softmax(values, 0.5, rng(), None), minlength=4)
    share = np.exp(values[0].astype(np.float64) / 0.5)
    expected = 40_000 * share / share.sum()
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_3


@pytest.mark.parametrize("temperature", [1e-6, 0.1, 1e6])
def test_softmax_stays_within_the_mask_for_any_values(temperature: float) -> None:
    generator = np.random.default_rng(3)
    mask = generator.random((5_000, 4)) < 0.4
    mask[np.arange(5_000), generator.integers(0, 4, 5_000)] = True
    values = (1e4 * generator.normal(size=(5_000, 4))).astype(np.float32)
    action = sample_softmax(values, temperature, rng(), mask)
    assert mask[np.arange(5_000), action].all()
    if temperature < 1:
        assert (action == np.where(mask, values, -np.inf).argmax(1)).mean() > 0.99


def test_the_temperature_falls_linearly_and_a_low_one_is_greedy() -> None:
    cooling = explorer(SoftmaxExplore(temperature=2.0, end=0.5, steps=100))
    constant = explorer(SoftmaxExplore(temperature=2.0))
    assert isinstance(cooling, SoftmaxExplorer)
    assert isinstance(constant, SoftmaxExplorer)
    assert [cooling.temperature(step) for step in (0, 50, 100, 10**9)] == [2.0, 1.25, 0.5, 0.5]
    assert [constant.temperature(step) for step in (0, 10**9)] == [2.0, 2.0]
    assert cooling.epsilon(0) is None


def test_softmax_draws_in_each_dimension_separately() -> None:
    values = np.zeros((20_000, 2, 3), np.float32)
    values[:, 0] = [0, 5, 0]
    values[:, 1] = [5, 0, 5]
    action = explorer(SoftmaxExplore(temperature=1.0), counts=(3, 3)).choose(values, 0, rng(), None)
    first, second = split_actions(action, (3, 3))
    likely = np.exp(5.0)
    assert np.mean(first == 1) == pytest.approx(likely / (likely + 2), abs=0.01)
    assert np.mean(second != 1) == pytest.approx(2 * likely / (2 * likely + 1), abs=0.01)
    assert np.mean(second[first == 1] == 0) == pytest.approx(np.mean(second == 0), abs=0.02)


def test_softmax_draws_one_number_per_lane_and_dimension() -> None:
    for shape in ((6, 4), (6, 2, 4)):
        generator, expected = rng(), rng()
        sample_softmax(np.zeros(shape, np.float32), 1.0, generator, None)
        expected.random(shape[:-1])
        assert generator.random() == expected.random()


# A user's function


def own(actions: Any, mask: Array | None = None, shape: tuple[int, ...] = (2, 3)) -> list[int]:
    counts = (3,) if len(shape) == 2 else (3,) * shape[1]
    chosen = make_explorer(Algo(explore=OwnExplore()), counts, 2, lambda *_: actions)
    return list(chosen.choose(np.zeros(shape, np.float32), 0, rng(), mask).tolist())


def test_a_users_function_chooses_the_actions() -> None:
    assert own(np.array([2, 0])) == [2, 0]
    assert own([1, 1]) == [1, 1]
    assert own(np.array([2, 0], np.uint8), np.eye(3, dtype=np.bool_)[[2, 0]]) == [2, 0]
    assert own(np.array([[2, 0], [0, 1]]), shape=(2, 2, 3)) == [6, 1]


@pytest.mark.parametrize(
    ("actions", "mask", "what", "why"),
    [
        (np.zeros(3, np.int64), None, "returned int64 of shape (3,)", "must return whole numbers of shape (2,)"),
        (1, None, "returned int64 of shape ()", "must return whole numbers of shape (2,)"),
        (np.zeros(2), None, "returned float64 of shape (2,)", "must return whole numbers"),
        (np.zeros(2, np.bool_), None, "returned bool of shape (2,)", "must return whole numbers"),
        (None, None, "returned object of shape ()", "must return whole numbers"),
        (np.array([0, 3]), None, "chose action 3", "Actions are counted from 0"),
        (np.array([-1, 0]), None, "chose action -1", "Actions are counted from 0"),
        (np.array([0, 1]), np.eye(3, dtype=np.bool_)[[0, 0]], "chose action 1 where it is not allowed", "mask forbids"),
    ],
)
def test_a_users_functions_actions_are_checked(actions: Any, mask: Array | None, what: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        own(actions, mask)
    assert what in caught.value.what
    assert why in caught.value.why
    assert caught.value.fix


def test_a_users_function_cannot_change_the_actors_arrays() -> None:
    def spoil(values: Array, step: int, generator: np.random.Generator, mask: Array | None) -> Array:
        assert mask is not None
        values[:] = np.nan
        mask[:] = False
        return np.array([1, 1])

    values, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), np.bool_)
    assert OwnExplorer(spoil, (3,)).choose(values, 0, rng(), mask).tolist() == [1, 1]
    assert not values.any()
    assert mask.all()


def test_a_missing_or_unexpected_function_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        explorer(OwnExplore())
    assert caught.value.what == "algo.explore.type is `own`, but no function was given"
    with pytest.raises(UsageError) as caught:
        make_explorer(Algo(explore=LinearEpsilon()), (4,), 4, lambda *_: np.zeros(4, np.int64))
    assert caught.value.what == "an explore function was given, but algo.explore.type is linear"


def test_schedules_report_their_epsilon() -> None:
    assert explorer(ConstantEpsilon(epsilon=0.25)).epsilon(7) == 0.25
    assert explorer(LinearEpsilon(start=1.0, end=0.0, steps=10)).epsilon(5) == 0.5


# Probabilities of what was chosen


@pytest.mark.parametrize(("masked", "decoupled"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    "explore",
    [
        ConstantEpsilon(epsilon=0.4),
        LadderEpsilon(base=0.4, power=2.0),
        LadderEpsilon(base=0.4, power=7.0, warm_steps=10),
        LinearEpsilon(start=0.9, end=0.3, steps=20),
        SoftmaxExplore(temperature=0.7),
    ],
    ids=["constant", "ladder", "warm ladder", "linear", "softmax"],
)
def test_probabilities_are_the_shares_of_the_actions(explore: Any, masked: bool, decoupled: bool) -> None:
    """All actions of a lane have the probability 1 together, and each is chosen as often as it says."""
    counts = (2, 3) if decoupled else (6,)
    one = np.array([[0.0, 1.0, -np.inf], [0.5, 0.2, 1.1]]) if decoupled else np.array([0.0, 1.5, 1.0, -2.0, 0.3, 1.4])
    values = np.tile(one, (3, *[1] * one.ndim)).astype(np.float32)
    mask = np.tile(np.array([True, False, True, True, False, True]), (3, 1)) if masked else None
    found = explorer(explore, lanes=3, counts=counts)
    generator = rng()
    draws = np.array([found.choose(values, 7, generator, mask) for _ in range(8_000)])
    total = np.zeros(3)
    for action in range(6):
        if masked and mask is not None and not mask[0, action]:
            assert (draws != action).all()
            continue
        probability = found.probability(np.full(3, action), values, 7, mask)
        assert probability is not None
        assert (draws == action).mean(0) == pytest.approx(probability, abs=0.02)
        total += probability
    assert total == pytest.approx(1.0)


def test_the_probabilities_of_a_users_function_are_unknown() -> None:
    own = OwnExplorer(lambda values, step, generator, mask: values.argmax(1), (4,))
    assert own.probability(np.zeros(2, np.int64), np.zeros((2, 4)), 0, None) is None
