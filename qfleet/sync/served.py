"""A learner's client of a parameter server, which holds the weights. Shapes: D numbers, n of them in a shard.

Each shard is reached by a `ShardConnection`. A learner clips its gradients before it sends them, because no shard knows
the norm of the whole gradient. The optimiser's moments are in the shards, with the weights.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import torch
from torch import Tensor

from qfleet.sync.average import CodedMean
from qfleet.sync.gradient_rule import Verdict, shard_bounds
from qfleet.sync.packed import PackedGradient, RecordingComm
from qfleet.sync.strategies import copy_into, flatten_tensors

Clip = Callable[[list[Tensor]], float]  # clips in place and returns the norm before


class PushRefused(Exception):
    """The gradient was too stale. The newest weights have been pulled: compute another one from the same batch."""


class ShardConnection(Protocol):
    """A connection to one shard."""

    sent_bytes: int  # of gradients, so far

    def push(
        self, gradient: Tensor, sequence: int, version: int, rate: float, packed: PackedGradient | None = None
    ) -> None:  # [n]
        """Send a gradient that was computed from this version of the shard's weights.

        `packed` is the same gradient compressed, if there is a codec: for connections where bytes matter.
        """

    def reply(self) -> tuple[Verdict, int, Tensor]:
        """The verdict on the push, and the newest version and weights [n]; CommLost after the timeout."""


@dataclass(eq=False)
class ServerClient:
    """Pushes gradients and pulls weights: a `Sync`."""

    connections: Sequence[ShardConnection]
    clip: Clip
    rate: Callable[[], float]
    average: CodedMean
    weights: Sequence[Tensor]
    _: KW_ONLY
    drops_stale: bool = False  # is a stale gradient dropped, or computed again?

    def __post_init__(self) -> None:
        self.bounds = shard_bounds(sum(weight.numel() for weight in self.weights), len(self.connections))
        self.versions = [0] * len(self.connections)
        self.sequence = 0
        self.recorder = self.average.comm if isinstance(self.average.comm, RecordingComm) else RecordingComm()
        self.pending = list(range(len(self.connections)))  # shards that have not accepted this batch's gradient yet

    def step(self, gradients: list[Tensor]) -> float:
        """Push to all pending shards and pull from them; returns this gradient's norm, or NaN if it was skipped."""
        norm = self.clip(gradients)
        earlier_error = self.average.error
        vector = flatten_tensors(gradients)
        # A gradient that is not finite is pushed as NaN: shards may be waiting for this learner.
        vector = self.average(vector) if math.isfinite(norm) else torch.full_like(vector, math.nan)
        self.sequence += 1
        parts = self.recorder.pop_parts()
        for shard in self.pending:
            begin, end = self.bounds[shard]
            packed = PackedGradient(parts, len(vector), begin) if parts else None
            self.connections[shard].push(vector[begin:end], self.sequence, self.versions[shard], self.rate(), packed)
        verdicts = self.pull()
        accepted = [shard for shard, verdict in verdicts.items() if verdict in ("applied", "waiting")]
        self.restore_error(earlier_error, accepted)
        self.pending = [shard for shard, verdict in verdicts.items() if verdict == "stale" and not self.drops_stale]
        if self.pending:
            raise PushRefused
        self.pending = list(range(len(self.connections)))
        return math.nan if "skipped" in verdicts.values() else norm

    def restore_error(self, before: Tensor | None, accepted: Sequence[int]) -> None:
        """Restore the earlier compression error for the shards that did not accept the gradient."""
        after = self.average.error
        if (before is None and after is None) or len(accepted) == len(self.connections):
            return
        restored = torch.zeros(self.bounds[-1][1]) if before is None else before.clone()
        for shard in accepted:
            begin, end = self.bounds[shard]
            restored[begin:end] = 0.0 if after is None else after[begin:end]
        self.average.error = restored

    def pull(self) -> dict[int, Verdict]:
        """Receive the replies and the newest weights of all pending shards; returns their verdicts."""
        whole = flatten_tensors(self.weights)
        verdicts = dict[int, Verdict]()
        for shard in self.pending:
            begin, end = self.bounds[shard]
            verdicts[shard], self.versions[shard], whole[begin:end] = self.connections[shard].reply()
        copy_into(whole, self.weights)
        return verdicts
