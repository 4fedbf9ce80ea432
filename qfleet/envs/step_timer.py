"""Measuring how long a step of an environment takes."""

import time
from collections.abc import Callable

import numpy as np

from qfleet.data import Array, Step, World

TIMING_SECONDS = 0.3
_WARMUP_STEPS = 3
_MIN_STEPS = 5
_MAX_SECONDS = 1.0


def random_allowed_actions(world: World, step: Step, rng: np.random.Generator) -> Array:
    """A random action for every lane, among those that its mask allows."""
    score = rng.random((world.num, world.spec.num_actions))
    choice: Array = np.argmax(score if step.mask is None else score * step.mask, axis=1)
    return choice


def time_steps(world: World) -> float:
    """Seconds per step of one environment, resets included; a slow one is timed for a few steps only."""
    rng = np.random.default_rng(0)
    last = [world.reset()]

    def step() -> None:
        world.send(random_allowed_actions(world, last[0], rng))
        last[0] = world.receive()

    _repeat(step, 0.0, _WARMUP_STEPS)
    start = time.perf_counter()
    count = _repeat(step, TIMING_SECONDS, _MIN_STEPS)
    return (time.perf_counter() - start) / count / world.num  # not a median: resets are rare and slow


def _repeat(function: Callable[[], None], seconds: float, min_calls: int) -> int:
    """Call a function for `seconds` and at least `min_calls` times, unless that takes too long; the number of calls."""
    start = time.perf_counter()
    count = 0
    while (elapsed := time.perf_counter() - start) < seconds or (count < min_calls and elapsed < _MAX_SECONDS):
        function()
        count += 1
    return max(1, count)
