"""A loss of the user's own in place of the head's, or added to it. Shapes: M rows, A actions, F features."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from qfleet.data import split_actions
from qfleet.errors import UsageError
from qfleet.nets import QNet
from qfleet.qlearn.heads import Decoupled, Head
from qfleet.qlearn.views import Tensors


@dataclass(slots=True)
class LossInputs:
    """What a loss may use. Only `out`, `predicted`, `features` and what `net` returns have a gradient."""

    out: Tensor  # [M, *out], the online network's outputs
    action: Tensor  # [M], int64, the actions taken
    target: Tensor  # [M] or [M, K], the head's TD targets
    features: Tensor  # [M, F], what the head reads: the torso's features, or a memory's outputs
    batch: Tensors  # all that was sampled
    head: Head  # what the outputs mean
    net: QNet  # the online network
    target_net: QNet
    layers: nn.Module  # what the loss's `make_layers` returned; trained and saved with the network

    @property
    def predicted(self) -> Tensor:  # [M]
        """The online network's values of the actions taken."""
        values = self.head.values(self.out)
        if isinstance(self.head, Decoupled):
            choices = torch.stack(split_actions(self.action, self.head.counts), 1)  # [M, D]
            return values.gather(2, choices.unsqueeze(2)).squeeze(2).mean(1)
        return values.gather(1, self.action.unsqueeze(1)).squeeze(1)

    def next_features(self) -> Tensor:  # [M, F]
        """The target network's features of the next observations, n steps later; for single steps only."""
        if self.batch.next_obs is None:
            raise UsageError(
                "next_features() is for single steps",
                "Sequences hold no separate next observations: each row's next one is a later row.",
                "Use algo.view.type=steps, or inputs.batch.obs.",
            )
        with torch.no_grad():
            return self.target_net.features(self.batch.next_obs)

    def td_loss(self) -> tuple[Tensor, Tensor]:
        """The head's own loss [M] and priorities [M]."""
        return self.head.loss(self.out, self.action, self.target)


class Loss(Protocol):
    """The loss of every row; the learner weights it, averages it and takes its gradient.

    A loss may have layers of its own, for a prediction from the features: then it has a method
    `make_layers(features: int, actions: int) -> torch.nn.Module`, and finds what that returned in `inputs.layers`.
    """

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Loss [M] with gradient, and priorities [M] without: positive, larger where there is more to learn."""


def require_losses(returned: object, rows: int) -> tuple[Tensor, Tensor]:
    """The losses and priorities that a user's loss returned, if they are a number per row."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UsageError(
            f"the loss returned a {type(returned).__name__}",
            f"It returns two tensors [{rows}]: the loss and the priority of each row.",
            "Write return loss, priority; the priority may be the absolute error, detached.",
        )
    loss, priority = returned
    for name, value in (("losses", loss), ("priorities", priority)):
        if not isinstance(value, Tensor) or value.shape != (rows,):
            shape = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise UsageError(
                f"the loss returned {name} of shape {shape}",
                f"It was given {rows} rows, and returns a loss and a priority for each: two tensors [{rows}].",
                "Do not average over the rows: the learner does, with their importance weights.",
            )
    if not loss.requires_grad:
        raise UsageError(
            "the loss does not depend on the network",
            "It has no gradient.",
            "Compute it from inputs.out, inputs.predicted or inputs.features, without detach().",
        )
    return loss, priority
