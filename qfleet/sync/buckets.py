"""Gradient buckets, whose all-reduce overlaps the backward pass. Shapes: D numbers in a bucket.

The backward pass computes the gradients of the last layers first. Gradients are collected in that order until a bucket
is full; its all-reduce starts at once and runs beside the rest of the backward pass. All ranks have the same buckets
and start them in the same order, whatever order their gradients come in.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qfleet.sync.comm import OverlappingComm


class Buckets:
    """Sums the gradients of one update after the other; gradients are known by their parameter's index."""

    def __init__(self, comm: OverlappingComm, weights: Sequence[Tensor], bucket_bytes: int) -> None:
        self.comm = comm
        self.buckets = group_by_bytes([weight.nbytes for weight in weights], bucket_bytes)
        self.reset()

    def reset(self) -> None:
        """Forget this update's gradients and sums."""
        self.gradients: dict[int, Tensor] = {}
        self.started: list[tuple[Tensor, Callable[[], None]]] = []

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a gradient. The last bucket waits for `sums`: till then an update may turn out not to be finite."""
        self.gradients[index] = gradient
        while len(self.started) < len(self.buckets) - 1 and self.next_is_full():
            self.start_next()

    def next_is_full(self) -> bool:
        """Are all gradients of the next bucket known?"""
        return all(index in self.gradients for index in self.buckets[len(self.started)])

    def start_next(self) -> None:
        """Start the all-reduce of the next bucket."""
        bucket = self.buckets[len(self.started)]
        values = torch.cat([self.gradients[index].detach().reshape(-1) for index in bucket])
        self.started.append((values, self.comm.begin_sum(values)))

    def sums(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The sums of all gradients; starts the buckets that are not started yet and waits for all."""
        self.gradients = dict(enumerate(gradients))
        while len(self.started) < len(self.buckets):
            self.start_next()
        found: list[Tensor] = [torch.empty(0)] * len(gradients)
        for bucket, (values, wait) in zip(self.buckets, self.started, strict=True):
            wait()
            parts = torch.split(values, [gradients[index].numel() for index in bucket])
            for index, part in zip(bucket, parts, strict=True):
                found[index] = part
        self.reset()
        return found


def group_by_bytes(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Parameter indices from the last to the first, as many together as fit into a bucket, at least one."""
    buckets: list[list[int]] = [[]]
    room = bucket_bytes
    for index in range(len(sizes) - 1, -1, -1):
        if buckets[-1] and sizes[index] > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets
