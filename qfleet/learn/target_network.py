"""Target networks: periodic copies or a running average of the online network."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qfleet.plan.schema import CopyTarget, FreshReplay, Plan

# Changes the target's tensors in place, given the online ones and the number of updates made; called after each.
TargetUpdate: TypeAlias = Callable[[list[Tensor], list[Tensor], int], None]


def periodic_copy(every_updates: int, target: list[Tensor], online: list[Tensor], updates: int) -> None:
    """Copy the online network if a copy is due (Mnih et al. 2015)."""
    if updates % every_updates == 0:
        torch._foreach_copy_(target, online)


def polyak_average(tau: float, target: list[Tensor], online: list[Tensor], updates: int) -> None:
    """target += tau (online - target) (Lillicrap et al. 2016)."""
    torch._foreach_lerp_(target, online, tau)


def make_target_update(plan: Plan) -> TargetUpdate | None:
    """The plan's target update; None where the target network is never used."""
    target = plan.algo.target
    if isinstance(plan.replay, FreshReplay):
        return None
    if isinstance(target, CopyTarget):
        return partial(periodic_copy, target.every_updates)
    return partial(polyak_average, target.tau)


def floating(net: nn.Module) -> list[Tensor]:
    """Floating-point parameters only: Keras also counts whole numbers, such as seeds, among parameters."""
    return [parameter for parameter in net.parameters() if parameter.is_floating_point()]


def detached(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Parameters as plain tensors that may be written in place."""
    return [parameter.detach() for parameter in parameters]
