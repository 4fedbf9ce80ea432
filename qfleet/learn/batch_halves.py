"""Gradients of a large batch in two halves, which two threads compute side by side. Shapes: N items, A actions.

The threads of a halved batch wait for each other once per update; those of a divided operation once per operation. One
thread computes the same two halves one after the other, so the bits do not depend on the number of threads.
"""

from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from qfleet.nets import Chain, Network
from qfleet.nets.gradients import OnGradient
from qfleet.qlearn import Rule, Scalar, StepView, Tensors, td_loss_and_gradient
from qfleet.system.parallel_tasks import TaskThread

MIN_ITEMS = 128  # in smaller batches a second pass over the weights costs more than the wait

# Loss [], priorities [N], values [N, A] and the gradient of every parameter.
LossAndGradients = tuple[Tensor, Tensor, Tensor, list[Tensor]]


@dataclass(eq=False)
class BatchHalves:
    """The loss and gradients of batches of at least `MIN_ITEMS` single steps, by two chains of the same network."""

    chains: tuple[Chain, Chain]
    target: Network
    head: Scalar
    rule: Rule | None
    view: StepView
    tasks: TaskThread | None

    def fits(self, batch: Tensors) -> bool:
        """Is the batch large enough?"""
        return len(batch.action) >= MIN_ITEMS

    def loss_and_gradients(self, batch: Tensors, on_gradient: OnGradient | None = None) -> LossAndGradients:
        """Those of the whole batch: the sums over its halves, each weighted by its number of items."""
        num = len(batch.action)
        if isinstance(self.target, Chain):
            self.target.refresh_copies()  # not in two threads
        first = items(batch, 0, num // 2)
        second = items(batch, num // 2, num)
        if self.tasks is None:
            halves = [self.half(0, first, num), self.half(1, second, num)]
        else:
            task = self.tasks.submit(partial(self.half, 1, second, num))
            halves = [self.half(0, first, num), task.result()]
        losses, priorities, values, gradients = zip(*halves, strict=True)
        torch._foreach_add_(gradients[0], gradients[1])
        for index in range(len(gradients[0]) - 1, -1, -1) if on_gradient is not None else ():
            on_gradient(index, gradients[0][index])
        return losses[0] + losses[1], torch.cat(priorities), torch.cat(values), gradients[0]

    def half(self, index: int, batch: Tensors, num_items: int) -> LossAndGradients:
        """One half's part of the loss and gradients of `num_items` items."""
        chain = self.chains[index]
        chain.refresh_copies(always=True)
        share = len(batch.action) / num_items
        weighted = replace(batch, weight=batch.weight * share)
        loss, priority, values, gradient = td_loss_and_gradient(
            self.head, self.rule, self.view, chain, self.target, weighted
        )
        return loss, priority, values, chain.gradients(gradient)


def items(batch: Tensors, begin: int, end: int) -> Tensors:
    """Consecutive items of a batch of single steps."""
    named = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return Tensors(**{name: None if value is None else value[begin:end] for name, value in named.items()})
