"""Plasticity: resets, annealed returns, and the share of dormant units. Shapes: N items, W rows.

A network that is trained often on little data becomes unable to learn more (primacy bias, Nikishin et al. 2022). Resets
and annealing are functions of the number of updates, so they have no state.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.data import Batch, Sequences
from qfleet.nets import QNet, dormant_fraction, record_activations, refresh_spectral_norms
from qfleet.plan.schema import Algo, ExponentialAnneal, PeriodicReset
from qfleet.replay import NStepReturn, Replay, SequenceCut

Fresh = Callable[[int], nn.Module]  # the number of a reset -> a network with new weights

# enough to estimate the share of dormant units, cheap enough for every progress row
SAMPLED_STEPS = 32
SAMPLED_WINDOWS = 4


@dataclass(frozen=True)
class Reset:
    """A new head every `every_updates`; the torso keeps the share `keep` (Schwarzer et al. 2023, section 3.2)."""

    every_updates: int
    keep: float
    fresh: Fresh

    def due(self, updates: int) -> bool:
        """Whether a reset follows this update."""
        return updates % self.every_updates == 0

    def number(self, updates: int) -> int:
        """The number of resets so far."""
        return updates // self.every_updates

    def keep_fraction(self, name: str) -> float:
        """The share of a parameter that is kept."""
        return 0.0 if name.startswith("head.") else self.keep

    @torch.no_grad()
    def apply(
        self, nets: Iterable[nn.Module], names: list[str], moments: dict[str, list[Tensor]], updates: int
    ) -> None:
        """theta <- keep theta + (1 - keep) fresh in every network; the moments of changed parameters become zero.

        Online and target network use the same fresh weights, so that they stay close to each other.
        """
        fresh = dict(self.fresh(self.number(updates)).named_parameters())
        changed = [name for name in names if self.keep_fraction(name) < 1.0]
        for net in nets:
            own = dict(net.named_parameters())
            for name in changed:
                own[name].mul_(self.keep_fraction(name)).add_(
                    fresh[name].to(own[name].device), alpha=1.0 - self.keep_fraction(name)
                )
            refresh_spectral_norms(net)
        for values in moments.values():
            torch._foreach_zero_(
                [value for name, value in zip(names, values, strict=True) if self.keep_fraction(name) < 1.0]
            )


def make_reset(plan: PeriodicReset, fresh: Fresh | None) -> Reset:
    """The plan's resets."""
    if fresh is None:
        raise ValueError("a reset needs a function that makes fresh weights")
    return Reset(plan.every_updates, plan.keep, fresh)


@dataclass(frozen=True)
class Anneal:
    """n and gamma change exponentially from `start` to `end`, starting again after each reset.

    n = n_end (n_start / n_end)^left, rounded; 1 - gamma likewise; `left` falls from 1 to 0 over `updates`.
    """

    start: NStepReturn
    end: NStepReturn
    updates: int
    every_updates: int | None = None  # between resets

    def n_step(self, updates: int) -> NStepReturn:
        """n and gamma after this number of updates."""
        since = updates if self.every_updates is None else updates % self.every_updates
        left = max(0.0, 1.0 - since / self.updates)
        if left == 0.0:
            return self.end
        if left == 1.0:
            return self.start
        n = round(interpolate_exponentially(self.start.n, self.end.n, left))
        return replace(
            self.end, n=n, gamma=1.0 - interpolate_exponentially(1.0 - self.start.gamma, 1.0 - self.end.gamma, left)
        )


def interpolate_exponentially(start: float, end: float, left: float) -> float:
    """Exponentially from `start` (left = 1) to `end` (left = 0)."""
    return math.exp(left * math.log(start / end)) * end


def make_anneal(algo: Algo, end: NStepReturn) -> Anneal | None:
    """The plan's annealing, if any, towards the plan's own n and gamma."""
    if not isinstance(algo.anneal, ExponentialAnneal):
        return None
    start = replace(end, n=algo.anneal.n_step, gamma=algo.anneal.discount)
    every = algo.reset.every_updates if isinstance(algo.reset, PeriodicReset) else None
    return Anneal(start, end, algo.anneal.updates, every)


def dormant_units(net: QNet, replay: Replay) -> float | None:
    """The share of dormant units, on items spread evenly over the replay: no random number is drawn.

    `net` must be a policy's: without dropout and noise, with even fractions. None without items or ReLUs.
    """
    if not len(replay):
        return None
    num = SAMPLED_WINDOWS if isinstance(replay.cut, SequenceCut) else SAMPLED_STEPS
    serials = np.linspace(replay.tail, replay.head - 1, min(num, len(replay))).astype(np.int64)
    items = replay.read_batch(serials, np.ones(len(serials), np.float32))
    # A user's torso may draw random numbers nevertheless.
    with torch.inference_mode(), torch.random.fork_rng(devices=[]), record_activations() as activations:
        forward_items(net, items, next(net.parameters()).device)
    return dormant_fraction(activations) if activations else None


def forward_items(net: QNet, items: Batch | Sequences, device: torch.device) -> None:
    """Run a network on items."""
    obs = torch.from_numpy(items.obs).to(device)
    if isinstance(items, Batch):
        net(obs)
    elif net.memory is None:  # windows of fresh rows, each row a separate item
        rows = obs.flatten(0, 1)
        net(rows[torch.linspace(0, len(rows) - 1, min(SAMPLED_STEPS, len(rows)), device=device).long()])
    else:
        rest = (items.action, items.gain, items.last, items.state)
        net.unroll(obs, *(torch.from_numpy(part).to(device) for part in rest))
