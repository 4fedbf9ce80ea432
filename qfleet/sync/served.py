"""A learner whose weights live in a parameter server. Shapes: D numbers, n of them in a shard.

Each shard is reached by a `ShardConnection`. A learner clips its gradients before it sends them, because no shard knows
the norm of the whole gradient. Moments live with the weights, in the shards.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from qfleet.sync.average import CodedMean
from qfleet.sync.packed import PackedGradient, Packet
from qfleet.sync.shard import Verdict, cuts_of
from qfleet.sync.strategies import flat, place

Clip = Callable[[list[Tensor]], float]  # in place; answers the norm before


class PushRefused(Exception):
    """The gradient was too old: the newest weights are here now, compute another one from the same batch."""


class ShardConnection(Protocol):
    """The way to one shard."""

    sent_bytes: int  # of gradients, so far

    def push(
        self, gradient: Tensor, sequence: int, version: int, rate: float, packed: PackedGradient | None = None
    ) -> None:  # [n]
        """Hand a gradient over that was computed from this version of the shard's weights.

        `packed` says the same in fewer bytes, if a codec was at work: for ways where bytes are dear.
        """
        ...

    def reply(self) -> tuple[Verdict, int, Tensor]:
        """What became of it, and the newest version and weights [n]; CommLost if nobody answers in time."""
        ...


class ServerClient:
    """Pushes and pulls; a step in the sense of `Sync`."""

    def __init__(
        self,
        ports: Sequence[ShardConnection],
        clip: Clip,
        rate: Callable[[], float],
        average: CodedMean,
        weights: Sequence[Tensor],
        *,
        drops: bool = False,
    ) -> None:
        self.ports = ports
        self.clip = clip
        self.rate = rate
        self.average = average
        self.weights = weights
        self.cuts = cuts_of(sum(weight.numel() for weight in weights), len(ports))
        self.versions = [0] * len(ports)
        self.sequence = 0
        self.packet = average.comm if isinstance(average.comm, Packet) else Packet()
        self.drops = drops  # is a gradient that came too late done without, or computed anew?
        self.pending = list(range(len(ports)))  # shards that have not taken this batch's gradient yet

    def step(self, gradients: list[Tensor]) -> float:
        """Push to whom it is new, pull from the same; the norm of our own gradient, or NaN if nobody made a step."""
        norm = self.clip(gradients)
        left_out = self.average.error
        # Everybody must hear that there is nothing to be had from us: some wait for us.
        vector = self.average(flat(gradients)) if math.isfinite(norm) else torch.full_like(flat(gradients), math.nan)
        self.sequence += 1
        parts = self.packet.take()
        for at in self.pending:
            begin, end = self.cuts[at]
            packed = PackedGradient(parts, len(vector), begin) if parts else None
            self.ports[at].push(vector[begin:end], self.sequence, self.versions[at], self.rate(), packed)
        verdicts = self.pull()
        self.keep_error(left_out, [at for at, verdict in verdicts.items() if verdict in ("applied", "waiting")])
        self.pending = [at for at, verdict in verdicts.items() if verdict == "stale" and not self.drops]
        if self.pending:
            raise PushRefused
        self.pending = list(range(len(self.ports)))
        return math.nan if "skipped" in verdicts.values() else norm

    def keep_error(self, before: Tensor | None, taken: Sequence[int]) -> None:
        """Where a shard has taken nothing, what was left out before is still all that is left out."""
        after = self.average.error
        if (before is None and after is None) or len(taken) == len(self.ports):
            return
        kept = torch.zeros(self.cuts[-1][1]) if before is None else before.clone()
        for at in taken:
            begin, end = self.cuts[at]
            kept[begin:end] = 0.0 if after is None else after[begin:end]
        self.average.error = kept

    def pull(self) -> dict[int, Verdict]:
        """Take everybody's answer; what became of our gradient in each shard."""
        whole = flat(self.weights)
        verdicts = dict[int, Verdict]()
        for at in self.pending:
            (begin, end) = self.cuts[at]
            (verdicts[at], self.versions[at], newest) = self.ports[at].reply()
            whole[begin:end] = newest
        place(whole, self.weights)
        return verdicts
