"""The learner: one optimiser step per batch. Shapes: N items."""

import math
import warnings
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from qfleet.data import Array, Batch, Report, Sequences
from qfleet.learn.batch_split import strided_part
from qfleet.learn.compiled_update import CannotCompile, CompiledUpdate
from qfleet.learn.gradients import LossGradients
from qfleet.learn.optimizer import FusedOptimizer, RateSchedule, clip_gradients, gradient_norm
from qfleet.learn.plasticity import Reset
from qfleet.learn.target_network import TargetUpdate, detached, floating
from qfleet.learn.transfer import Transfer, as_tensors, make_transfer, to_floats
from qfleet.nets import QNet
from qfleet.nets.gradients import OnGradient, keep_freed_memory
from qfleet.nets.normalize import LIMIT
from qfleet.nets.weights import can_share_weights, copy_array, load_state_arrays, match_names, state_arrays
from qfleet.qlearn import Tensors


class NonFiniteUpdate(Exception):
    """A loss or gradient was not finite: the update was skipped, the weights are unchanged."""


@dataclass(slots=True)
class PendingUpdate:
    """Gradients that were computed but not yet applied, and the report of their update."""

    gradients: list[Tensor]
    report: Report


@dataclass(eq=False)
class Learner:
    """One network, its target network and its optimiser."""

    net: QNet
    target: QNet
    optimizer: FusedOptimizer
    _: KW_ONLY
    gradients: LossGradients
    update_target: TargetUpdate | None
    clip_norm: float | None
    schedule: RateSchedule
    accumulate: int
    reset: Reset | None
    rate_factor: float  # each member of a population has its own
    device: torch.device
    compiled_update: CompiledUpdate | None
    not_compiled: str = ""  # why compiling the update failed, if it did
    updates: int = 0

    def __post_init__(self) -> None:
        self.learning_rate = self.optimizer.learning_rate
        # A user's torso may be partly frozen.
        trained = [(name, parameter) for name, parameter in self.net.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in trained]
        self.parameters = [parameter for _, parameter in trained]
        self.online_tensors = detached(floating(self.net))
        self.target_tensors = detached(floating(self.target))
        self.shares_weights = can_share_weights(self.net)  # else policies copy the weights when their versions change
        self.transfer: Transfer = as_tensors if self.device.type == "cpu" else make_transfer(self.device)
        keep_freed_memory()

    def update(self, batch: Batch | Sequences) -> Report:
        """One optimiser step on one batch, whose arrays are not used afterwards."""
        if self.compiled_update is None:
            return self.apply_update(self.prepare_update(batch))
        try:
            metrics, priority = self.compiled_update(self.to_tensors(batch), self.current_rate())
        except CannotCompile as cause:
            warnings.warn(f"runtime.compile: going on step by step ({cause})", RuntimeWarning, stacklevel=2)
            self.compiled_update = None
            self.not_compiled = str(cause)
            return self.update(batch)
        return self.after_step(finite_report(metrics.tolist(), priority))

    def prepare_shared_update(
        self, batch: Batch | Sequences, share: float = 1.0, on_gradient: OnGradient | None = None
    ) -> PendingUpdate:
        """This learner's gradients, times `share`, its part of the whole batch; the learners combine them.

        `on_gradient` is called with gradients as they are computed, if they are not accumulated over parts.
        """
        on_scaled = on_gradient
        if on_gradient is not None and share != 1.0:
            on_scaled = partial(report_scaled, on_gradient, share)
        loss, priority, value, gradients = self.compute_gradients(batch, on_scaled)
        metrics = to_floats(loss, value)
        if not all(map(math.isfinite, metrics)):
            gradients[0].fill_(math.nan)  # so that all learners skip this update
        if share != 1.0:
            torch._foreach_mul_(gradients, share)
        return PendingUpdate(gradients, Report(metrics[0], priority.cpu().numpy(), {"value_mean": metrics[1]}))

    def finish_shared_update(self, pending: PendingUpdate, norm: float) -> Report:
        """Finish an update whose combined gradient had this norm; if it was not finite, no step was made."""
        report = pending.report
        require_finite(report.loss, norm, report.stats["value_mean"])
        report.stats["gradient_norm"] = norm
        return self.after_step(report)

    def step(self, gradients: list[Tensor]) -> float:
        """Clip, and step the optimiser if the gradient is finite; returns its norm before clipping."""
        norm = self.clip(gradients)
        if math.isfinite(norm):
            self.optimizer.learning_rate = self.current_rate()
            self.optimizer.step(gradients)
        return norm

    def clip(self, gradients: list[Tensor]) -> float:
        """Clip gradients by their global norm, in place; returns their norm before."""
        (norm,) = to_floats(gradient_norm(gradients))
        clip_gradients(gradients, norm, self.clip_norm)
        return norm

    def prepare_update(self, batch: Batch | Sequences) -> PendingUpdate:
        """The clipped gradients of a batch; nothing is changed yet."""
        loss, priority, value, gradients = self.compute_gradients(batch)
        report = finite_report(to_floats(loss, gradient_norm(gradients), value), priority)
        clip_gradients(gradients, report.stats["gradient_norm"], self.clip_norm)
        return PendingUpdate(gradients, report)

    def compute_gradients(
        self, batch: Batch | Sequences, on_gradient: OnGradient | None = None
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Loss [], priorities [N], mean value [] and gradients of a batch, whole or accumulated over parts."""
        num = min(self.accumulate, len(batch.ids))
        if num == 1:
            loss, priority, values, gradients = self.gradients.compute(self.to_tensors(batch), on_gradient)
            return loss, priority, values.mean(), gradients
        return self.accumulate_gradients([strided_part(batch, at, num) for at in range(num)])

    def accumulate_gradients(self, parts: list[Batch | Sequences]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """The same from strided parts of a batch, one in memory at a time, each weighted by its number of items."""
        total = sum(len(part.ids) for part in parts)
        priority = torch.empty(total)
        sums = list[Tensor]()
        for at, part in enumerate(parts):
            loss, part_priority, values, gradients = self.gradients.compute(self.to_tensors(part))
            priority[at :: len(parts)] = part_priority.cpu()
            weighted = [value * (len(part.ids) / total) for value in (loss.detach(), values.mean(), *gradients)]
            sums = weighted if not sums else list(torch._foreach_add(sums, weighted))
        return sums[0], priority, sums[1], sums[2:]

    def apply_update(self, pending: PendingUpdate) -> Report:
        """Step the optimiser with prepared gradients."""
        self.optimizer.learning_rate = self.current_rate()
        self.optimizer.step(pending.gradients)
        return self.after_step(pending.report)

    def after_step(self, report: Report) -> Report:
        """After an optimiser step: count the update, update the target network, reset weights if due."""
        self.updates += 1
        if not self.shares_weights or self.gradients.reduced:
            increment_version(self.online_tensors)  # torch's fused optimisers do not count their writes
        compiled = self.compiled_update is not None and self.compiled_update.tau is not None
        if self.update_target is not None and not compiled:
            self.update_target(self.target_tensors, self.online_tensors, self.updates)
        if self.reset is not None and self.reset.due(self.updates):
            self.reset.apply((self.net, self.target), self.names, self.optimizer.moments, self.updates)
            report.stats["reset"] = self.reset.number(self.updates)
        return report

    def current_rate(self) -> float:
        """The learning rate of the next update."""
        return self.learning_rate * self.rate_factor * self.schedule(self.updates)

    def to_tensors(self, batch: Batch | Sequences) -> Tensors:
        """The batch on this learner's device, rewards scaled if the plan normalises them."""
        fields = self.transfer([(name, getattr(batch, name)) for name in batch.__slots__ if name != "ids"])
        rule = self.gradients.rule
        are_returns = rule is None and isinstance(batch, Batch)  # made of rewards that were scaled already
        if fields["reward"] is not None and not are_returns:
            fields["reward"] = self.normalize_reward(fields["reward"])
        next_obs = fields.get("next_obs")
        if next_obs is not None and next_obs.dtype == torch.uint8 and rule is not None and rule.needs_online:
            fields["next_obs"] = self.gradients.prepare(next_obs)  # once for both networks
        return Tensors(**fields)  # type: ignore[arg-type]

    def normalize_reward(self, reward: Tensor) -> Tensor:
        """Rewards, scaled and clipped if the plan normalises them."""
        if self.net.rewards is None:
            return reward
        return (reward * self.net.rewards.scale()).clamp(-LIMIT, LIMIT)

    def synced_tensors(self) -> list[Tensor]:
        """Weights, target network, buffers and moments: all that is equal in all learners at the start."""
        buffers = [buffer for buffer in (*self.net.buffers(), *self.target.buffers()) if buffer.is_floating_point()]
        return [*self.online_tensors, *self.target_tensors, *buffers, *chain(*self.optimizer.moments.values())]

    def weights(self) -> Any:
        """The weights to publish: references, so that they stay the newest."""
        return self.net.state_dict()

    def load_initial_weights(self, model: dict[str, Array]) -> None:
        """Start from these weights, target network included."""
        load_state_arrays(self.net, model)
        load_state_arrays(self.target, model)

    def is_finite(self) -> bool:
        """Whether all that is saved is finite: weights, target network and moments."""
        saved = [*self.net.state_dict().values(), *self.target_tensors, *chain(*self.optimizer.moments.values())]
        return all(bool(torch.isfinite(value).all()) for value in saved)

    def model_arrays(self) -> dict[str, Array]:
        """The online network, running normalisation included."""
        return state_arrays(self.net)

    def load_model_arrays(self, model: dict[str, Array]) -> None:
        """Write these weights into the online network, in place."""
        load_state_arrays(self.net, model)

    def optim_arrays(self) -> dict[str, Array]:
        """The target network and the optimiser's moments, by parameter name."""
        named = {f"target.{name}": value for name, value in state_arrays(self.target).items()}
        for key, moments in self.optimizer.moments.items():
            for name, value in zip(self.names, moments, strict=True):
                named[f"{key}.{name}"] = value.cpu().contiguous().numpy().copy()
        return named

    def load_optim_arrays(self, named: dict[str, Array]) -> None:
        """Load target network and moments, in place."""
        load_state_arrays(self.target, strip_prefix(named, "target."))
        for key, moments in self.optimizer.moments.items():
            saved = match_names(self.names, strip_prefix(named, f"{key}."))
            for name, value in zip(self.names, moments, strict=True):
                copy_array(f"{key}.{name}", value, saved[name])


def report_scaled(on_gradient: OnGradient, share: float, index: int, gradient: Tensor) -> None:
    """Report a gradient times `share`."""
    on_gradient(index, gradient * share)


def finite_report(metrics: list[float], priority: Tensor) -> Report:
    """The report of an update with this loss, gradient norm and mean value; refused if they are not finite."""
    loss, norm, value = metrics
    require_finite(loss, norm, value)
    return Report(loss, priority.cpu().numpy(), {"gradient_norm": norm, "value_mean": value})


def require_finite(loss: float, norm: float, value: float) -> None:
    """Raise `NonFiniteUpdate` unless all three are finite."""
    if not (math.isfinite(loss) and math.isfinite(norm) and math.isfinite(value)):
        raise NonFiniteUpdate(f"loss {loss}, gradient norm {norm}, mean value {value}")


def strip_prefix(named: dict[str, Array], prefix: str) -> dict[str, Array]:
    """The arrays whose names begin with the prefix, under their names without it."""
    return {name[len(prefix) :]: value for name, value in named.items() if name.startswith(prefix)}
