"""The learner turns a batch into better weights. Shapes: N items."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from qfleet.data import Array, Batch, Report, Sequences
from qfleet.learn.optimizer import Optimizer, clip_gradients
from qfleet.learn.plasticity import Reset
from qfleet.learn.target import Follow, tensors
from qfleet.nets import QNet
from qfleet.nets.normalize import LIMIT
from qfleet.qlearn import Head, Rule, Tensors, View, td_loss


class NonFiniteUpdate(Exception):
    """A loss or gradient was not finite: the update was skipped, the weights are as they were."""


@dataclass(slots=True)
class Change:
    """What an update is going to do, when it is known to be finite."""

    gradients: list[Tensor]
    report: Report


class Learner:
    """One network, its target network and its optimiser."""

    def __init__(
        self,
        net: QNet,
        target: QNet,
        optimizer: Optimizer,
        *,
        head: Head,
        rule: Rule | None,
        view: View,
        follow: Follow,
        clip_norm: float | None = 10.0,
        decay_updates: int | None = None,
        reset: Reset | None = None,
        rate_factor: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        self.net, self.target, self.optimizer = net, target, optimizer
        self.head, self.rule, self.view, self.follow = head, rule, view, follow
        self.clip_norm, self.device = clip_norm, device or torch.device("cpu")
        self.learning_rate, self.decay_updates, self.reset = optimizer.learning_rate, decay_updates, reset
        self.rate_factor = rate_factor  # a population's members learn at rates of their own
        # A torso of one's own may be frozen in part.
        learned = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
        self.names, self.parameters = [name for name, _ in learned], [parameter for _, parameter in learned]
        self.online_tensors, self.target_tensors = tensors(net.parameters()), tensors(target.parameters())
        self.updates = 0

    def update(self, batch: Batch | Sequences) -> Report:
        """One optimiser step on one batch."""
        return self.apply(self.examine(batch))

    def examine(self, batch: Batch | Sequences) -> Change:
        """The step that this batch asks for; nothing is changed yet."""
        loss, priority, values = td_loss(self.head, self.rule, self.view, self.net, self.target, self.tensors(batch))
        gradients = list(torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True))
        norm, size, value = clip_gradients(gradients, self.clip_norm), loss.item(), values.mean().item()
        if not (math.isfinite(size) and math.isfinite(norm) and math.isfinite(value)):
            raise NonFiniteUpdate(f"loss {size}, gradient norm {norm}, mean value {value}")
        return Change(gradients, Report(size, priority.cpu().numpy(), {"gradient_norm": norm, "value_mean": value}))

    def apply(self, change: Change) -> Report:
        """Make the step."""
        self.optimizer.learning_rate = self.rate()
        self.optimizer.step(change.gradients)
        self.updates += 1
        self.follow(self.target_tensors, self.online_tensors, self.updates)
        if self.reset is not None and self.reset.due(self.updates):
            self.reset.apply((self.net, self.target), self.names, self.optimizer.moments, self.updates)
            change.report.stats["reset"] = self.reset.number(self.updates)
        return change.report

    def rate(self) -> float:
        """The learning rate of the next update."""
        rate = self.learning_rate * self.rate_factor
        return rate if self.decay_updates is None else rate * max(0.0, 1.0 - self.updates / self.decay_updates)

    def tensors(self, batch: Batch | Sequences) -> Tensors:
        """The batch on this learner's device, rewards scaled if the plan normalises them."""
        found = {name: None if value is None else self.to(value) for name, value in fields_of(batch)}
        whole = self.rule is None and isinstance(batch, Batch)  # returns, made of rewards that were scaled already
        if self.net.rewards is not None and found["reward"] is not None and not whole:
            found["reward"] = (found["reward"] * self.net.rewards.scale()).clamp(-LIMIT, LIMIT)
        return Tensors(**found)  # type: ignore[arg-type]

    def to(self, values: Array) -> Tensor:
        """An array as a tensor on the device; on CPU without a copy."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def weights(self) -> Any:
        """What a board carries to the policy: not copies, so that they stay the newest."""
        return self.net.state_dict()

    def begin_with(self, model: dict[str, Array]) -> None:
        """Start from these weights, target network included."""
        restore(self.net, model)
        restore(self.target, model)

    def finite(self) -> bool:
        """Is everything that would be saved finite: weights, target network and moments?"""
        kept = [*self.net.state_dict().values(), *self.target_tensors, *chain(*self.optimizer.moments.values())]
        return all(bool(torch.isfinite(value).all()) for value in kept)

    def model_arrays(self) -> dict[str, Array]:
        """The online network, running normalisation included."""
        return arrays(self.net)

    def load_model_arrays(self, model: dict[str, Array]) -> None:
        """Write these weights into the online network, in place."""
        restore(self.net, model)

    def optim_arrays(self) -> dict[str, Array]:
        """The target network and the optimiser's moments, by parameter name."""
        named = {f"target.{name}": value for name, value in arrays(self.target).items()}
        for key, moments in self.optimizer.moments.items():
            for name, value in zip(self.names, moments, strict=True):
                named[f"{key}.{name}"] = value.cpu().contiguous().numpy().copy()
        return named

    def load_optim_arrays(self, named: dict[str, Array]) -> None:
        """Take target and moments back, in place."""
        begin = len("target.")
        restore(self.target, {key[begin:]: value for key, value in named.items() if key.startswith("target.")})
        for key, moments in self.optimizer.moments.items():
            for name, value in zip(self.names, moments, strict=True):
                value.copy_(torch.from_numpy(named[f"{key}.{name}"]))


def fields_of(batch: Batch | Sequences) -> list[tuple[str, Array | None]]:
    """What a network looks at: every field but the ids."""
    return [(name, getattr(batch, name)) for name in batch.__slots__ if name != "ids"]


def arrays(net: nn.Module) -> dict[str, Array]:
    """Parameters and buffers by name, as contiguous arrays of their own."""
    return {name: value.detach().cpu().contiguous().numpy().copy() for name, value in net.state_dict().items()}


@torch.no_grad()
def restore(net: nn.Module, values: dict[str, Array]) -> None:
    """Write arrays into a network without moving its memory: others share it."""
    own = net.state_dict()
    if own.keys() != values.keys():
        raise KeyError(f"weights do not fit: {sorted(own.keys() ^ values.keys())}")
    for name, value in values.items():
        if own[name].shape != value.shape:
            raise ValueError(f"{name} has shape {value.shape}, not {tuple(own[name].shape)}")
        own[name].copy_(torch.from_numpy(value))
