"""Target networks: a copy made now and then, or a running average."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from qfleet.plan.schema import CopyTarget, Fresh, Plan


class Follow(Protocol):
    """How the target follows the online network; called after each update with the number of updates made."""

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """Move the target's parameters."""
        ...


def copy_every(updates_between: int) -> Follow:
    """Equal to the online network after every so many updates."""

    def follow(target: list[Tensor], online: list[Tensor], updates: int) -> None:
        if updates % updates_between == 0:
            torch._foreach_copy_(target, online)

    return follow


def average(tau: float) -> Follow:
    """target += tau (online - target) after every update (Lillicrap et al. 2016)."""

    def follow(target: list[Tensor], online: list[Tensor], updates: int) -> None:
        torch._foreach_lerp_(target, online, tau)

    return follow


def stay(target: list[Tensor], online: list[Tensor], updates: int) -> None:
    """Not at all: nothing is read from the target."""


def make_follow(plan: Plan) -> Follow:
    """How the plan wants the target to follow."""
    algo = plan.algo
    if isinstance(plan.replay, Fresh):
        return stay
    return copy_every(algo.target.every_updates) if isinstance(algo.target, CopyTarget) else average(algo.target.tau)


def tensors(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Parameters as plain tensors that may be written in place."""
    return [parameter.detach() for parameter in parameters]
