"""Optimisers against torch's: equal bit for bit; RAdam, which uses Adam's kernel, up to rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qfleet.learn.optimizer import FusedAdam, FusedOptimizer, FusedRadam, FusedRmsprop, FusedSgd, make_optimizer
from qfleet.plan.schema import Adam as AdamPlan

Ours = Callable[[list[Tensor]], FusedOptimizer]
Theirs = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

PAIRS: dict[str, tuple[Ours, Theirs]] = {
    "adam": (
        lambda ours: FusedAdam(ours, 1e-3, eps=1e-5),
        lambda theirs: torch.optim.Adam(theirs, 1e-3, eps=1e-5, fused=True),
    ),
    "adamw": (
        lambda ours: FusedAdam(ours, 1e-3, weight_decay=0.1),
        lambda theirs: torch.optim.AdamW(theirs, 1e-3, weight_decay=0.1, fused=True),
    ),
    "rmsprop centred": (
        lambda ours: FusedRmsprop(ours, 1e-3),
        lambda theirs: torch.optim.RMSprop(theirs, 1e-3, alpha=0.95, eps=1e-5, centered=True, foreach=True),
    ),
    "rmsprop with decay": (
        lambda ours: FusedRmsprop(ours, 1e-3, centered=False, weight_decay=0.1),
        lambda theirs: torch.optim.RMSprop(theirs, 1e-3, alpha=0.95, eps=1e-5, weight_decay=0.1, foreach=True),
    ),
    "sgd": (lambda ours: FusedSgd(ours, 1e-2), lambda theirs: torch.optim.SGD(theirs, 1e-2, foreach=True)),
    "sgd with momentum": (
        lambda ours: FusedSgd(ours, 1e-2, momentum=0.9, weight_decay=0.1),
        lambda theirs: torch.optim.SGD(theirs, 1e-2, momentum=0.9, weight_decay=0.1, foreach=True),
    ),
}


RECTIFIED: dict[str, tuple[Ours, Theirs]] = {
    "radam": (
        lambda ours: FusedRadam(ours, 1e-3, eps=1e-5),
        lambda theirs: torch.optim.RAdam(theirs, 1e-3, eps=1e-5, foreach=True),
    ),
    "radam with an eps that is felt": (
        lambda ours: FusedRadam(ours, 1e-3, eps=1e-2),
        lambda theirs: torch.optim.RAdam(theirs, 1e-3, eps=1e-2, foreach=True),
    ),
    "radam with decay": (
        lambda ours: FusedRadam(ours, 1e-3, weight_decay=0.1),
        lambda theirs: torch.optim.RAdam(theirs, 1e-3, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    ),
}


def fifty_steps(ours: Ours, theirs: Theirs, rows: int = 5) -> list[tuple[Tensor, Tensor]]:
    """The parameters of both after the same gradients."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(rows, 3, generator=generator), torch.randn(7, generator=generator)]
    parameters = [nn.Parameter(value.clone()) for value in values]
    mine, reference = ours(values), theirs(parameters)
    for _step in range(50):
        gradients = [torch.randn(value.shape, generator=generator) for value in values]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        mine.step(gradients)
        reference.step()
    return [(value, parameter.data) for value, parameter in zip(values, parameters, strict=True)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS.keys())
def test_fifty_steps_equal_torch_optim_bit_for_bit(ours: Ours, theirs: Theirs) -> None:
    assert all(torch.equal(*pair) for pair in fifty_steps(ours, theirs))


@pytest.mark.parametrize(("ours", "theirs"), RECTIFIED.values(), ids=RECTIFIED.keys())
def test_fifty_rectified_steps_equal_torch_optim_to_rounding(ours: Ours, theirs: Theirs) -> None:
    for mine, reference in fifty_steps(ours, theirs, rows=1_000):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)


def test_the_plans_settings_reach_the_kernel() -> None:
    value = torch.ones(3)
    optimizer = make_optimizer(AdamPlan(learning_rate=0.25), [value])
    optimizer.step([torch.ones(3)])
    assert torch.allclose(value, torch.full((3,), 0.75))
