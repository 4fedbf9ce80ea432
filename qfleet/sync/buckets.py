"""Gradients that are summed over all learners while others are still being computed. Shapes: D numbers in a bucket.

What a network computes last is differentiated first. Gradients are put together in that order until a bucket is full;
its sum is begun at once and goes on behind the rest of the backward pass. Everybody has the same buckets and begins
them in the same order, whatever order their gradients come in.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qfleet.sync.comm import Comm


class Buckets:
    """The gradients of one update after the other, by their number among the parameters."""

    def __init__(self, comm: Comm, weights: Sequence[Tensor], bucket_bytes: int) -> None:
        self.comm = comm
        self.groups = grouped([weight.nbytes for weight in weights], bucket_bytes)
        self.forget()

    def forget(self) -> None:
        """Begin with the next update."""
        self.known: dict[int, Tensor] = {}
        self.begun: list[tuple[Tensor, Callable[[], None]]] = []

    def ready(self, at: int, gradient: Tensor) -> None:
        """A gradient is known. The last bucket waits for `sums`: till then an update may turn out not to be finite."""
        self.known[at] = gradient
        while len(self.begun) < len(self.groups) - 1 and all(at in self.known for at in self.groups[len(self.begun)]):
            self.begin()

    def begin(self) -> None:
        """Begin the sum of the next bucket."""
        values = torch.cat([self.known[at].detach().reshape(-1) for at in self.groups[len(self.begun)]])
        self.begun.append((values, self.comm.begin(values)))

    def sums(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The sums of all gradients, begun by now or not."""
        self.known = dict(enumerate(gradients))
        while len(self.begun) < len(self.groups):
            self.begin()
        found: list[Tensor] = [torch.empty(0)] * len(gradients)
        for group, (values, wait) in zip(self.groups, self.begun, strict=True):
            wait()
            parts = torch.split(values, [gradients[at].numel() for at in group])
            for at, part in zip(group, parts, strict=True):
                found[at] = part
        self.forget()
        return found


def grouped(sizes: Sequence[int], most_bytes: int) -> list[list[int]]:
    """Numbers of parameters from the last to the first, as many together as fit into a bucket; one at least."""
    groups: list[list[int]] = [[]]
    room = most_bytes
    for at in range(len(sizes) - 1, -1, -1):
        if groups[-1] and sizes[at] > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(at)
        room -= sizes[at]
    return groups
