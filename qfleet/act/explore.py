"""Exploration: how actions are chosen during training. Shapes: B lanes, A actions, D action dimensions.

Values are [B, A], or [B, D, A] when decoupled; chosen actions are joint, [B]. Schedules depend on environment steps
only, so a longer run has the same beginning.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from qfleet.act.probabilities import epsilon_greedy_probability, softmax_probability
from qfleet.data import Array, join_actions
from qfleet.errors import UsageError
from qfleet.plan import schema
from qfleet.plan.schema import Algo

ALL = slice(None)
MAX_ACTIONS_PER_DRAW = 2**53  # a float in [0, 1) has no more values: with more actions, each dimension draws its own

StepSchedule: TypeAlias = Callable[[int], float]
Epsilons: TypeAlias = Callable[[int], float | Array]  # one value for all lanes, or one per lane
ChooseActions: TypeAlias = Callable[[Array], Array]  # values -> actions
# A user's function: (values, step, rng, mask) -> actions [B], or [B, D] when decoupled.
Explore: TypeAlias = Callable[[Array, int, np.random.Generator, Array | None], Array]


class NonFiniteValues(Exception):
    """The network has diverged: no action can be chosen by its values."""


class Explorer(Protocol):
    """Chooses actions during training; evaluation and serving are greedy."""

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """An action [B] for each lane; always draws the same number of random numbers."""

    def probability(self, action: Array, values: Array, step: int, mask: Array | None) -> Array | None:
        """The probability [B] with which `choose` takes these actions; None if it is unknown."""

    def epsilon(self, step: int) -> float | None:
        """The share of random actions at this step, over all lanes; None if there is no epsilon."""


def greedy(values: Array, mask: Array | None, counts: tuple[int, ...]) -> Array:  # -> [B]
    """The best allowed action."""
    if values.ndim == 3:
        joint: Array = join_actions(list(values.argmax(2).T), counts)
        return joint
    best: Array = values.argmax(1) if mask is None else np.where(mask, values, -np.inf).argmax(1)
    return best


def random_allowed_actions(draw: Array, mask: Array) -> Array:  # [B] in [0, 1), [B, A] -> [B]
    """A uniformly random allowed action per lane, from one random number each."""
    count = mask.sum(1)
    rank = np.minimum((draw * count).astype(np.int64), count - 1)
    chosen: Array = (np.cumsum(mask, 1) > rank[:, None]).argmax(1)
    return chosen


def epsilon_greedy(
    values: Array, epsilon: float | Array, rng: np.random.Generator, mask: Array | None, counts: tuple[int, ...]
) -> Array:  # -> [B]
    """The best action, or with probability epsilon any allowed one."""
    return best_or_random(greedy(values, mask, counts), epsilon, rng, mask, counts)


def best_or_random(
    best: Array, epsilon: float | Array, rng: np.random.Generator, mask: Array | None, counts: tuple[int, ...]
) -> Array:  # -> [B]
    """These actions [B], or with probability epsilon any allowed one."""
    # All numbers are drawn for every lane and step, so that the generator's state does not depend on epsilon.
    draw_per_dimension = math.prod(counts) > MAX_ACTIONS_PER_DRAW
    explore, *draws = rng.random((1 + len(counts) if draw_per_dimension else 2, len(best)))
    if mask is not None:
        random_action = random_allowed_actions(draws[0], mask)
    elif draw_per_dimension:
        random_action = join_actions([random_integers(*pair) for pair in zip(draws, counts, strict=True)], counts)
    else:
        random_action = random_integers(draws[0], math.prod(counts))
    action: Array = np.where(explore < epsilon, random_action, best)
    return action


def random_integers(draw: Array, count: int) -> Array:  # [B] in [0, 1) -> [B] from 0 to count - 1
    """A uniformly random integer per lane."""
    number: Array = (draw * count).astype(np.int64)
    return number


def sample_softmax(values: Array, temperature: float, rng: np.random.Generator, mask: Array | None) -> Array:
    """Actions drawn with probability ~ exp(value / temperature), from one number per lane (and dimension)."""
    allowed = values.astype(np.float64) if mask is None else np.where(mask, values, -np.inf)
    weights = np.exp((allowed - allowed.max(-1, keepdims=True)) / temperature)
    cumulative = np.cumsum(weights, -1)
    # A forbidden action has weight zero, so its sum is never the first above the threshold.
    threshold = rng.random(values.shape[:-1]) * cumulative[..., -1]
    chosen: Array = (cumulative > threshold[..., None]).argmax(-1)
    return chosen


def linear_schedule(start: float, end: float, steps: int) -> StepSchedule:
    """Linear from `start` to `end`, then constant."""
    return lambda step: start + min(1.0, step / steps) * (end - start)


def exponential_schedule(start: float, end: float, half_life_steps: int) -> StepSchedule:
    """The distance to `end` halves every `half_life_steps`."""
    return lambda step: end + (start - end) * float(0.5 ** (step / half_life_steps))


def ladder_epsilons(base: float, power: float, lanes: int) -> Array:  # [B]
    """base^(1 + i * power / (B - 1)) for lane i (Horgan et al. 2018, section 4.1); a single lane gets the base."""
    exponent: Array = 1.0 + power * np.arange(lanes) / max(1, lanes - 1)
    return base**exponent


def ladder_schedule(base: float, power: float, warm_steps: int, lanes: int, part: slice = ALL) -> Epsilons:
    """A constant epsilon per lane, after `warm_steps` of random actions."""
    steady = ladder_epsilons(base, power, lanes)[part]
    random = np.ones(lanes)[part]
    return lambda step: random if step < warm_steps else steady


@dataclass(eq=False)
class EpsilonGreedyExplorer:
    """The best action, or a random one with a scheduled probability."""

    epsilons: Epsilons
    counts: tuple[int, ...]

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """Draws two numbers per lane, or 1 + D if there are too many joint actions for one number."""
        return epsilon_greedy(values, self.epsilons(step), rng, mask, self.counts)

    def probability(self, action: Array, values: Array, step: int, mask: Array | None) -> Array | None:
        """That of the best action, and an equal share of epsilon for every allowed one."""
        best = greedy(values, mask, self.counts)
        return epsilon_greedy_probability(action, best, self.epsilons(step), mask, self.counts)

    def epsilon(self, step: int) -> float | None:
        """The mean over the lanes."""
        return float(np.mean(self.epsilons(step)))


@dataclass(eq=False)
class SoftmaxExplorer:
    """Boltzmann exploration; a decoupled policy draws in each dimension separately."""

    temperature: StepSchedule
    counts: tuple[int, ...]

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """Draws one number per lane and dimension."""
        return to_joint_actions(sample_softmax(values, self.temperature(step), rng, mask), self.counts)

    def probability(self, action: Array, values: Array, step: int, mask: Array | None) -> Array | None:
        """The product over the dimensions."""
        return softmax_probability(action, values, self.temperature(step), mask, self.counts)

    def epsilon(self, step: int) -> float | None:
        """It has no epsilon."""
        return None


def to_joint_actions(choices: Array, counts: tuple[int, ...]) -> Array:  # [B] or [B, D] -> [B]
    """Joint actions from one choice per dimension."""
    if choices.ndim == 1:
        return choices
    joint: Array = join_actions(list(choices.T), counts)
    return joint


def make_epsilon(algo: Algo, lanes: int = 1, part: slice = ALL) -> Epsilons:
    """The plan's epsilon schedule, for all lanes or an actor's `part`."""
    match algo.explore:
        case schema.LinearEpsilon(start=start, end=end, steps=steps):
            return linear_schedule(start, end, steps)
        case schema.ExponentialEpsilon(start=start, end=end, half_life_steps=half_life):
            return exponential_schedule(start, end, half_life)
        case schema.ConstantEpsilon(epsilon=epsilon):
            return lambda step: epsilon
        case schema.LadderEpsilon(base=base, power=power, warm_steps=warm_steps):
            return ladder_schedule(base, power, warm_steps, lanes, part)
        case other:
            raise ValueError(f"{type(other).__name__} has no epsilon")


def make_explorer(
    algo: Algo, counts: tuple[int, ...], lanes: int, own: Explore | None = None, part: slice = ALL
) -> Explorer:
    """The plan's exploration, for `counts` actions per dimension; `part` is an actor's share of all lanes."""
    require_own(algo, own)
    if own is not None:
        from qfleet.act.custom_explore import OwnExplorer  # most runs have none

        return OwnExplorer(own, counts)
    if isinstance(algo.explore, schema.SoftmaxExplore):
        first = algo.explore.temperature
        last = algo.explore.end
        return SoftmaxExplorer(linear_schedule(first, first if last is None else last, algo.explore.steps), counts)
    return EpsilonGreedyExplorer(make_epsilon(algo, lanes, part), counts)


def require_own(algo: Algo, own: Explore | None) -> None:
    """Refuse a missing or unexpected user's function."""
    if isinstance(algo.explore, schema.OwnExplore) and own is None:
        raise UsageError(
            "algo.explore.type is `own`, but no function was given",
            "A function of your own is a Python object; a plan cannot hold it.",
            "Pass it from Python, train(plan, explore=...) or resume(path, explore=...), or choose another type.",
        )
    if own is not None and not isinstance(algo.explore, schema.OwnExplore):
        raise UsageError(
            f"an explore function was given, but algo.explore.type is {algo.explore.__struct_config__.tag}",
            "A run explores in the same way from its start to its end.",
            "Leave the function out, or start a new run with train(plan, explore=...).",
        )
