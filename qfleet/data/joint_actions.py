"""Joint actions: one number for a choice in every dimension. The last dimension counts fastest, as in C."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

LARGEST = 2**62  # joint actions that a 64-bit number can hold with room to spare


def strides(counts: Sequence[int]) -> list[int]:
    """By how much a joint action grows with each dimension's choice."""
    return list(accumulate(reversed(counts[1:]), lambda a, b: a * b, initial=1))[::-1]


def split_actions(joint: Any, counts: Sequence[int]) -> list[Any]:
    """The choice in each dimension; works on numbers, arrays and tensors alike."""
    return [joint // stride % count for stride, count in zip(strides(counts), counts, strict=True)]


def join_actions(choices: Sequence[Any], counts: Sequence[int]) -> Any:
    """The joint action of a choice in each dimension."""
    return sum(choice * stride for choice, stride in zip(choices, strides(counts), strict=True))
