"""Optimisers as one call into torch's fused kernels, and clipping.

These are the kernels that torch.optim calls. Its classes are not used because making one imports torch's compiler,
a second or more before the first step, and each of their steps costs as much as a small network's backward pass
(docs/decisions/0007). A test holds every optimiser here bit-equal to its namesake there; RAdam, which
has no kernel there, to its rounding.
"""

from typing import Protocol

import torch
from torch import Tensor

from qfleet.plan.schema import Adam as AdamPlan
from qfleet.plan.schema import Radam as RadamPlan
from qfleet.plan.schema import Rmsprop as RmspropPlan
from qfleet.plan.schema import Sgd as SgdPlan


class FusedOptimizer(Protocol):
    """Moves parameters against their gradients, in place; `moments` is all it remembers, a tensor per parameter."""

    parameters: list[Tensor]
    moments: dict[str, list[Tensor]]
    learning_rate: float

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""
        ...


def zeros(parameters: list[Tensor]) -> list[Tensor]:
    """A zero tensor laid out like each parameter."""
    return [torch.zeros_like(parameter) for parameter in parameters]


def no_steps(parameters: list[Tensor]) -> Tensor:  # [parameters]
    """The steps that each has made: one tensor, so that counting one more is one operation."""
    return torch.zeros(len(parameters), device=parameters[0].device if parameters else None)


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
        self.steps = no_steps(parameters)
        self.moments = {
            "step": list(self.steps.unbind()),
            "exp_avg": zeros(parameters),
            "exp_avg_sq": zeros(parameters),
        }

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""
        kept = self.moments
        self.steps.add_(1)
        self.kernel(
            self.parameters,
            gradients,
            kept["exp_avg"],
            kept["exp_avg_sq"],
            [],
            kept["step"],
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
        self.steps = no_steps(parameters)
        self.moments = {
            "step": list(self.steps.unbind()),
            "exp_avg": zeros(parameters),
            "exp_avg_sq": zeros(parameters),
        }

    def step(self, gradients: list[Tensor]) -> None:
        """One step."""
        self.steps.add_(1)
        if self.weight_decay:
            torch._foreach_mul_(self.parameters, 1.0 - self.learning_rate * self.weight_decay)
        steps = self.steps.tolist()
        for step in sorted(set(steps)):  # one, unless a reset let some parameters begin anew
            self.move([at for at, own in enumerate(steps) if own == step], gradients, step)

    def move(self, places: list[int], gradients: list[Tensor], step: float) -> None:
        """Move the parameters at these places, which have made so many steps with this one."""
        kept = self.moments
        beta1 = 0.9
        beta2 = 0.999
        columns = (self.parameters, gradients, kept["exp_avg"], kept["exp_avg_sq"], kept["step"])
        parameters, slopes, means, squares, steps = ([values[at] for at in places] for values in columns)
        most = 2.0 / (1.0 - beta2) - 1.0
        left = 1.0 - beta2**step
        length = most - 2.0 * step * beta2**step / left
        if length <= 5.0:  # too few gradients to know their variance: plain momentum
            torch._foreach_lerp_(means, slopes, 1.0 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, slopes, slopes, 1.0 - beta2)
            torch._foreach_add_(parameters, means, alpha=-self.learning_rate / (1.0 - beta1**step))
            return
        rectified = ((length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)) ** 0.5
        # Adam's step at another rate. Adam adds its eps after its correction of the squares, RAdam before.
        torch._fused_adam_(
            parameters,
            slopes,
            means,
            squares,
            [],
            steps,
            lr=self.learning_rate * rectified,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=self.eps / left**0.5,
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
        spread = square
        if mean is not None:
            torch._foreach_lerp_(mean, gradients, 1.0 - self.decay)
            spread = list(torch._foreach_addcmul(square, mean, mean, value=-1.0))
        scale = list(torch._foreach_sqrt(spread))
        torch._foreach_add_(scale, self.eps)
        torch._foreach_addcdiv_(self.parameters, gradients, scale, value=-self.learning_rate)


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
    """The optimiser the plan names."""
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
    """The global norm."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def clip_gradients(gradients: list[Tensor], norm: float, limit: float | None) -> None:
    """Scales the gradients in place when their norm exceeds the limit."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
