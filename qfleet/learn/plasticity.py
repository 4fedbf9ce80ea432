"""Keeping a network able to learn: resets, annealed returns, and how much of it sleeps. Shapes: N items, W rows.

A network that is trained often on little data grows unable to learn more (primacy bias, Nikishin et al. 2022). Resets
and annealing are functions of the number of updates, so they need no memory of their own.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.data import Batch, Sequences
from qfleet.nets import QNet, dormant_share, settle_norms, watching
from qfleet.plan.schema import Algo, ExponentialAnneal, PeriodicReset
from qfleet.replay import Fold, Replay, SequenceCut

Fresh = Callable[[int], nn.Module]  # the number of a reset -> a network with new weights

# enough to see who sleeps, cheap enough for every row
LOOKED_AT_STEPS = 32
LOOKED_AT_WINDOWS = 4


@dataclass(frozen=True)
class Reset:
    """Every so many updates: a new head, and `keep` of what lies before it (Schwarzer et al. 2023, section 3.2)."""

    every_updates: int
    keep: float
    fresh: Fresh

    def due(self, updates: int) -> bool:
        """Is there one after so many updates?"""
        return updates % self.every_updates == 0

    def number(self, updates: int) -> int:
        """How many there were."""
        return updates // self.every_updates

    def kept(self, name: str) -> float:
        """The share of a parameter that stays."""
        return 0.0 if name.startswith("head.") else self.keep

    @torch.no_grad()
    def apply(
        self, nets: Iterable[nn.Module], names: list[str], moments: dict[str, list[Tensor]], updates: int
    ) -> None:
        """theta <- keep theta + (1 - keep) fresh in every network, and moments of zero for what has moved.

        Online and target network move towards the same fresh weights, so that they stay neighbours.
        """
        fresh = dict(self.fresh(self.number(updates)).named_parameters())
        moved = [name for name in names if self.kept(name) < 1.0]
        for net in nets:
            own = dict(net.named_parameters())
            for name in moved:
                own[name].mul_(self.kept(name)).add_(fresh[name].to(own[name].device), alpha=1.0 - self.kept(name))
            settle_norms(net)
        for values in moments.values():
            torch._foreach_zero_([value for name, value in zip(names, values, strict=True) if self.kept(name) < 1.0])


def make_reset(algo: Algo, fresh: Fresh | None) -> Reset | None:
    """The reset the plan describes, if any."""
    if not isinstance(algo.reset, PeriodicReset):
        return None
    if fresh is None:
        raise ValueError("a reset needs to know where fresh weights come from")
    return Reset(algo.reset.every_updates, algo.reset.keep, fresh)


@dataclass(frozen=True)
class Anneal:
    """n and gamma move exponentially from `start` to `end`, beginning again after each reset.

    n = n_end (n_start / n_end)^left, rounded; 1 - gamma likewise; `left` falls from 1 to 0 over `updates`.
    """

    start: Fold
    end: Fold
    updates: int
    every_updates: int | None = None  # between resets

    def fold(self, updates: int) -> Fold:
        """How rewards are summed after so many updates."""
        since = updates if self.every_updates is None else updates % self.every_updates
        left = max(0.0, 1.0 - since / self.updates)
        if left == 0.0:
            return self.end
        if left == 1.0:
            return self.start
        n = round(between(self.start.n, self.end.n, left))
        return replace(self.end, n=n, gamma=1.0 - between(1.0 - self.start.gamma, 1.0 - self.end.gamma, left))


def between(start: float, end: float, left: float) -> float:
    """Exponentially from `start` (left = 1) to `end` (left = 0)."""
    return math.exp(left * math.log(start / end)) * end


def make_anneal(algo: Algo, end: Fold) -> Anneal | None:
    """The annealing the plan describes, if any, towards the plan's own way to sum rewards."""
    if not isinstance(algo.anneal, ExponentialAnneal):
        return None
    start = replace(end, n=algo.anneal.n_step, gamma=algo.anneal.discount)
    every = algo.reset.every_updates if isinstance(algo.reset, PeriodicReset) else None
    return Anneal(start, end, algo.anneal.updates, every)


def dormant_units(net: QNet, replay: Replay) -> float | None:
    """Share of units that hardly ever fire, on items spread evenly over the replay: nothing is drawn by chance.

    `net` must be one that acts: no dropout, even fractions, its noise off. None when there is nothing to see.
    """
    if not len(replay):
        return None
    num = LOOKED_AT_WINDOWS if isinstance(replay.cut, SequenceCut) else LOOKED_AT_STEPS
    serials = np.linspace(replay.tail, replay.head - 1, min(num, len(replay))).astype(np.int64)
    items = replay.take(serials, np.ones(len(serials), np.float32))
    # A torso of the user's own may draw even so.
    with torch.inference_mode(), torch.random.fork_rng(devices=[]), watching() as seen:
        show(net, items, next(net.parameters()).device)
    return dormant_share(seen) if seen else None


def show(net: QNet, items: Batch | Sequences, device: torch.device) -> None:
    """Let a network look at items."""
    obs = torch.from_numpy(items.obs).to(device)
    if isinstance(items, Batch):
        net(obs)
    elif net.memory is None:  # windows of fresh rows, each a step of its own
        rows = obs.flatten(0, 1)
        net(rows[torch.linspace(0, len(rows) - 1, min(LOOKED_AT_STEPS, len(rows)), device=device).long()])
    else:
        rest = (items.action, items.gain, items.last, items.state)
        net.unroll(obs, *(torch.from_numpy(part).to(device) for part in rest))
