"""Driving a world with given actions, and comparing its steps."""

from typing import Any

import numpy as np

from qfleet.data import Array, Step

KEYS = ("obs", "reward", "terminated", "truncated", "mask", "lost")


def drive(world: Any, actions: Array) -> list[Step]:
    seen = []
    for action in actions:
        world.send(action)
        seen.append(world.receive())
    return seen


def assert_same(a: Step, b: Step) -> None:
    for key in KEYS:
        np.testing.assert_array_equal(getattr(a, key), getattr(b, key), err_msg=key)
