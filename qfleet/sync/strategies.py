"""Strategies of synchronisation: each is a `step` in place of the optimiser's step. Shapes: D numbers.

All learners begin with the same weights and make their steps in the same order. p is their number, x a learner's own
weights, g its gradient, eta the learning rate. Each strategy states what happens to the optimiser's moments.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from qfleet.sync.average import CodedMean, LogEvent
from qfleet.sync.buckets import Buckets
from qfleet.sync.codecs import Exact
from qfleet.sync.comm import Comm

GradientCallback = Callable[[int, Tensor], None]  # called with a parameter's index and its gradient
OptimizerStep = Callable[[list[Tensor]], float]  # the learner's optimiser: clips, steps, returns the gradient's norm
NOISE = 1e-6  # residuals below this share of the weights' norm are ignored
LOG_EVERY_ROUNDS = 100  # ADMM's residuals


class Sync(Protocol):
    """Keeps several learners at one set of weights."""

    def step(self, gradients: list[Tensor]) -> float:
        """Make a step together with the other learners; returns the norm of the gradient."""


@dataclass(eq=False)
class Allreduce:
    """x <- x - eta mean(g): as one learner with all batches. Moments stay equal, because all see the same gradient.

    With `buckets` the all-reduce overlaps the backward pass; a codec needs the whole vector instead.
    """

    optimizer_step: OptimizerStep
    average: CodedMean
    _: KW_ONLY
    total: bool = False  # step by the sum of all gradients instead of their mean
    buckets: Buckets | None = None

    def step(self, gradients: list[Tensor]) -> float:
        """Average, then step."""
        factor = self.average.comm.world_size if self.total else 1
        if self.buckets is not None:
            sums = self.buckets.sums(gradients)
            torch._foreach_mul_(sums, factor / self.average.comm.world_size)
            pairs = zip(sums, gradients, strict=True)
            return self.optimizer_step([match_strides(total.view(own.shape), own) for total, own in pairs])
        mean = self.average(flatten_tensors(gradients))
        return self.optimizer_step(unflatten_tensors(mean * factor if factor > 1 else mean, gradients))


class StepAveraging:
    """x <- x + mean(C(s)), s a learner's own step (Efficient-Adam, Chen et al. 2022); each learner has its own moments.

    Gradients decoded from a coarse codec are sparse and large. Adam, which divides by the root of their mean square,
    would make ten times smaller steps of one number in a hundred. Optimiser steps are all of similar size.

    Learners act with their own remaining compression error added, so that their weights differ a little.
    """

    def __init__(self, step: OptimizerStep, average: CodedMean, weights: Sequence[Tensor]) -> None:
        self.optimizer_step = step
        self.average = average
        self.weights = weights
        self.shared = flatten_tensors(weights)

    def step(self, gradients: list[Tensor]) -> float:
        """Replace the own step by the mean of all; no learner moves if one had a gradient that is not finite."""
        before = flatten_tensors(self.weights)
        norm = self.optimizer_step(gradients)
        change = flatten_tensors(self.weights) - before
        mean = self.average(change if math.isfinite(norm) else torch.full_like(change, math.nan))
        if not bool(torch.isfinite(mean).all()):
            copy_into(before, self.weights)
            return math.nan
        self.shared = self.shared + mean
        copy_into(with_error(self.shared, self.average), self.weights)
        return norm


@dataclass(eq=False)
class Local:
    """Local SGD: `every` local steps, then the mean of all weights; moments are averaged too.

    With an outer rate it is DiLoCo (Douillard et al. 2023): a round's change is a gradient for Nesterov's momentum.
    """

    optimizer_step: OptimizerStep
    average: CodedMean
    weights: Sequence[Tensor]
    moments: Sequence[Tensor]
    _: KW_ONLY
    every: int
    outer_rate: float | None = None
    outer_momentum: float = 0.9
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.anchor = flatten_tensors(self.weights)  # the weights that all agreed on last
        self.start = self.anchor  # where this learner's round began
        self.velocity = torch.zeros_like(self.anchor)

    def step(self, gradients: list[Tensor]) -> float:
        """Make a local step, and synchronise every few."""
        norm = self.optimizer_step(gradients)
        self.steps += 1
        if self.steps % self.every == 0:
            self.synchronize()
        return norm

    def synchronize(self) -> None:
        """Average the changes since the last round (which codecs compress) and add the mean to the anchor."""
        change = self.average(flatten_tensors(self.weights) - self.start)
        if self.outer_rate is not None:
            self.velocity = self.outer_momentum * self.velocity + change
            change = self.outer_rate * (change + self.outer_momentum * self.velocity)
        self.anchor = self.anchor + change
        # The outer step's effect on the remaining compression error is not known yet.
        self.start = with_error(self.anchor, self.average) if self.outer_rate is None else self.anchor
        copy_into(self.start, self.weights)
        if self.moments:
            copy_into(Exact().mean(flatten_tensors(self.moments), self.average.comm)[1], self.moments)


@dataclass(eq=False)
class Easgd:
    """Elastic averaging (Zhang et al. 2015): x <- x - alpha (x - c), c <- c + alpha sum(x - c); each has own moments.

    Stable for alpha p <= 1. Actors use rank 0's own weights, and these are saved.
    """

    optimizer_step: OptimizerStep
    average: CodedMean
    weights: Sequence[Tensor]
    _: KW_ONLY
    every: int
    pull: float  # alpha p
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.centre = flatten_tensors(self.weights)

    def step(self, gradients: list[Tensor]) -> float:
        """Make a local step; every few, learners and centre move towards each other."""
        norm = self.optimizer_step(gradients)
        self.steps += 1
        if self.steps % self.every == 0:
            own = flatten_tensors(self.weights)
            pull = self.pull / self.average.comm.world_size * (own - self.centre)
            self.centre = self.centre + self.average(pull.clone()) * self.average.comm.world_size
            copy_into(own - pull, self.weights)
        return norm


@dataclass(eq=False)
class Admm:
    """Consensus ADMM (Boyd et al. 2011, section 7): `every` steps on the learner's loss + rho/2 |x - z + u|^2.

    Then z <- mean(x + u), u <- u + x - z, and x begins at z (FedDyn, Acar et al. 2021). If the residuals r = |x - z|
    and s = rho |z - z'| sqrt(p) differ by a factor of ten, rho is doubled or halved and u rescaled.
    Each learner has its own moments; rank 0's weights are saved.
    """

    optimizer_step: OptimizerStep
    average: CodedMean
    weights: Sequence[Tensor]
    _: KW_ONLY
    every: int
    rho: float
    log_event: LogEvent = lambda kind, **fields: None
    steps: int = field(default=0, init=False)
    residuals: tuple[float, float] = field(default=(0.0, 0.0), init=False)

    def __post_init__(self) -> None:
        self.consensus = flatten_tensors(self.weights)
        self.sent = self.consensus.clone()  # x + u of the last round, of which the consensus is the mean
        self.dual = torch.zeros_like(self.consensus)

    def step(self, gradients: list[Tensor]) -> float:
        """Make a local step on the loss and the penalty."""
        penalty = self.rho * (flatten_tensors(self.weights) - self.consensus + self.dual)
        norm = self.optimizer_step(unflatten_tensors(flatten_tensors(gradients) + penalty, gradients))
        self.steps += 1
        if self.steps % self.every == 0:
            self.synchronize()
        return norm

    def synchronize(self) -> None:
        """Update consensus, dual variable and residuals."""
        own = flatten_tensors(self.weights)
        before = self.consensus
        comm = self.average.comm
        # Averaged as the change since the last round: a compression error is then sent later, and counted once.
        earlier = self.sent
        self.sent = own + self.dual
        self.consensus = before + self.average(self.sent - earlier)
        self.dual = self.dual + own - self.consensus
        copy_into(self.consensus, self.weights)
        distance = ((own - self.consensus) ** 2).sum().reshape(1)
        comm.sum(distance)
        primal = math.sqrt(float(distance))
        dual = self.rho * float(torch.linalg.vector_norm(self.consensus - before)) * math.sqrt(comm.world_size)
        self.residuals = (primal, dual)
        rounds = self.steps // self.every
        if rounds % LOG_EVERY_ROUNDS == 1:
            self.log_event("admm", meetings=rounds, primal=primal, dual=dual, rho=self.rho)
        self.adapt_rho(primal, dual)

    def adapt_rho(self, primal_residual: float, dual_residual: float) -> None:
        """Raise rho when learners drift apart, lower it when the consensus moves fast; ignore noise."""
        if max(primal_residual, dual_residual) <= NOISE * float(torch.linalg.vector_norm(self.consensus)):
            return
        factor = 1.0
        if primal_residual > 10.0 * dual_residual:
            factor = 2.0
        elif dual_residual > 10.0 * primal_residual:
            factor = 0.5
        self.rho *= factor
        self.dual = self.dual / factor


class Gossip:
    """D-PSGD (Lian et al. 2017): a step, then the mean with the two neighbours on a ring; each has its own moments."""

    def __init__(self, step: OptimizerStep, comm: Comm, weights: Sequence[Tensor]) -> None:
        self.optimizer_step = step
        self.comm = comm
        self.weights = weights

    def step(self, gradients: list[Tensor]) -> float:
        """Make a local step and average with both neighbours; of two learners each has only one."""
        norm = self.optimizer_step(gradients)
        own = flatten_tensors(self.weights)
        comm = self.comm
        right = (comm.rank + 1) % comm.world_size
        left = (comm.rank - 1) % comm.world_size
        total = own + comm.swap(own, right, left)
        if comm.world_size > 2:
            total = total + comm.swap(own, left, right)
        copy_into(total / min(comm.world_size, 3), self.weights)
        return norm


# Functions of several strategies


def gradient_callback(sync: Sync | None) -> GradientCallback | None:
    """The function to call with each gradient as it is computed, if the strategy uses one."""
    return sync.buckets.add if isinstance(sync, Allreduce) and sync.buckets is not None else None


def with_error(shared: Tensor, average: CodedMean) -> Tensor:
    """The shared weights plus this learner's part of the compression error (step-ahead error feedback, Xu et al. 2021).

    A learner that does not see its own delayed changes would repeat them until they arrive, and overshoot.
    """
    return shared if average.error is None else shared + average.error / average.comm.world_size


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:  # -> [D]
    """All tensors in one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten_tensors(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A vector split into tensors like these, with the same strides: fused optimisers read memory in order."""
    parts = torch.split(values, [tensor.numel() for tensor in like])
    return [match_strides(part.view(tensor.shape), tensor) for part, tensor in zip(parts, like, strict=True)]


def match_strides(values: Tensor, like: Tensor) -> Tensor:
    """The same values with the strides of another tensor of this shape."""
    return values if like.is_contiguous() else torch.empty_like(like, dtype=values.dtype).copy_(values)


@torch.no_grad()
def copy_into(values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a vector into tensors."""
    for tensor, part in zip(tensors, unflatten_tensors(values, tensors), strict=True):
        tensor.copy_(part)
