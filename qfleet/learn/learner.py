"""The learner turns a batch into better weights. Shapes: N items."""

import math
import warnings
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from qfleet.data import Array, Batch, Report, Sequences
from qfleet.learn.batch_split import part
from qfleet.learn.compiled_update import CannotCompile, CompiledUpdate
from qfleet.learn.optimizer import FusedOptimizer, clip_gradients, gradient_norm
from qfleet.learn.peers import Peers
from qfleet.learn.plasticity import Reset
from qfleet.learn.target_network import TargetUpdate, floating, tensors
from qfleet.learn.transfer import make_carry, numbers
from qfleet.nets import (
    Chain,
    Network,
    QNet,
    Reduced,
    chain_of,
    gradients_of,
    keep_freed_memory,
    may_share,
    under_own_names,
)
from qfleet.nets.gradients import Ready
from qfleet.nets.normalize import LIMIT
from qfleet.qlearn import Head, Rule, Scalar, StepView, Tensors, View, td_loss, td_slope


class NonFiniteUpdate(Exception):
    """A loss or gradient was not finite: the update was skipped, the weights are as they were."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the learning rate is multiplied by: a factor, a rise over the first updates, a fall to zero over many."""

    factor: float = 1.0
    warm_updates: int = 0
    decay_updates: int | None = None

    def __call__(self, updates: int) -> float:
        """After so many updates."""
        rise = min(1.0, (updates + 1) / (self.warm_updates + 1))
        fall = 1.0 if self.decay_updates is None else max(0.0, 1.0 - updates / self.decay_updates)
        return self.factor * rise * fall


STEADY = Schedule()


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
        optimizer: FusedOptimizer,
        *,
        head: Head,
        rule: Rule | None,
        view: View,
        follow: TargetUpdate,
        clip_norm: float | None = 10.0,
        schedule: Schedule = STEADY,
        accumulate: int = 1,
        reset: Reset | None = None,
        rate_factor: float = 1.0,
        device: torch.device | None = None,
        reduced: bool = False,
        whole: CompiledUpdate | None = None,
    ) -> None:
        self.net = net
        self.target = target
        self.optimizer = optimizer
        self.head = head
        self.rule = rule
        self.view = view
        self.follow = follow
        self.clip_norm = clip_norm
        self.device = device or torch.device("cpu")
        self.learning_rate = optimizer.learning_rate
        self.schedule = schedule
        self.reset = reset
        self.accumulate = accumulate
        self.rate_factor = rate_factor  # a population's members learn at rates of their own
        # A torso of one's own may be frozen in part.
        learned = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in learned]
        self.parameters = [parameter for _, parameter in learned]
        self.online_tensors = tensors(floating(net))
        self.target_tensors = tensors(floating(target))
        self.shared = may_share(net)  # else policies copy the weights, whenever their tensors count one more write
        short = isinstance(head, Scalar) and isinstance(view, StepView)  # what can be differentiated by hand
        self.online = fastest(net, self.device, reduced=reduced, short=short)
        self.aim = fastest(target, self.device, reduced=reduced, short=short)
        self.whole = whole
        self.carry = make_carry(self.device)
        self.not_compiled = ""  # why the update could not be compiled, if it was tried in vain
        self.peers: Peers | None = None
        self.updates = 0
        keep_freed_memory()

    def update(self, batch: Batch | Sequences) -> Report:
        """One optimiser step on one batch, whose arrays are not looked at afterwards."""
        if self.peers is not None:
            return self.peers.update(batch)
        return self.update_alone(batch)

    def update_alone(self, batch: Batch | Sequences) -> Report:
        """The same by nobody else."""
        if self.whole is None:
            return self.apply(self.examine(batch))
        try:
            marks, priority = self.whole(self.tensors(batch), self.rate())
        except CannotCompile as cause:
            warnings.warn(f"runtime.compile: going on step by step ({cause})", RuntimeWarning, stacklevel=2)
            self.whole = None
            self.not_compiled = str(cause)
            return self.update_alone(batch)
        return self.moved(finite_report(marks.tolist(), priority))

    def propose(self, batch: Batch | Sequences, share: float = 1.0, ready: Ready | None = None) -> Change:
        """What this batch asks for, before several learners agree; it counts by `share`, its part of all batches.

        `ready` hears of gradients as they are computed, if that happens in one piece.
        """
        heard = ready if ready is None or share == 1.0 else lambda at, gradient: ready(at, gradient * share)
        loss, priority, value, gradients = self.look(batch, heard)
        marks = numbers(loss, value)
        if not all(map(math.isfinite, marks)):
            gradients[0].fill_(math.nan)  # so that everybody skips this update
        if share != 1.0:
            torch._foreach_mul_(gradients, share)
        return Change(gradients, Report(marks[0], priority.cpu().numpy(), {"value_mean": marks[1]}))

    def agree(self, change: Change, norm: float) -> Report:
        """The step was made, by a gradient of this norm: go on as after any other; one not finite made none."""
        report = change.report
        require_finite(report.loss, norm, report.stats["value_mean"])
        report.stats["gradient_norm"] = norm
        return self.moved(report)

    def step(self, gradients: list[Tensor]) -> float:
        """Clip and make the optimiser's step, if the gradient is finite; its norm before."""
        norm = self.clip(gradients)
        if math.isfinite(norm):
            self.optimizer.learning_rate = self.rate()
            self.optimizer.step(gradients)
        return norm

    def clip(self, gradients: list[Tensor]) -> float:
        """Scale them down in place if they are too long; their norm before."""
        (norm,) = numbers(gradient_norm(gradients))
        clip_gradients(gradients, norm, self.clip_norm)
        return norm

    def examine(self, batch: Batch | Sequences) -> Change:
        """The step that this batch asks for; nothing is changed yet."""
        loss, priority, value, gradients = self.look(batch)
        found = finite_report(numbers(loss, gradient_norm(gradients), value), priority)
        clip_gradients(gradients, found.stats["gradient_norm"], self.clip_norm)
        return Change(gradients, found)

    def look(self, batch: Batch | Sequences, ready: Ready | None = None) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Loss [], priorities [N], mean value [] and gradients of a batch, whole or part by part."""
        num = min(self.accumulate, len(batch.ids))
        if num == 1:
            loss, priority, values, gradients = self.differentiate(self.tensors(batch), ready)
            return loss, priority, values.mean(), gradients
        return self.look_at_parts([part(batch, at, num) for at in range(num)])

    def look_at_parts(self, parts: list[Batch | Sequences]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """The same from parts of a batch, one in memory at a time; each counts by how many items it has."""
        total = sum(len(each.ids) for each in parts)
        priority = torch.empty(total)
        sums = list[Tensor]()
        for at, each in enumerate(parts):
            loss, own, values, gradients = self.differentiate(self.tensors(each))
            priority[at :: len(parts)] = own.cpu()
            found = [value * (len(each.ids) / total) for value in (loss.detach(), values.mean(), *gradients)]
            sums = found if not sums else list(torch._foreach_add(sums, found))
        return sums[0], priority, sums[1], sums[2:]

    def differentiate(self, batch: Tensors, ready: Ready | None = None) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Loss [], priorities [N], values, and the gradient of the loss by every parameter."""
        head = self.head
        rule = self.rule
        view = self.view
        online = self.online
        aim = self.aim
        if isinstance(online, Chain) and isinstance(head, Scalar) and isinstance(view, StepView):
            loss, priority, values, slope = td_slope(head, rule, view, online, aim, batch)
            return loss, priority, values, online.gradients(slope, ready)
        loss, priority, values = td_loss(head, rule, view, online, aim, batch)
        return loss, priority, values, gradients_of(loss, self.parameters, ready)

    def apply(self, change: Change) -> Report:
        """Make the step."""
        self.optimizer.learning_rate = self.rate()
        self.optimizer.step(change.gradients)
        return self.moved(change.report)

    def moved(self, report: Report) -> Report:
        """A step was made: count it, let the target follow, and begin anew if it is time."""
        self.updates += 1
        if not self.shared:
            increment_version(self.online_tensors)  # torch's fused optimisers do not count their writes
        if self.whole is None or self.whole.tau is None:
            self.follow(self.target_tensors, self.online_tensors, self.updates)
        if self.reset is not None and self.reset.due(self.updates):
            self.reset.apply((self.net, self.target), self.names, self.optimizer.moments, self.updates)
            report.stats["reset"] = self.reset.number(self.updates)
        return report

    def rate(self) -> float:
        """The learning rate of the next update."""
        return self.learning_rate * self.rate_factor * self.schedule(self.updates)

    def tensors(self, batch: Batch | Sequences) -> Tensors:
        """The batch on this learner's device, rewards scaled if the plan normalises them."""
        found = self.carry(fields_of(batch))
        whole = self.rule is None and isinstance(batch, Batch)  # returns, made of rewards that were scaled already
        if found["reward"] is not None and not whole:
            found["reward"] = self.scaled(found["reward"])
        ahead = found.get("next_obs")
        if ahead is not None and ahead.dtype == torch.uint8 and self.rule is not None and self.rule.needs_online:
            found["next_obs"] = self.net.shown(ahead)  # once for both networks
        return Tensors(**found)  # type: ignore[arg-type]

    def scaled(self, reward: Tensor) -> Tensor:
        """Rewards as the plan normalises them, if it does."""
        if self.net.rewards is None:
            return reward
        return (reward * self.net.rewards.scale()).clamp(-LIMIT, LIMIT)

    def everything(self) -> list[Tensor]:
        """Weights, target network, their states and the moments: what learners have in common when they begin."""
        states = [state for state in (*self.net.buffers(), *self.target.buffers()) if state.is_floating_point()]
        return [*self.online_tensors, *self.target_tensors, *states, *chain(*self.optimizer.moments.values())]

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
            saved = {name.removeprefix(f"{key}."): value for name, value in named.items() if name.startswith(f"{key}.")}
            saved = under_own_names(self.names, saved)
            for name, value in zip(self.names, moments, strict=True):
                overwrite(f"{key}.{name}", value, saved[name])


def fastest(net: QNet, device: torch.device, *, reduced: bool, short: bool) -> Network:
    """The network itself, or the view of it that is computed soonest."""
    if reduced:
        return Reduced(net, device)
    return (chain_of(net) if short else None) or net


def finite_report(marks: list[float], priority: Tensor) -> Report:
    """What an update has to say of its loss, gradient norm and mean value, if they are finite."""
    loss, norm, value = marks
    require_finite(loss, norm, value)
    return Report(loss, priority.cpu().numpy(), {"gradient_norm": norm, "value_mean": value})


def require_finite(loss: float, norm: float, value: float) -> None:
    """Numbers that an update can be made of."""
    if not (math.isfinite(loss) and math.isfinite(norm) and math.isfinite(value)):
        raise NonFiniteUpdate(f"loss {loss}, gradient norm {norm}, mean value {value}")


def fields_of(batch: Batch | Sequences) -> list[tuple[str, Array | None]]:
    """What a network looks at: every field but the ids."""
    return [(name, getattr(batch, name)) for name in batch.__slots__ if name != "ids"]


def arrays(net: nn.Module) -> dict[str, Array]:
    """Parameters and buffers by name, as contiguous arrays of their own."""
    return {name: value.detach().cpu().contiguous().numpy().copy() for name, value in net.state_dict().items()}


def restore(net: nn.Module, values: dict[str, Array]) -> None:
    """Write arrays into a network without moving its memory: others share it."""
    own = net.state_dict()
    for name, value in under_own_names(own.keys(), values).items():
        overwrite(name, own[name], value)


@torch.no_grad()
def overwrite(name: str, own: Tensor, value: Array) -> None:
    """Write an array into a tensor, in place, if it can have been made from one like it."""
    if own.shape != value.shape:
        raise ValueError(f"{name} has shape {value.shape}, not {tuple(own.shape)}")
    if own.is_floating_point() != (value.dtype.kind == "f") or value.dtype.kind == "c":
        raise ValueError(f"{name} has numbers of type {value.dtype}, not {str(own.dtype).removeprefix('torch.')}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ValueError(f"{name} has numbers that are not finite")
    own.copy_(torch.from_numpy(value))
