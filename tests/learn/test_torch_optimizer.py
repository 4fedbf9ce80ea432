"""A user's own optimiser makes the steps that it makes without qfleet."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qfleet.learn.torch_optimizer import TorchOptimizer
from tests.custom.parts import LastSteps

MAKERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adam": lambda tensors: torch.optim.Adam(tensors, lr=0.01),
    "nadam": lambda tensors: torch.optim.NAdam(tensors, lr=0.01),
    "rmsprop": lambda tensors: torch.optim.RMSprop(tensors, lr=0.01, centered=True),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=0.01, momentum=0.9),
    "own, with a plain number": lambda tensors: LastSteps(tensors, lr=0.01),
}


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)]


def gradients(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + number)
    return [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)]


@pytest.mark.parametrize("name", MAKERS)
def test_the_steps_are_those_of_the_optimiser_alone(name: str) -> None:
    plain = tensors()
    alone = MAKERS[name](plain)
    ours = TorchOptimizer(tensors(), MAKERS[name])
    for number in range(5):
        for parameter, gradient in zip(plain, gradients(number), strict=True):
            parameter.grad = gradient
        alone.step()
        ours.step(gradients(number))
        assert all(torch.equal(one, two) for one, two in zip(plain, ours.parameters, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_the_state_is_all_that_the_next_steps_depend_on(name: str) -> None:
    first = TorchOptimizer(tensors(), MAKERS[name])
    for number in range(3):
        first.step(gradients(number))
    again = TorchOptimizer(copy.deepcopy(first.parameters), MAKERS[name])
    state: dict[str, Any] = copy.deepcopy(first.moments)
    for key, values in again.moments.items():
        for value, saved in zip(values, state[key], strict=True):
            value.copy_(saved)
    for number in range(3, 6):
        first.step(gradients(number))
        again.step(gradients(number))
    assert all(torch.equal(one, two) for one, two in zip(first.parameters, again.parameters, strict=True))
