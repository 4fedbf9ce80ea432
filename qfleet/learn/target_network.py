"""Target networks: periodic copies or a running average of the online network."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from qfleet.plan.schema import CopyTarget, FreshReplay, Plan


class TargetUpdate(Protocol):
    """How the target network is updated; called after each update with the number of updates made."""

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """Change the target's parameters in place."""


@dataclass(frozen=True)
class PeriodicCopy:
    """Copy the online network every `updates_between` updates (Mnih et al. 2015)."""

    updates_between: int

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """Copy if due."""
        if updates % self.updates_between == 0:
            torch._foreach_copy_(target, online)


@dataclass(frozen=True)
class PolyakAverage:
    """target += tau (online - target) after every update (Lillicrap et al. 2016)."""

    tau: float

    def __call__(self, target: list[Tensor], online: list[Tensor], updates: int) -> None:
        """One averaging step."""
        torch._foreach_lerp_(target, online, self.tau)


def no_target_update(target: list[Tensor], online: list[Tensor], updates: int) -> None:
    """Leave the target as it is, where it is never used."""


def make_target_update(plan: Plan) -> TargetUpdate:
    """The plan's target update."""
    target = plan.algo.target
    if isinstance(plan.replay, FreshReplay):
        return no_target_update
    return PeriodicCopy(target.every_updates) if isinstance(target, CopyTarget) else PolyakAverage(target.tau)


def floating(net: nn.Module) -> list[Tensor]:
    """Floating-point parameters only: Keras also counts whole numbers, such as seeds, among parameters."""
    return [parameter for parameter in net.parameters() if parameter.is_floating_point()]


def detached(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Parameters as plain tensors that may be written in place."""
    return [parameter.detach() for parameter in parameters]
