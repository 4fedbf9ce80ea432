"""Optimisers as one call into torch's fused kernels, clipping, and the learning-rate schedule.

These are the kernels that torch.optim calls. Its classes are not used because creating one imports torch's compiler,
which takes a second or more, and each of their steps costs as much as a small network's backward pass
(docs/decisions/0007). A test compares every optimiser with torch's, bit for bit; RAdam, which has no kernel there, up
to rounding.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qfleet.plan.schema import Adam as AdamPlan
from qfleet.plan.schema import Radam as RadamPlan
from qfleet.plan.schema import Rmsprop as RmspropPlan
from qfleet.plan.schema import Sgd as SgdPlan


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


class FusedAdam:
    """Adam (Kingma and Ba 2015); weight decay is decoupled (Loshchilov and Hutter 2019)."""

    def __init__(
        self, parameters: list[Tensor], learning_rate: float, *, eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        self.parameters = parameters
        self.kernel = torch._fused_adamw_ if weight_decay else torch._fused_adam_
        self.learning_rate = learning_rate
        self.eps = eps
        self.weight_decay = weight_decay
        self.steps, self.moments = adam_state(parameters)

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""
        self.steps.add_(1)
        self.kernel(
            self.parameters,
            gradients,
            self.moments["exp_avg"],
            self.moments["exp_avg_sq"],
            [],
            self.moments["step"],
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


class FusedRadam:
    """Rectified Adam (Liu et al. 2020, algorithm 2), by Adam's kernel; weight decay is decoupled."""

    def __init__(
        self, parameters: list[Tensor], learning_rate: float, *, eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.eps = eps
        self.weight_decay = weight_decay
        self.steps, self.moments = adam_state(parameters)

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
        beta1 = 0.9
        beta2 = 0.999
        columns = (self.parameters, gradients, moments["exp_avg"], moments["exp_avg_sq"], moments["step"])
        parameters, grads, means, squares, steps = ([values[index] for index in indices] for values in columns)
        rho_max = 2.0 / (1.0 - beta2) - 1.0
        bias_correction2 = 1.0 - beta2**step
        rho = rho_max - 2.0 * step * beta2**step / bias_correction2
        if rho <= 5.0:  # too few gradients to estimate their variance: plain momentum
            torch._foreach_lerp_(means, grads, 1.0 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, 1.0 - beta2)
            torch._foreach_add_(parameters, means, alpha=-self.learning_rate / (1.0 - beta1**step))
            return
        rectification = ((rho - 4.0) * (rho - 2.0) * rho_max / ((rho_max - 4.0) * (rho_max - 2.0) * rho)) ** 0.5
        # Adam's step at another rate. Adam adds eps after its bias correction of the squares, RAdam before.
        torch._fused_adam_(
            parameters,
            grads,
            means,
            squares,
            [],
            steps,
            lr=self.learning_rate * rectification,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=self.eps / bias_correction2**0.5,
            amsgrad=False,
            maximize=False,
        )


class FusedRmsprop:
    """RMSProp as in Graves 2013, eq. 38-41; `eps` is added outside the root, as torch does."""

    def __init__(
        self,
        parameters: list[Tensor],
        learning_rate: float,
        *,
        decay: float = 0.95,
        eps: float = 1e-5,
        centered: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.decay = decay
        self.eps = eps
        self.moments = {"square_avg": zeros(parameters)}
        if centered:
            self.moments["grad_avg"] = zeros(parameters)

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


class FusedSgd:
    """Gradient descent with momentum."""

    def __init__(
        self, parameters: list[Tensor], learning_rate: float, *, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.moments = {"momentum_buffer": zeros(parameters)} if momentum else {}

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


CONSTANT_RATE = RateSchedule()
