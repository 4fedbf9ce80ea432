"""Optimisers as one call into torch's fused kernels, clipping, and the learning-rate schedule.

These are the kernels that torch.optim calls. Its classes are not used because creating one imports torch's compiler,
which takes a second or more, and each of their steps costs as much as a small network's backward pass
(docs/decisions/0007). A test compares every optimiser with torch's, bit for bit; RAdam, which has no kernel there, up
to rounding.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qfleet.plan.schema import Adam as AdamPlan
from qfleet.plan.schema import Radam as RadamPlan
from qfleet.plan.schema import Rmsprop as RmspropPlan
from qfleet.plan.schema import Sgd as SgdPlan

BETA1 = 0.9
BETA2 = 0.999


class FusedOptimizer(Protocol):
    """Updates parameters in place; `moments` is its whole state, a tensor per parameter under each key."""

    parameters: list[Tensor]
    moments: dict[str, list[Tensor]]
    learning_rate: float

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""


def zeros(parameters: list[Tensor]) -> list[Tensor]:
    """A zero tensor like each parameter."""
    return [torch.zeros_like(parameter) for parameter in parameters]


def adam_state(parameters: list[Tensor]) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """A step count per parameter, in one tensor so that one operation increments them, and Adam's moments."""
    steps = torch.zeros(len(parameters), device=parameters[0].device if parameters else None)
    return steps, {"step": list(steps.unbind()), "exp_avg": zeros(parameters), "exp_avg_sq": zeros(parameters)}


def adam_kernel(columns: Sequence[list[Tensor]], *, rate: float, eps: float, weight_decay: float = 0.0) -> None:
    """One step of Adam, with decoupled weight decay, on parameters, gradients, means, squares and step counts."""
    parameters, gradients, means, squares, steps = columns
    kernel = torch._fused_adamw_ if weight_decay else torch._fused_adam_
    settings: dict[str, Any] = {"beta1": BETA1, "beta2": BETA2, "amsgrad": False, "maximize": False}
    kernel(parameters, gradients, means, squares, [], steps, lr=rate, weight_decay=weight_decay, eps=eps, **settings)


@dataclass(eq=False)
class FusedAdam:
    """Adam (Kingma and Ba 2015); weight decay is decoupled (Loshchilov and Hutter 2019)."""

    parameters: list[Tensor]
    learning_rate: float
    _: KW_ONLY
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self.steps, self.moments = adam_state(self.parameters)

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""
        self.steps.add_(1)
        moments = self.moments
        columns = (self.parameters, gradients, moments["exp_avg"], moments["exp_avg_sq"], moments["step"])
        adam_kernel(columns, rate=self.learning_rate, eps=self.eps, weight_decay=self.weight_decay)


@dataclass(eq=False)
class FusedRadam:
    """Rectified Adam (Liu et al. 2020, algorithm 2), by Adam's kernel; weight decay is decoupled."""

    parameters: list[Tensor]
    learning_rate: float
    _: KW_ONLY
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self.steps, self.moments = adam_state(self.parameters)

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""
        self.steps.add_(1)
        if self.weight_decay:
            torch._foreach_mul_(self.parameters, 1.0 - self.learning_rate * self.weight_decay)
        steps = self.steps.tolist()
        for step in sorted(set(steps)):  # one value, unless a reset zeroed the counts of some parameters
            self.step_some([index for index, count in enumerate(steps) if count == step], gradients, step)

    def step_some(self, indices: list[int], gradients: list[Tensor], step: float) -> None:
        """Update the parameters at these indices, whose step count is `step`."""
        moments = self.moments
        columns = (self.parameters, gradients, moments["exp_avg"], moments["exp_avg_sq"], moments["step"])
        some = [[values[index] for index in indices] for values in columns]
        rho_max = 2.0 / (1.0 - BETA2) - 1.0
        bias_correction2 = 1.0 - BETA2**step
        rho = rho_max - 2.0 * step * BETA2**step / bias_correction2
        if rho <= 5.0:  # too few gradients to estimate their variance: plain momentum
            parameters, grads, means, squares, _ = some
            torch._foreach_lerp_(means, grads, 1.0 - BETA1)
            torch._foreach_mul_(squares, BETA2)
            torch._foreach_addcmul_(squares, grads, grads, 1.0 - BETA2)
            torch._foreach_add_(parameters, means, alpha=-self.learning_rate / (1.0 - BETA1**step))
            return
        rectification = ((rho - 4.0) * (rho - 2.0) * rho_max / ((rho_max - 4.0) * (rho_max - 2.0) * rho)) ** 0.5
        # Adam's step at another rate. Adam adds eps after its bias correction of the squares, RAdam before.
        adam_kernel(some, rate=self.learning_rate * rectification, eps=self.eps / bias_correction2**0.5)


@dataclass(eq=False)
class FusedRmsprop:
    """RMSProp as in Graves 2013, eq. 38-41; `eps` is added outside the root, as torch does."""

    parameters: list[Tensor]
    learning_rate: float
    _: KW_ONLY
    decay: float = 0.95
    eps: float = 1e-5
    centered: bool = True
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self.moments = {"square_avg": zeros(self.parameters)}
        if self.centered:
            self.moments["grad_avg"] = zeros(self.parameters)

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""
        square = self.moments["square_avg"]
        mean = self.moments.get("grad_avg")
        if self.weight_decay:
            gradients = list(torch._foreach_add(gradients, self.parameters, alpha=self.weight_decay))
        torch._foreach_mul_(square, self.decay)
        torch._foreach_addcmul_(square, gradients, gradients, value=1.0 - self.decay)
        variance = square
        if mean is not None:
            torch._foreach_lerp_(mean, gradients, 1.0 - self.decay)
            variance = list(torch._foreach_addcmul(square, mean, mean, value=-1.0))
        denominator = list(torch._foreach_sqrt(variance))
        torch._foreach_add_(denominator, self.eps)
        torch._foreach_addcdiv_(self.parameters, gradients, denominator, value=-self.learning_rate)


@dataclass(eq=False)
class FusedSgd:
    """Gradient descent with momentum."""

    parameters: list[Tensor]
    learning_rate: float
    _: KW_ONLY
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self.moments = {"momentum_buffer": zeros(self.parameters)} if self.momentum else {}

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""
        if self.weight_decay:
            gradients = list(torch._foreach_add(gradients, self.parameters, alpha=self.weight_decay))
        if self.momentum:
            torch._foreach_mul_(self.moments["momentum_buffer"], self.momentum)
            torch._foreach_add_(self.moments["momentum_buffer"], gradients)
            gradients = self.moments["momentum_buffer"]
        torch._foreach_add_(self.parameters, gradients, alpha=-self.learning_rate)


def make_optimizer(optim: AdamPlan | RadamPlan | RmspropPlan | SgdPlan, parameters: list[Tensor]) -> FusedOptimizer:
    """The plan's optimiser."""
    rate = optim.learning_rate
    decay = optim.weight_decay
    match optim:
        case AdamPlan():
            return FusedAdam(parameters, rate, eps=optim.eps, weight_decay=decay)
        case RadamPlan():
            return FusedRadam(parameters, rate, eps=optim.eps, weight_decay=decay)
        case RmspropPlan():
            return FusedRmsprop(
                parameters, rate, decay=optim.decay, eps=optim.eps, centered=optim.centered, weight_decay=decay
            )
        case SgdPlan():
            return FusedSgd(parameters, rate, momentum=optim.momentum, weight_decay=decay)


def gradient_norm(gradients: list[Tensor]) -> Tensor:  # []
    """The global norm of all gradients."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def clip_gradients(gradients: list[Tensor], norm: float, limit: float | None) -> None:
    """Scale the gradients in place if their norm exceeds the limit."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """The factor on the learning rate: a constant times linear warm-up and linear decay to zero."""

    factor: float = 1.0
    warm_updates: int = 0
    decay_updates: int | None = None

    def __call__(self, updates: int) -> float:
        """The factor after this number of updates."""
        warmup = min(1.0, (updates + 1) / (self.warm_updates + 1))
        decay = 1.0 if self.decay_updates is None else max(0.0, 1.0 - updates / self.decay_updates)
        return self.factor * warmup * decay
