"""Views: how a batch is shown to a network, and how its losses become one number.

Shapes: N items, W rows of a window, L rows learned from, M = N (steps) or L x N (sequences), A actions.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qfleet.nets import Network, QNet
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
    """How a batch is shown to a network."""

    def see(self, net: Network, batch: Tensors, *, now: bool, after: bool) -> tuple[Tensor | None, Tensor | None]:
        """Outputs [M, *out] where the actions were taken, and where the targets are read (without gradient)."""
        ...

    def actions(self, batch: Tensors) -> Tensor:
        """The actions taken [M]."""
        ...

    def gains(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """Folded rewards and discounts [M]."""
        ...

    def masks(self, seen: NextValues, batch: Tensors) -> NextValues:
        """Add which actions were allowed, then and there."""
        ...

    def settle(self, loss: Tensor, priority: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
        """From losses and priorities per row [M] to one loss [] and priorities per item [N]."""
        ...


@dataclass(frozen=True)
class StepView:
    """Each item stands alone: a feed-forward network sees one observation at a time."""

    def see(self, net: Network, batch: Tensors, *, now: bool, after: bool) -> tuple[Tensor | None, Tensor | None]:
        """Outputs of the observations acted on, and of those n steps on."""
        present = net(batch.obs) if now else None
        if not after:
            return present, None
        if batch.next_obs is None:
            raise ValueError("a view of single steps needs the observations that follow")
        with torch.no_grad():
            return present, net(batch.next_obs)

    def actions(self, batch: Tensors) -> Tensor:
        """The actions taken."""
        return batch.action

    def gains(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """As they are."""
        return batch.reward, batch.discount

    def masks(self, seen: NextValues, batch: Tensors) -> NextValues:
        """The batch's own masks."""
        seen.mask = batch.mask
        seen.next_mask = batch.next_mask
        return seen

    def settle(self, loss: Tensor, priority: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
        """The importance-weighted mean."""
        return (loss * batch.weight).mean(), priority


@dataclass(frozen=True)
class SequenceView:
    """Windows of rows seen one after the other by a network with memory (R2D2, Kapturowski et al. 2019).

    The stored state and `burn_in` rows without gradient bring the memory up to date; both networks do so for
    themselves. The loss is the mean over a window's rows (published as a sum: the mean keeps learning rate and
    clipping comparable for every length). A window's priority is eta max |delta| + (1 - eta) mean |delta|.
    """

    burn_in: int
    length: int
    eta: float = 0.9

    def see(self, net: Network, batch: Tensors, *, now: bool, after: bool) -> tuple[Tensor | None, Tensor | None]:
        """Outputs of the rows after the burn-in, from one pass over the window."""
        gain, last, state, ahead = window(batch)
        if not isinstance(net, QNet):
            raise ValueError("a view of sequences needs a network with memory")
        obs = batch.obs
        action = batch.action
        warm = self.burn_in
        if warm:
            with torch.no_grad():
                _, state = net.remember(obs[:warm], action[:warm], gain[:warm], last[:warm], state)
        out, _ = net.unroll(obs[warm:], action[warm:], gain[warm:], last[warm:], state)
        present = out[: self.length].flatten(0, 1) if now else None
        return present, pick(out.detach(), ahead - warm) if after else None

    def rows(self, values: Tensor) -> Tensor:  # [W, N, ...] -> [L * N, ...]
        """The rows learned from."""
        return values[self.burn_in : self.burn_in + self.length].flatten(0, 1)

    def actions(self, batch: Tensors) -> Tensor:
        """The actions taken in the rows learned from."""
        return self.rows(batch.action)

    def gains(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """Row after row."""
        return batch.reward.flatten(), batch.discount.flatten()

    def masks(self, seen: NextValues, batch: Tensors) -> NextValues:
        """Of the rows learned from, and of those they bootstrap from."""
        if batch.mask is not None:
            seen.mask = self.rows(batch.mask)
            seen.next_mask = pick(batch.mask, window(batch)[3])
        return seen

    def settle(self, loss: Tensor, priority: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
        """The importance-weighted mean over windows; rows that hold final observations do not count."""
        used = (~self.rows(window(batch)[1])).to(loss.dtype).view(self.length, -1)
        num = used.sum(0).clamp(min=1.0)
        errors = priority.view(self.length, -1) * used
        mean = (loss.view(self.length, -1) * used).sum(0) / num
        mixed = self.eta * errors.amax(0) + (1.0 - self.eta) * errors.sum(0) / num
        return (mean * batch.weight).mean(), mixed


def window(batch: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What only sequences have: rewards as they came, final rows, the state before them, and the rows ahead."""
    if batch.gain is None or batch.last is None or batch.state is None or batch.ahead is None:
        raise ValueError("a view of sequences needs sequences")
    return batch.gain, batch.last, batch.state, batch.ahead


def pick(values: Tensor, rows: Tensor) -> Tensor:  # [W, N, ...], [L, N] -> [L * N, ...]
    """In every column the rows asked for."""
    columns = torch.arange(values.shape[1], device=values.device).expand_as(rows)
    return values[rows, columns].flatten(0, 1)
