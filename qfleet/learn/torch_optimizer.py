"""An optimiser of the user's own: any `torch.optim.Optimizer`."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qfleet.errors import UsageError

# Makes the optimiser for these tensors, which are all that is trained.
OptimizerMaker: TypeAlias = Callable[[list[Tensor]], torch.optim.Optimizer]


class TorchOptimizer:
    """Gives the learner's gradients to a torch optimiser, and its state to checkpoints and other learners.

    The state is made at once: by the method with which torch's own optimisers make it, or by a step with gradients of
    zero, whose effect on the parameters is undone and after which whole numbers begin at zero again. The learning rate
    of each parameter group keeps its ratio to that of the first.
    """

    def __init__(self, parameters: list[Tensor], make: OptimizerMaker) -> None:
        self.parameters = parameters
        self.optimizer = require_optimizer(make(parameters), parameters)
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.ratios = [rate / rates[0] if rates[0] else 1.0 for rate in rates]
        self.learning_rate = rates[0]
        self.numbers = list[tuple[dict[str, Any], str, Tensor]]()  # of the state: where they are, and as tensors
        self.moments = self.initial_state()

    def initial_state(self) -> dict[str, list[Tensor]]:
        """The state before the first step, a tensor per parameter under each key."""
        before = [parameter.clone() for parameter in self.parameters]
        with torch.random.fork_rng(devices=[]):
            self.make_state([torch.zeros_like(parameter) for parameter in self.parameters])
        for parameter, value in zip(self.parameters, before, strict=True):
            parameter.copy_(value)
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        keys = sorted({key for state in states for key in state if state[key] is not None})
        return {key: [self.state_tensor(state, key) for state in states] for key in keys}

    def make_state(self, zeros: list[Tensor]) -> None:
        """Let the optimiser make its state, given gradients of zero."""
        init_group = getattr(self.optimizer, "_init_group", None)
        if init_group is not None:
            for parameter, gradient in zip(self.parameters, zeros, strict=True):
                parameter.grad = gradient
            num_lists = len(inspect.signature(init_group).parameters) - 1
            for group in self.optimizer.param_groups:
                init_group(group, *([] for _ in range(num_lists)))
        if not any(self.optimizer.state.values()):  # momentum buffers come with the first step
            self.step(zeros)

    def state_tensor(self, state: dict[str, Any], key: str) -> Tensor:
        """A parameter's state under this key; numbers get a tensor, which is kept equal to them."""
        value = state.get(key)
        if isinstance(value, bool | int | float):
            number = torch.tensor(0.0 if isinstance(value, int) else value, dtype=torch.float64)
            self.numbers.append((state, key, number))
            return number
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise UsageError(
                f"the optimiser {type(self.optimizer).__name__} cannot be saved",
                f"Its state {key!r} is {type(value).__name__}; a floating-point tensor or a number was expected.",
                "Use an optimiser whose state is made of these.",
            )
        return value.zero_() if key == "step" else value

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""
        for state, key, number in self.numbers:
            state[key] = type(state[key])(number.item())
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = self.learning_rate * ratio
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        for state, key, number in self.numbers:
            number.fill_(state[key])


def require_optimizer(made: object, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Refuse what is not a torch optimiser of all parameters, each once."""
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer= made {made!r}",
            "It is a function from the list of all trained tensors to a torch.optim.Optimizer.",
            "Write optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=1e-3).",
        )
    owned = [id(each) for group in made.param_groups for each in group["params"]]
    if sorted(owned) != sorted(map(id, parameters)):
        raise UsageError(
            f"the optimiser {type(made).__name__} does not have every parameter once",
            f"It has {len(owned)} tensors of {len(parameters)} that are trained.",
            "Give each of the tensors that the function gets to one parameter group.",
        )
    return made
