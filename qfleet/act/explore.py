"""Exploration schedules: epsilon as a function of environment steps, so a longer run has the same beginning."""

from collections.abc import Callable
from typing import TypeAlias

from qfleet.plan.schema import Algo, ConstantEpsilon, ExponentialEpsilon, LinearEpsilon

Schedule: TypeAlias = Callable[[int], float]


def linear(start: float, end: float, steps: int) -> Schedule:
    """A straight line, then flat."""
    return lambda step: start + min(1.0, step / steps) * (end - start)


def exponential(start: float, end: float, half_life_steps: int) -> Schedule:
    """The distance to `end` halves every so many steps."""
    return lambda step: end + (start - end) * float(0.5 ** (step / half_life_steps))


def make_epsilon(algo: Algo) -> Schedule:
    """The schedule the plan names."""
    match algo.explore:
        case LinearEpsilon(start=start, end=end, steps=steps):
            return linear(start, end, steps)
        case ExponentialEpsilon(start=start, end=end, half_life_steps=half_life):
            return exponential(start, end, half_life)
        case ConstantEpsilon(epsilon=epsilon):
            return lambda step: epsilon
