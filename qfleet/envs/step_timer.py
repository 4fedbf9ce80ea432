"""How long a step of an environment takes."""

import time
from collections.abc import Callable

import numpy as np

from qfleet.data import Array, Step, World

CLOCK_SECONDS = 0.3
_WARM_STEPS = 3
_FEWEST_STEPS = 5
_SLOW_SECONDS = 1.0


def any_allowed(world: World, step: Step, rng: np.random.Generator) -> Array:
    """A random action for every lane, of those that are allowed after a step."""
    score = rng.random((world.num, world.spec.num_actions))
    choice: Array = np.argmax(score if step.mask is None else score * step.mask, axis=1)
    return choice


def clock_steps(world: World) -> float:
    """Seconds of one step of one environment, resets included; of a slow one, few steps are enough."""
    rng = np.random.default_rng(0)
    last = [world.reset()]

    def step() -> None:
        world.send(any_allowed(world, last[0], rng))
        last[0] = world.receive()

    _repeat(step, 0.0, _WARM_STEPS)
    begin = time.perf_counter()
    count = _repeat(step, CLOCK_SECONDS, _FEWEST_STEPS)
    return (time.perf_counter() - begin) / count / world.num  # not a median: resets are rare and dear


def _repeat(act: Callable[[], None], seconds: float, fewest: int) -> int:
    """Call it until both the time and the least number of calls are reached, or a limit; returns how often it was."""
    begin = time.perf_counter()
    count = 0
    while (spent := time.perf_counter() - begin) < seconds or (count < fewest and spent < _SLOW_SECONDS):
        act()
        count += 1
    return max(1, count)
