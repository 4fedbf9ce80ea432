"""Views: how a network is run on a batch, and how losses per row become one loss.

Shapes: N items, W rows of a window, L rows learned from, M = N (steps) or L x N (sequences), A actions.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qfleet.nets import Network, QNet
from qfleet.plan.schema import Algo, SequencesView
from qfleet.qlearn.rules import NextValues


@dataclass(slots=True)
class Tensors:
    """A Batch or Sequences as tensors on the learner's device; see `qfleet/data/types.py` for their shapes."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor
    next_obs: Tensor | None = None
    next_mask: Tensor | None = None
    mask: Tensor | None = None
    gain: Tensor | None = None
    last: Tensor | None = None
    state: Tensor | None = None
    ahead: Tensor | None = None


class View(Protocol):
    """How a network is run on a batch."""

    def forward(
        self, net: Network, batch: Tensors, *, current: bool, bootstrap: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Outputs [M, *out] of the observations acted on, and of those to bootstrap from (without gradient)."""

    def actions(self, batch: Tensors) -> Tensor:
        """The actions taken [M]."""

    def rewards_and_discounts(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """n-step rewards and discounts [M]."""

    def add_masks(self, values: NextValues, batch: Tensors) -> NextValues:
        """Add which actions were allowed in the current and in the next observations."""

    def reduce(self, loss: Tensor, priority: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
        """From losses and priorities per row [M] to one loss [] and priorities per item [N]."""


@dataclass(frozen=True)
class StepView:
    """Single steps: every item is independent, for networks without memory."""

    def forward(
        self, net: Network, batch: Tensors, *, current: bool, bootstrap: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Outputs [M, *out] of the observations acted on, and of those n steps later (without gradient)."""
        out = net(batch.obs) if current else None
        if not bootstrap:
            return out, None
        if batch.next_obs is None:
            raise ValueError("a view of single steps needs next observations")
        with torch.no_grad():
            return out, net(batch.next_obs)

    def actions(self, batch: Tensors) -> Tensor:
        """The actions taken [M]."""
        return batch.action

    def rewards_and_discounts(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """The batch's own n-step rewards and discounts [M]."""
        return batch.reward, batch.discount

    def add_masks(self, values: NextValues, batch: Tensors) -> NextValues:
        """Add which actions were allowed in the current and in the next observations: the batch's own masks."""
        values.mask = batch.mask
        values.next_mask = batch.next_mask
        return values

    def reduce(self, loss: Tensor, priority: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
        """From losses and priorities per row [M] to one loss [], the importance-weighted mean, and priorities [N]."""
        return (loss * batch.weight).mean(), priority


@dataclass(frozen=True)
class SequenceView:
    """Windows of rows, unrolled by a network with memory (R2D2, Kapturowski et al. 2019).

    In each network the memory starts from the stored state and is unrolled over `burn_in` rows without gradient. The
    loss is the mean over a window's rows (published as a sum: the mean keeps learning rate and clipping comparable for
    every length). A window's priority is eta max |delta| + (1 - eta) mean |delta|.
    """

    burn_in: int
    length: int
    eta: float = 0.9

    def forward(
        self, net: Network, batch: Tensors, *, current: bool, bootstrap: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Outputs of the rows after the burn-in, from one pass over the window."""
        gain, last, state, ahead = sequence_fields(batch)
        if not isinstance(net, QNet):
            raise ValueError("a view of sequences needs a network with memory")
        obs = batch.obs
        action = batch.action
        start = self.burn_in
        if start:
            with torch.no_grad():
                _, state = net.unroll_memory(obs[:start], action[:start], gain[:start], last[:start], state)
        out, _ = net.unroll(obs[start:], action[start:], gain[start:], last[start:], state)
        learned = out[: self.length].flatten(0, 1) if current else None
        return learned, gather_rows(out.detach(), ahead - start) if bootstrap else None

    def rows(self, values: Tensor) -> Tensor:  # [W, N, ...] -> [L * N, ...]
        """The rows learned from."""
        return values[self.burn_in : self.burn_in + self.length].flatten(0, 1)

    def actions(self, batch: Tensors) -> Tensor:
        """The actions taken in the rows learned from."""
        return self.rows(batch.action)

    def rewards_and_discounts(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """Rewards and discounts of the rows learned from."""
        return batch.reward.flatten(), batch.discount.flatten()

    def add_masks(self, values: NextValues, batch: Tensors) -> NextValues:
        """The masks of the rows learned from, and of those they bootstrap from."""
        if batch.mask is not None:
            values.mask = self.rows(batch.mask)
            values.next_mask = gather_rows(batch.mask, sequence_fields(batch)[3])
        return values

    def reduce(self, loss: Tensor, priority: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
        """The importance-weighted mean over windows; rows that hold final observations do not count."""
        used = (~self.rows(sequence_fields(batch)[1])).to(loss.dtype).view(self.length, -1)
        num = used.sum(0).clamp(min=1.0)
        errors = priority.view(self.length, -1) * used
        mean = (loss.view(self.length, -1) * used).sum(0) / num
        priority = self.eta * errors.amax(0) + (1.0 - self.eta) * errors.sum(0) / num
        return (mean * batch.weight).mean(), priority


def sequence_fields(batch: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields that only sequences have: rewards, final rows, the state before them, rows to bootstrap from."""
    if batch.gain is None or batch.last is None or batch.state is None or batch.ahead is None:
        raise ValueError("a view of sequences needs sequences")
    return batch.gain, batch.last, batch.state, batch.ahead


def gather_rows(values: Tensor, rows: Tensor) -> Tensor:  # [W, N, ...], [L, N] -> [L * N, ...]
    """The given rows of every column."""
    columns = torch.arange(values.shape[1], device=values.device).expand_as(rows)
    return values[rows, columns].flatten(0, 1)


def make_view(algo: Algo) -> View:
    """The plan's view."""
    if isinstance(algo.view, SequencesView):
        return SequenceView(algo.view.burn_in, algo.view.length, algo.view.eta)
    return StepView()
