"""Hand-computed numbers of each estimate, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from qfleet.data import Array
from qfleet.datasets.estimates import (
    FittedQSettings,
    ValuedEpisode,
    agreement,
    calibration,
    epsilon_greedy_probabilities,
    fitted_q_estimate,
    importance_estimate,
    is_fitted,
    ratio_estimate,
    resample_counts,
    td_errors,
)
from qfleet.datasets.estimates.agreement import macro_mean
from qfleet.datasets.estimates.fitted_q import ROWS_PER_BLOCK, feature_scale
from qfleet.datasets.estimates.importance import effective_size, parts_of_estimate, weight_table, weighted_returns


def episode(
    number: int = 0,
    action: tuple[int, ...] = (0, 1),
    reward: tuple[float, ...] = (1.0, 2.0),
    values: tuple[tuple[float, float], ...] = ((1.0, 0.0), (0.0, 4.0), (8.0, 2.0)),
    target: Array | None = None,
    probability: tuple[float, ...] | None = (0.5, 0.5),
    terminated: bool = True,
) -> ValuedEpisode:
    table = np.array(values)
    return ValuedEpisode(
        id=f"e{number}",
        obs=np.arange(len(table), dtype=np.float32)[:, None],
        action=np.array(action),
        reward=np.array(reward),
        terminated=terminated,
        values=table,
        target=epsilon_greedy_probabilities(table, 0.2) if target is None else target,
        probability=None if probability is None else np.array(probability),
    )


def test_returns_are_discounted_sums() -> None:
    assert episode(reward=(1.0, 2.0)).returns(0.5).tolist() == [2.0, 2.0]


def test_epsilon_is_shared_by_the_allowed_actions() -> None:
    values = np.array([[1.0, 2.0, -np.inf], [3.0, 2.0, 1.0]])
    found = epsilon_greedy_probabilities(values, 0.3)
    assert found[0] == pytest.approx([0.15, 0.85, 0.0])
    assert found[1] == pytest.approx([0.8, 0.1, 0.1])


def test_td_errors_bootstrap_unless_the_episode_terminated() -> None:
    # t=0: 1 + 0.5 * 4 - 1 = 2; t=1: 2 - 4 = -2, or with truncation 2 + 0.5 * 8 - 4 = 2
    found = td_errors([episode(at, terminated=True) for at in range(20)], 0.5, 0)
    assert found["td_error"].value == pytest.approx(2.0)
    assert found["td_loss"].value == pytest.approx(1.5)
    higher = tuple((0.0, 8.0) for _ in range(3))
    cut = td_errors([episode(at, values=higher, action=(1, 1), terminated=False) for at in range(20)], 0.5, 0)
    assert cut["td_error"].value == pytest.approx((abs(1 + 4 - 8) + abs(2 + 4 - 8)) / 2)


def test_accuracy_and_macro_means() -> None:
    # greedy: 0, 1; recorded: 0, 0 in half of the episodes, 0, 1 in the others
    episodes = [episode(at, action=(0, at % 2)) for at in range(40)]
    found = agreement(episodes, 0)
    assert found["accuracy"].value == pytest.approx(0.75)
    assert found["precision"].value == pytest.approx((1.0 + 0.5) / 2)
    assert found["recall"].value == pytest.approx((40 / 60 + 1.0) / 2)
    assert found["accuracy"].low is not None
    assert found["accuracy"].low < 0.75


def test_an_action_that_is_only_recorded_counts_as_zero_precision() -> None:
    hits = np.array([[2.0, 0.0, 0.0]])
    chosen = np.array([[4.0, 0.0, 0.0]])
    seen = np.array([[6.0, 3.0, 0.0]])
    assert macro_mean(hits, chosen, seen).tolist() == [0.25]


def test_calibration_compares_values_with_returns() -> None:
    episodes = [episode(at) for at in range(20)]  # values of recorded actions 1 and 4, returns 1 + 0.5 * 2 = 2 and 2
    found = calibration(episodes, 0.5, 0)
    assert [(row["value"], row["return"], row["steps"]) for row in found["groups"]] == [(1.0, 2.0, 20), (4.0, 2.0, 20)]
    assert found["error"]["value"] == pytest.approx(1.5)
    assert found["error"]["support"]["bias"] == pytest.approx(0.5)


def test_calibration_leaves_out_steps_whose_return_was_cut_off() -> None:
    found = calibration([episode(at, terminated=False) for at in range(20)], 0.5, 0)
    assert found["groups"] == []
    assert "it needs 20 episodes with steps whose return is known" in found["error"]["refused"]
    shorter_memory = calibration([episode(at, terminated=False) for at in range(20)], 0.1, 0)
    assert sum(row["steps"] for row in shorter_memory["groups"]) == 20  # 0.1^2 is at most 1 %, 0.1^1 is not


def test_weights_are_products_of_ratios_and_stay_after_the_end() -> None:
    sure = np.array([[0.8, 0.2], [0.4, 0.6], [0.5, 0.5]])
    long = episode(0, target=sure)  # ratios 1.6, 1.2
    short = episode(1, action=(1,), reward=(3.0,), values=((1.0, 0.0), (0.0, 1.0)), target=sure[:2], probability=(0.5,))
    weights = weight_table([long, short])  # short: 0.4
    assert weights[:, 0] == pytest.approx([1.0, 0.4 / 1.6])
    assert weights[:, 1] == pytest.approx([1.0, 0.4 / 1.92])
    rewards = np.array([[1.0, 2.0], [3.0, 0.0]])
    first = (1.6 * 1 + 0.4 * 3) / 2.0
    second = 0.5 * (1.92 * 2) / (1.92 + 0.4)
    assert weighted_returns(weights, rewards, 0.5, np.ones((1, 2)))[0] == pytest.approx(first + second)


def test_the_effective_size_is_that_of_equal_weights() -> None:
    assert effective_size(np.array([2.0, 2.0, 2.0, 2.0])) == (4.0, 0.25)
    size, share = effective_size(np.array([3.0, 1.0]))
    assert (size, share) == (pytest.approx(1.6), 0.75)
    assert effective_size(np.zeros(3)) == (0.0, 1.0)


def test_importance_of_the_recorded_policy_is_the_mean_return() -> None:
    half = np.full((3, 2), 0.5)
    episodes = [episode(at, target=half, reward=(float(at), 1.0)) for at in range(30)]
    found = importance_estimate(episodes, 0.5, 0)
    assert found.value == pytest.approx(np.mean([at + 0.5 for at in range(30)]))
    assert found.support["effective_episodes"] == pytest.approx(30.0)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


def test_importance_is_refused_without_support() -> None:
    assert "20 episodes, and there are 3" in importance_estimate([episode(at) for at in range(3)], 0.5, 0).refused
    unknown = [episode(at, probability=None) for at in range(30)]
    assert "does not have the probabilities" in importance_estimate(unknown, 0.5, 0).refused
    never = [episode(at, action=(1, 0), target=np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])) for at in range(30)]
    assert importance_estimate(never, 0.5, 0).refused.startswith("0.0 episodes are effective")
    rare = [replace(each, action=np.array([0, 1])) if each.id == "e0" else each for each in never]
    found = importance_estimate(rare, 0.5, 0)
    assert found.value is None
    assert found.support["effective_episodes"] == pytest.approx(1.0)


def test_importance_is_refused_if_few_episodes_make_the_value() -> None:
    half = np.full((3, 2), 0.5)
    rare = [episode(at, target=half, reward=(0.0, float(at < 19))) for at in range(400)]
    found = importance_estimate(rare, 0.5, 0)
    assert found.support["effective_episodes"] == pytest.approx(400.0)
    assert found.support["effective_parts"] == pytest.approx(19.0)
    assert "its value is that of 19.0 effective episodes, and it needs 20" in found.refused
    enough = [episode(at, target=half, reward=(0.0, float(at < 20))) for at in range(400)]
    assert importance_estimate(enough, 0.5, 0).value == pytest.approx(0.5 * 20 / 400)


def test_importance_is_refused_if_weights_are_not_1_on_average() -> None:
    # The policy nearly always takes 0 first, and that was never recorded, although its probability was 0.5.
    sure = np.array([[0.9, 0.1], [0.5, 0.5], [0.5, 0.5]])
    found = importance_estimate([episode(at, action=(1, 0), target=sure) for at in range(100)], 0.5, 0)
    assert found.support["effective_episodes"] == pytest.approx(100.0)
    assert found.support["mean_weight_high"] == pytest.approx(0.2)
    assert found.refused.startswith("the mean weight is 0.2 to 0.2")
    both = [episode(at, action=(at % 2, 0), target=sure) for at in range(100)]
    assert importance_estimate(both, 0.5, 0).value == pytest.approx(2.0)


def test_features_are_scaled_by_all_rows_though_they_are_added_up_in_blocks() -> None:
    rows = np.random.default_rng(0).integers(0, 255, (2 * ROWS_PER_BLOCK + 5, 3)).astype(np.uint8)
    mean, deviation = feature_scale(rows)
    assert mean == pytest.approx(rows.mean(0))
    assert deviation == pytest.approx(rows.std(0))


def test_parts_add_up_to_the_estimate() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((7, 5))
    rewards = rng.normal(size=(7, 5))
    parts = parts_of_estimate(weights, rewards, 0.9)
    assert parts.sum() == pytest.approx(weighted_returns(weights, rewards, 0.9, np.ones((1, 7)))[0])


def test_a_fit_finds_the_value_of_the_target_policy_and_not_that_of_the_recorded_one() -> None:
    # One state, two actions with rewards 0 and 1, T = 2 steps: the policy that always takes 1 has 1 + 0.5 = 1.5.
    rng = np.random.default_rng(0)
    always = np.tile([0.0, 1.0], (3, 1))
    episodes = []
    for at in range(200):
        actions = rng.integers(0, 2, 2)
        rewards = tuple(float(each) for each in actions)
        episodes.append(episode(at, action=tuple(actions.tolist()), reward=rewards, target=always))
    settings = FittedQSettings(gamma=0.5, num_seeds=2, updates=600, batch_size=64, sizes=(16,), learning_rate=1e-2)
    found = fitted_q_estimate(episodes, settings)
    assert found.value == pytest.approx(1.5, abs=0.05)
    assert found.support["coverage"] == pytest.approx(0.5, abs=0.1)
    assert fitted_q_estimate(episodes, settings) == found


def test_a_fit_is_refused_without_support() -> None:
    settings = FittedQSettings(gamma=0.5, num_seeds=1, updates=1)
    assert "20 episodes to fit on" in fitted_q_estimate([episode(at) for at in range(10)], settings).refused
    never = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    found = fitted_q_estimate([episode(at, target=never) for at in range(100)], settings)
    assert "0.0% of what was recorded" in found.refused


def test_half_of_the_episodes_are_fitted_on() -> None:
    chosen = [is_fitted(f"e{at}", 0) for at in range(1_000)]
    assert 450 < sum(chosen) < 550
    assert chosen != [is_fitted(f"e{at}", 1) for at in range(1_000)]


def test_an_interval_is_over_episodes_and_depends_on_the_seed_alone() -> None:
    assert resample_counts(5, 0).sum(1).tolist() == [5.0] * 1_000
    top = np.arange(40.0)
    found = ratio_estimate(top, np.ones(40), 3)
    assert found == ratio_estimate(top, np.ones(40), 3)
    assert found.value == 19.5
    assert found.low is not None
    assert 15.0 < found.low < 17.0  # 19.5 - 1.96 * 11.5 / sqrt(40)
