"""Heads: what a network's output means. Shapes: N items, A actions."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor
from torch.nn import functional


class Head(Protocol):
    """From outputs to values, targets and losses."""

    def values(self, out: Tensor) -> Tensor:
        """Expected value per action [N, A]."""
        ...

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """What the chosen action's output should become."""
        ...

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Loss per item [N] and priority per item [N] (detached)."""
        ...


@dataclass(frozen=True)
class Scalar:
    """One expected value per action."""

    kind: Literal["huber", "mse"] = "huber"

    def values(self, out: Tensor) -> Tensor:
        """The outputs are the values."""
        return out

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """y = R + discount * sum_a pi(a) Q(s', a): n-step and gamma are inside R and discount."""
        return reward + discount * (probs * next_out).sum(1)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Huber (kappa 1) or half the squared TD error; the priority is the error's size."""
        chosen = out.gather(1, action.unsqueeze(1)).squeeze(1)
        error = (target - chosen.detach()).abs()
        if self.kind == "huber":
            return functional.smooth_l1_loss(chosen, target, reduction="none"), error
        return 0.5 * functional.mse_loss(chosen, target, reduction="none"), error
