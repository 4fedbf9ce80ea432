"""Target networks: a copy made now and then, or a running average."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from qfleet.plan.schema import CopyTarget, FreshReplay, Plan


class TargetUpdate(Protocol):
    """How the target follows the online network; called after each update with the number of updates made."""

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """Move the target's parameters."""
        ...


@dataclass(frozen=True)
class PeriodicCopy:
    """Equal to the online network after every so many updates."""

    updates_between: int

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """A copy, when its time has come."""
        if updates % self.updates_between == 0:
            torch._foreach_copy_(target, online)


@dataclass(frozen=True)
class PolyakAverage:
    """target += tau (online - target) after every update (Lillicrap et al. 2016)."""

    tau: float

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """A little closer."""
        torch._foreach_lerp_(target, online, self.tau)


def stay(target: list[Tensor], online: list[Tensor], updates: int) -> None:
    """Not at all: nothing is read from the target."""


def make_follow(plan: Plan) -> TargetUpdate:
    """How the plan wants the target to follow."""
    algo = plan.algo
    if isinstance(plan.replay, FreshReplay):
        return stay
    return (
        PeriodicCopy(algo.target.every_updates)
        if isinstance(algo.target, CopyTarget)
        else PolyakAverage(algo.target.tau)
    )


def floating(net: nn.Module) -> list[Tensor]:
    """The parameters that a target can follow: Keras counts whole numbers, such as seeds, among parameters."""
    return [parameter for parameter in net.parameters() if parameter.is_floating_point()]


def tensors(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Parameters as plain tensors that may be written in place."""
    return [parameter.detach() for parameter in parameters]
