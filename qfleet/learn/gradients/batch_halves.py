"""Gradients of a batch in two halves, which two threads compute side by side. Shapes: N items, A actions.

The threads of a halved batch wait for each other once per update; those of a divided operation once per operation. One
thread computes the same two halves one after the other, so the bits do not depend on the number of threads.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qfleet.nets import Chain, Network
from qfleet.nets.gradients import OnGradient
from qfleet.qlearn import Tensors
from qfleet.system.parallel_tasks import TaskThread

# The smallest batch that is halved. In small batches a chain's second pass over the weights costs more than the waits.
MIN_CHAIN_ITEMS = 128
MIN_ITEMS = 16

# Loss [], priorities [N], values [N, A] and the gradient of every parameter.
LossAndGradients: TypeAlias = tuple[Tensor, Tensor, Tensor, list[Tensor]]
Compute: TypeAlias = Callable[[Network, Tensors], LossAndGradients]


@dataclass(eq=False)
class BatchHalves:
    """The loss and gradients of batches of single steps; each half has a view of the same network of its own."""

    networks: tuple[Network, Network]
    target: Network
    compute: Compute
    tasks: TaskThread | None

    def fits(self, batch: Tensors) -> bool:
        """Is the batch large enough?"""
        return len(batch.action) >= (MIN_CHAIN_ITEMS if isinstance(self.networks[0], Chain) else MIN_ITEMS)

    def loss_and_gradients(self, batch: Tensors, on_gradient: OnGradient | None = None) -> LossAndGradients:
        """Those of the whole batch: the sums over its halves, each weighted by its number of items."""
        num = len(batch.action)
        if isinstance(self.target, Chain):
            self.target.refresh_copies()  # not in two threads
        first = weighted_items(batch, 0, num // 2)
        second = weighted_items(batch, num // 2, num)
        task = None if self.tasks is None else self.tasks.submit(partial(self.half, 1, second))
        loss, priority, values, gradients = self.half(0, first)
        others = self.half(1, second) if task is None else task.result()
        torch._foreach_add_(gradients, others[3])
        if on_gradient is not None:
            for index in range(len(gradients) - 1, -1, -1):
                on_gradient(index, gradients[index])
        return loss.detach() + others[0].detach(), join(priority, others[1]), join(values, others[2]), gradients

    def half(self, index: int, batch: Tensors) -> LossAndGradients:
        """One half's part of the loss and gradients."""
        network = self.networks[index]
        if isinstance(network, Chain):
            network.refresh_copies(always=True)
        return self.compute(network, batch)


def join(first: Tensor, second: Tensor) -> Tensor:
    """The items of both halves."""
    return torch.cat((first, second))


def weighted_items(batch: Tensors, begin: int, end: int) -> Tensors:
    """Consecutive items of a batch of single steps; their weights are multiplied by their share of the batch."""
    share = (end - begin) / len(batch.action)
    named: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        named[field.name] = None if value is None else value[begin:end]
    named["weight"] = named["weight"] * share
    return Tensors(**named)
