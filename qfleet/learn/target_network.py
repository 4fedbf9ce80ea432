"""Target networks: a copy made now and then, or a running average."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from qfleet.plan.schema import CopyTarget, Fresh, Plan


class Follow(Protocol):
    """How the target follows the online network; called after each update with the number of updates made."""

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """Move the target's parameters."""
        ...


@dataclass(frozen=True)
class CopyEvery:
    """Equal to the online network after every so many updates."""

    updates_between: int

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """A copy, when its time has come."""
        if updates % self.updates_between == 0:
            torch._foreach_copy_(target, online)


@dataclass(frozen=True)
class Average:
    """target += tau (online - target) after every update (Lillicrap et al. 2016)."""

    tau: float

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """A little closer."""
        torch._foreach_lerp_(target, online, self.tau)


def stay(target: list[Tensor], online: list[Tensor], updates: int) -> None:
    """Not at all: nothing is read from the target."""


def make_follow(plan: Plan) -> Follow:
    """How the plan wants the target to follow."""
    algo = plan.algo
    if isinstance(plan.replay, Fresh):
        return stay
    return CopyEvery(algo.target.every_updates) if isinstance(algo.target, CopyTarget) else Average(algo.target.tau)


def floating(net: nn.Module) -> list[Tensor]:
    """The parameters that a target can follow: Keras counts whole numbers, such as seeds, among parameters."""
    return [parameter for parameter in net.parameters() if parameter.is_floating_point()]


def tensors(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Parameters as plain tensors that may be written in place."""
    return [parameter.detach() for parameter in parameters]
