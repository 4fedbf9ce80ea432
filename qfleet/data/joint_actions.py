"""Joint actions: one number for the choices in all dimensions, in C order (the last dimension varies fastest)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

MAX_JOINT_ACTIONS = 2**62  # fits into 64 bits with room to spare
MAX_OUTPUTS = 10_000  # of a network that values every joint action


def strides(counts: Sequence[int]) -> list[int]:
    """The stride of each dimension in the joint action."""
    return list(accumulate(reversed(counts[1:]), lambda a, b: a * b, initial=1))[::-1]


def split_actions(joint: Any, counts: Sequence[int]) -> list[Any]:
    """The choice in each dimension; works on numbers, arrays and tensors alike."""
    return [joint // stride % count for stride, count in zip(strides(counts), counts, strict=True)]


def join_actions(choices: Sequence[Any], counts: Sequence[int]) -> Any:
    """The joint action of these choices, one per dimension."""
    return sum(choice * stride for choice, stride in zip(choices, strides(counts), strict=True))
