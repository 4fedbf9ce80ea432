"""Custom parts for tests, and the examples as modules."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.custom import ActionChoice, LossInputs, NextValues, greedy_probs


@dataclass(frozen=True)
class SameAsDouble:
    """Double DQN, written again."""

    needs_online = True
    needs_current = False

    def __call__(self, values: NextValues) -> ActionChoice:
        assert values.online_next is not None
        return ActionChoice(greedy_probs(values.online_next, values.next_mask))


@dataclass(frozen=True)
class Blend:
    """Between the best action and any."""

    share: float = 0.5
    needs_online = True
    needs_current = False

    def __call__(self, values: NextValues) -> ActionChoice:
        assert values.online_next is not None
        online = greedy_probs(values.online_next, values.next_mask)
        return ActionChoice(self.share * online + (1 - self.share) / online.shape[1])


class SameAsHead:
    """The head's own loss."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        return inputs.td_loss()


class PredictReward:
    """The TD loss, and a prediction of the reward from the features."""

    def make_layers(self, features: int, actions: int) -> nn.Module:
        return nn.Linear(features, 1)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        loss, priority = inputs.td_loss()
        error = inputs.layers(inputs.features).squeeze(1) - inputs.batch.reward
        return loss + error.square(), priority


@dataclass
class Counting:
    """Uniform, and counts its draws and the priorities it was told."""

    tail: int = field(default=0, init=False)
    head: int = field(default=0, init=False)
    draws: int = field(default=0, init=False)
    told: float = field(default=0.0, init=False)

    def set_live(self, tail: int, head: int) -> None:
        self.tail = tail
        self.head = head

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Any, Any]:
        self.draws += 1
        # What was told decides what is drawn: a sampler whose state is lost would draw other items.
        shift = int(1000 * self.told) % (self.head - self.tail)
        drawn = rng.integers(self.tail, self.head, num)
        return self.tail + (drawn - self.tail + shift) % (self.head - self.tail), np.ones(num, np.float32)

    def update(self, serials: Any, priority: Any) -> None:
        self.told += float(priority.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws, "told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = state["draws"]
        self.told = state["told"]


class TanhHead:
    """One value per action, from a layer with tanh; half the squared error."""

    def make_layers(self, features: int, hidden: int, actions: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, actions))

    def values(self, out: Tensor) -> Tensor:
        return out

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        return reward + discount * (probs * next_out).sum(1)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        error = target - out.gather(1, action.unsqueeze(1)).squeeze(1)
        return 0.5 * error.square(), error.detach().abs()


def nadam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """An optimiser that the plan does not have."""
    return torch.optim.NAdam(parameters, lr=1e-3)


class LastSteps(torch.optim.Optimizer):
    """Gradient descent that counts its steps as a plain number, and keeps the last gradient."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                last = state.setdefault("last", torch.zeros_like(parameter))
                parameter.add_(parameter.grad + 0.5 * last, alpha=-group["lr"] / state["count"] ** 0.5)
                last.copy_(parameter.grad)


ALL = {"rule": Blend, "loss": PredictReward, "sampler": Counting, "head": TanhHead, "optimizer": lambda: nadam}


def all_parts() -> dict[str, Any]:
    """One of each, made anew."""
    return {name: make() for name, make in ALL.items()}
