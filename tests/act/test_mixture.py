"""Several policies in one world: their shares of episodes and of steps, and the probabilities of their actions."""

from typing import Any

import numpy as np
import pytest

from qfleet.act.mixture import Mixture, PlayedPolicy
from qfleet.data import Array, Spec


class Fixed:
    """A policy whose values are always the same."""

    net: Any = None

    def __init__(self, values: list[float]) -> None:
        self.values = np.array(values, np.float32)
        self.rows: list[int] = []

    def set_noisy(self, noisy: bool) -> None:
        assert not noisy

    def forward(self, obs: Array, state: Array | None = None) -> tuple[Array, Array | None]:
        self.rows.append(len(obs))
        return np.tile(self.values, (len(obs), 1)), None


def mixture(*parts: tuple[float, float, list[float] | None], lanes: int = 6, **options: Any) -> Mixture:
    """Of (share, epsilon, values)."""
    played = [
        PlayedPolicy(str(number), epsilon, None if values is None else Fixed(values), share)  # type: ignore[arg-type]
        for number, (share, epsilon, values) in enumerate(parts)
    ]
    return Mixture(played, Spec((2,), "float32", (3,)), lanes, total_lanes=lanes, **options)


def test_shares_of_episodes() -> None:
    """Of the first N episodes of all lanes every policy has its share, to within one."""
    found = mixture((0.5, 0, [1, 0, 0]), (0.3, 0, [0, 1, 0]), (0.2, 1, None))
    played = []
    for _ in range(50):
        found.begin_episodes(np.ones(6, np.bool_))
        played += found.playing.tolist()
    for num in (1, 7, 100, 300):
        counts = np.bincount(played[:num], minlength=3)
        assert (abs(counts - num * np.array([0.5, 0.3, 0.2])) <= 1).all()


def test_an_actor_of_several_plays_its_part_of_the_same_order() -> None:
    parts: Any = ((2.0, 0.0, [1, 0, 0]), (1.0, 1.0, None))
    whole = mixture(*parts)
    halves = [Mixture(whole.parts, whole.spec, 3, first_lane=first, total_lanes=6) for first in (0, 3)]
    for _ in range(5):
        for each in (whole, *halves):
            each.begin_episodes(np.ones(each.num_lanes, np.bool_))
        np.testing.assert_array_equal(whole.playing, np.concatenate([half.playing for half in halves]))


def test_shares_of_steps_whatever_the_lengths_of_episodes() -> None:
    """Policy 0 ends its episodes after 2 steps, policy 1 after 50: both have half of the steps."""
    found = mixture((1.0, 0, [1, 0, 0]), (1.0, 1, None), by_steps=True)
    found.begin_episodes(np.ones(6, np.bool_))
    assert set(found.playing.tolist()) == {0, 1}
    age = np.zeros(6, np.int64)
    for _ in range(2_000):
        found.count_steps(np.ones(6, np.bool_))
        age += 1
        over = age >= np.where(found.playing == 0, 2, 50)
        age[over] = 0
        found.begin_episodes(over)
    assert found.steps / found.steps.sum() == pytest.approx([0.5, 0.5], abs=0.02)


@pytest.mark.parametrize("masked", [False, True])
def test_lanes_act_by_their_own_policies_with_known_probabilities(masked: bool) -> None:
    lanes = 600
    found = mixture((1, 0.3, [0, 1, 2]), (1, 0.0, [3, 1, 2]), (1, 1.0, None), lanes=lanes)
    found.begin_episodes(np.ones(lanes, np.bool_))
    mask = np.tile(np.array([True, True, False]), (lanes, 1)) if masked else None
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(40):
        action, _, _ = found.select_actions(
            np.zeros((lanes, 2), np.float32), None, lambda values: found.choose(values, 0, rng, mask), noisy=True
        )
        draws.append(action)
        probability = found.probability(action, np.zeros(0), 0, mask)
        assert probability is not None
        for number in range(3):
            for chosen in range(3):
                these = (found.playing == number) & (action == chosen)
                assert len(set(probability[these].tolist())) <= 1
    num = 2 if masked else 3
    best = {0: 1 if masked else 2, 1: 0}
    for number, epsilon in ((0, 0.3), (1, 0.0)):
        share = (np.array(draws)[:, found.playing == number] == best[number]).mean()
        assert share == pytest.approx(1 - epsilon + epsilon / num, abs=0.02)
    assert (np.array(draws)[:, found.playing == 2] == 0).mean() == pytest.approx(1 / num, abs=0.02)
    assert [part.policy.rows[0] for part in found.parts if part.policy] == [200, 200]  # type: ignore[attr-defined]
