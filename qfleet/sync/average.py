"""Compressed all-reduce means with error feedback, a warm-up and a check of the codec. Shapes: D numbers.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): the compression error of a vector is added to the next one,
so that in the long run everything is sent: the decoded vectors and the remaining error add up to the vectors given, up
to rounding.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from qfleet.sync.codecs import Codec, Exact, PowerSgd
from qfleet.sync.comm import Comm

LogEvent = Callable[..., object]  # called with an event's kind and its fields


@dataclass(eq=False)
class CodedMean:
    """The mean over all ranks, sent through a codec."""

    comm: Comm
    codec: Codec
    _: KW_ONLY
    warm_rounds: int = 0
    check_every: int = 0
    least_cosine: float = 0.0
    log_event: LogEvent = lambda kind, **fields: None
    rounds: int = field(default=0, init=False)
    error: Tensor | None = field(default=None, init=False)

    def __call__(self, values: Tensor) -> Tensor:  # [D] -> [D]
        """The mean; exact during the warm-up, and then written into `values`, to save the copy of a large vector."""
        self.rounds += 1
        if isinstance(self.codec, Exact) or self.rounds <= self.warm_rounds:
            # An error is left only by a codec that was given up.
            total = values if self.error is None else values.add_(self.error)
            self.error = None
            self.comm.sum(total)
            return total.div_(self.comm.world_size)
        corrected = values if self.error is None else values + self.error
        if not bool(torch.isfinite(corrected).all()):
            corrected = torch.full_like(corrected, torch.nan)  # no codec drops all of it, so every rank notices
        own, mean = self.codec.mean(corrected, self.comm)
        if not bool(torch.isfinite(mean).all()):
            if isinstance(self.codec, PowerSgd):
                self.codec.reset()
            return mean  # the earlier error is kept: one bad vector must not spoil the following ones
        self.error = corrected - own
        if self.check_every and self.rounds % self.check_every == 0:
            self.check_codec(corrected, mean)
        return mean

    def check_codec(self, corrected: Tensor, mean: Tensor) -> None:
        """Compare with the true mean; if the directions differ too much, give the codec up and log it.

        The true mean is the same on all ranks, so all ranks decide alike.
        """
        true = Exact().mean(corrected, self.comm)[1]
        cosine = cosine_of(true, mean)
        self.log_event("codec_checked", rounds=self.rounds, cosine=round(cosine, 4), sent_bytes=self.comm.sent_bytes)
        if cosine < self.least_cosine:
            self.codec = Exact()
            self.log_event("codec_given_up", rounds=self.rounds, cosine=round(cosine, 4), least=self.least_cosine)


def cosine_of(one: Tensor, other: Tensor) -> float:
    """The cosine similarity of two vectors; 1 if both are zero."""
    sizes = float(torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other))
    return float(one @ other) / sizes if sizes else float(bool(torch.equal(one, other)))
