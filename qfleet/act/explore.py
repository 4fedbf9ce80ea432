"""Exploration: how actions are chosen while a run learns. Shapes: B lanes, A actions, D action dimensions.

Values are [B, A], or [B, D, A] when decoupled; chosen actions are joint, [B]. Everything that changes does so with
environment steps, so a longer run has the same beginning.
"""

import math
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from qfleet.data import Array, join_actions
from qfleet.errors import UsageError
from qfleet.plan.schema import (
    Algo,
    ConstantEpsilon,
    ExponentialEpsilon,
    LadderEpsilon,
    LinearEpsilon,
    OwnExplore,
    SoftmaxExplore,
)

ALL = slice(None)
DRAWABLE = 2**53  # one random number in [0, 1) tells no more actions apart: past it, each dimension draws its own

Schedule: TypeAlias = Callable[[int], float]
Epsilons: TypeAlias = Callable[[int], float | Array]  # one for every lane, or one each
Choose: TypeAlias = Callable[[Array], Array]  # values -> actions
# A user's own: (values, step, rng, mask) -> actions [B], or [B, D] when decoupled.
Explore: TypeAlias = Callable[[Array, int, np.random.Generator, Array | None], Array]


class Explorer(Protocol):
    """Chooses actions while a run learns; evaluation and serving are greedy."""

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """An action [B] for each lane; always the same number of random numbers is drawn."""
        ...

    def epsilon(self, step: int) -> float | None:
        """The share of random actions at this step, over all lanes; None where there is no such thing."""
        ...


def greedy(values: Array, mask: Array | None, counts: tuple[int, ...]) -> Array:  # -> [B]
    """The best allowed action."""
    if values.ndim == 3:
        joint: Array = join_actions(list(values.argmax(2).T), counts)
        return joint
    best: Array = values.argmax(1) if mask is None else np.where(mask, values, -np.inf).argmax(1)
    return best


def allowed(draw: Array, mask: Array) -> Array:  # [B] in [0, 1), [B, A] -> [B]
    """A uniformly random allowed action per lane, decided by one number each."""
    count = mask.sum(1)
    rank = np.minimum((draw * count).astype(np.int64), count - 1)
    chosen: Array = (np.cumsum(mask, 1) > rank[:, None]).argmax(1)
    return chosen


def epsilon_greedy(
    values: Array, epsilon: float | Array, rng: np.random.Generator, mask: Array | None, counts: tuple[int, ...]
) -> Array:  # -> [B]
    """The best action, or with probability epsilon any allowed one."""
    # All numbers are drawn for every lane and step, so the stream does not depend on epsilon.
    many = math.prod(counts) > DRAWABLE
    explore, *draws = rng.random((1 + len(counts) if many else 2, len(values)))
    if mask is not None:
        anything = allowed(draws[0], mask)
    elif many:
        anything = join_actions([scaled(*pair) for pair in zip(draws, counts, strict=True)], counts)
    else:
        anything = scaled(draws[0], math.prod(counts))
    action: Array = np.where(explore < epsilon, anything, greedy(values, mask, counts))
    return action


def scaled(draw: Array, count: int) -> Array:  # [B] in [0, 1) -> [B] from 0 to count - 1
    """A uniformly random whole number per lane."""
    number: Array = (draw * count).astype(np.int64)
    return number


def softmax(values: Array, temperature: float, rng: np.random.Generator, mask: Array | None) -> Array:
    """Actions drawn with probability ~ exp(value / temperature), by one number per lane (and dimension)."""
    known = values.astype(np.float64) if mask is None else np.where(mask, values, -np.inf)
    share = np.exp((known - known.max(-1, keepdims=True)) / temperature)
    below = np.cumsum(share, -1)
    # A forbidden action adds nothing to the sum, so it is never the first to pass the mark.
    mark = rng.random(values.shape[:-1]) * below[..., -1]
    chosen: Array = (below > mark[..., None]).argmax(-1)
    return chosen


def linear(start: float, end: float, steps: int) -> Schedule:
    """A straight line, then flat."""
    return lambda step: start + min(1.0, step / steps) * (end - start)


def exponential(start: float, end: float, half_life_steps: int) -> Schedule:
    """The distance to `end` halves every so many steps."""
    return lambda step: end + (start - end) * float(0.5 ** (step / half_life_steps))


def rungs(base: float, power: float, lanes: int) -> Array:  # [B]
    """base^(1 + i * power / (B - 1)) for lane i (Horgan et al. 2018, section 4.1); a single lane gets the base."""
    exponent: Array = 1.0 + power * np.arange(lanes) / max(1, lanes - 1)
    return base**exponent


def ladder(base: float, power: float, warm_steps: int, lanes: int, part: slice = ALL) -> Epsilons:
    """Every lane keeps a rung of its own, after `warm_steps` at random."""
    steady = rungs(base, power, lanes)[part]
    random = np.ones(lanes)[part]
    return lambda step: random if step < warm_steps else steady


class EpsilonGreedyExplorer:
    """The best action, or a random one with a probability that a schedule tells."""

    def __init__(self, epsilons: Epsilons, counts: tuple[int, ...]) -> None:
        self.epsilons = epsilons
        self.counts = counts

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """Two numbers per lane are drawn, or one more than dimensions where joint actions are too many for one."""
        return epsilon_greedy(values, self.epsilons(step), rng, mask, self.counts)

    def epsilon(self, step: int) -> float | None:
        """The mean over the lanes."""
        return float(np.mean(self.epsilons(step)))


class SoftmaxExplorer:
    """Better actions more often (Boltzmann exploration); a decoupled policy draws in each dimension by itself."""

    def __init__(self, temperature: Schedule, counts: tuple[int, ...]) -> None:
        self.temperature = temperature
        self.counts = counts

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """One number per lane and dimension is drawn."""
        return joined(softmax(values, self.temperature(step), rng, mask), self.counts)

    def epsilon(self, step: int) -> float | None:
        """No action is random alone."""
        return None


class OwnExplorer:
    """A user's own function, whose answers are checked."""

    def __init__(self, function: Explore, counts: tuple[int, ...]) -> None:
        self.function = function
        self.counts = counts

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """What the function answers, if it is an allowed action for every lane."""
        # Copies: what the actor goes on to use must not change under its hands.
        given = self.function(values.copy(), step, rng, None if mask is None else mask.copy())
        answer = require_actions(np.asarray(given), values.shape, self.counts)
        if mask is not None and not (fine := mask[np.arange(len(answer)), answer]).all():
            raise UsageError(
                f"the explore function chose action {answer[~fine][0]} where it is not allowed",
                "The environment's mask forbids it at this step.",
                "Choose action a in lane b only where mask[b, a] is True.",
            )
        return joined(answer, self.counts)

    def epsilon(self, step: int) -> float | None:
        """The function alone knows."""
        return None


class FixedExplorer:
    """A fake for tests: always the same actions."""

    def __init__(self, action: Array) -> None:
        self.action = action

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """These."""
        return self.action

    def epsilon(self, step: int) -> float | None:
        """Nothing is random."""
        return 0.0


def joined(choices: Array, counts: tuple[int, ...]) -> Array:  # [B] or [B, D] -> [B]
    """The joint actions of choices in each dimension."""
    if choices.ndim == 1:
        return choices
    joint: Array = join_actions(list(choices.T), counts)
    return joint


def require_actions(answer: Array, shape: tuple[int, ...], counts: tuple[int, ...]) -> Array:
    """The answer of a user's function as whole numbers, if it has an action for every lane."""
    lanes = shape[:-1]
    if answer.dtype.kind not in "iu" or answer.shape != lanes:
        raise UsageError(
            f"the explore function answered {answer.dtype} of shape {answer.shape}",
            f"It was shown values of shape {shape} and must answer whole numbers of shape {lanes}.",
            "Return an integer array with one action for each environment, such as values.argmax(-1).",
        )
    limit = np.array([math.prod(counts)] if len(lanes) == 1 else counts, object)
    if (wrong := (answer < 0) | (answer >= limit)).any():
        raise UsageError(
            f"the explore function chose action {answer[wrong][0]}",
            f"Actions are counted from 0; of values {shape} the last axis is the actions.",
            f"Return numbers from 0 to {shape[-1] - 1}.",
        )
    return answer.astype(np.int64)


def make_epsilon(algo: Algo, lanes: int = 1, part: slice = ALL) -> Epsilons:
    """The epsilon schedule that the plan names, for all lanes or an actor's `part`."""
    match algo.explore:
        case LinearEpsilon(start=start, end=end, steps=steps):
            return linear(start, end, steps)
        case ExponentialEpsilon(start=start, end=end, half_life_steps=half_life):
            return exponential(start, end, half_life)
        case ConstantEpsilon(epsilon=epsilon):
            return lambda step: epsilon
        case LadderEpsilon(base=base, power=power, warm_steps=warm_steps):
            return ladder(base, power, warm_steps, lanes, part)
        case other:
            raise ValueError(f"{type(other).__name__} has no epsilon")


def make_explorer(
    algo: Algo, counts: tuple[int, ...], lanes: int, own: Explore | None = None, part: slice = ALL
) -> Explorer:
    """The exploration that the plan names, for a policy with so many actions per dimension.

    `part` is an actor's share of all lanes.
    """
    require_own(algo, own)
    if own is not None:
        return OwnExplorer(own, counts)
    if isinstance(algo.explore, SoftmaxExplore):
        first = algo.explore.temperature
        last = algo.explore.end
        return SoftmaxExplorer(linear(first, first if last is None else last, algo.explore.steps), counts)
    return EpsilonGreedyExplorer(make_epsilon(algo, lanes, part), counts)


def require_own(algo: Algo, own: Explore | None) -> None:
    """A function is there exactly if the plan says so."""
    if isinstance(algo.explore, OwnExplore) and own is None:
        raise UsageError(
            "algo.explore.type is `own`, but no function was given",
            "A function of your own is a Python object; a plan cannot hold it.",
            "Pass it from Python, train(plan, explore=...) or resume(path, explore=...), or choose another type.",
        )
    if own is not None and not isinstance(algo.explore, OwnExplore):
        raise UsageError(
            f"an explore function was given, but algo.explore.type is {algo.explore.__struct_config__.tag}",
            "A run goes on exploring the way it began.",
            "Leave the function out, or start a new run with train(plan, explore=...).",
        )
