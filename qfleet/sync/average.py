"""Means over all learners through a codec, with error feedback, a warm-up and a guard. Shapes: D numbers.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what a codec leaves out of a vector is added to the next
one, so that in the long run everything is sent: the sum of what came through and what is left equals the sum of what
was given, exactly as far as numbers go.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qfleet.sync.codecs import Codec, Exact
from qfleet.sync.comm import Comm

Tell = Callable[..., object]


class CodedMean:
    """The mean of everybody's vector."""

    def __init__(
        self,
        comm: Comm,
        codec: Codec,
        *,
        warm_rounds: int = 0,
        check_every: int = 0,
        least_cosine: float = 0.0,
        tell: Tell = lambda kind, **fields: None,
    ) -> None:
        self.comm = comm
        self.codec = codec
        self.warm_rounds = warm_rounds
        self.check_every = check_every
        self.least_cosine = least_cosine
        self.tell = tell
        self.rounds = 0
        self.error: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:  # [D] -> [D]
        """The mean; exact while it warms up, and then written over `values`: large vectors are dear to copy."""
        self.rounds += 1
        if isinstance(self.codec, Exact) or self.rounds <= self.warm_rounds:
            # by a codec that was given up
            owed = self.error
            self.error = None
            total = values if owed is None else values.add_(owed)
            self.comm.sum(total)
            return total.div_(self.comm.size)
        wanted = values if self.error is None else values + self.error
        if not bool(torch.isfinite(wanted).all()):
            wanted = torch.full_like(wanted, torch.nan)  # no codec leaves all of it out: everybody hears of it
        own, mean = self.codec.mean(wanted, self.comm)
        if not bool(torch.isfinite(mean).all()):
            self.codec.forget()  # what was left out before is kept: one bad vector shall not spoil all that follow
            return mean
        self.error = wanted - own
        if self.check_every and self.rounds % self.check_every == 0:
            self.look(wanted, mean)
        return mean

    def look(self, wanted: Tensor, mean: Tensor) -> None:
        """Compare with the true mean; one that points elsewhere ends the compression, for everybody and loudly.

        The true mean is the same everywhere and so is the verdict: nobody goes on compressing alone.
        """
        true = Exact().mean(wanted, self.comm)[1]
        cosine = cosine_of(true, mean)
        self.tell("codec_checked", rounds=self.rounds, cosine=round(cosine, 4), sent_bytes=self.comm.sent_bytes)
        if cosine < self.least_cosine:
            self.codec = Exact()
            self.tell("codec_given_up", rounds=self.rounds, cosine=round(cosine, 4), least=self.least_cosine)


def cosine_of(one: Tensor, other: Tensor) -> float:
    """How much two vectors point the same way, from -1 to 1; two that are zero do."""
    sizes = float(torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other))
    return float(one @ other) / sizes if sizes else float(bool(torch.equal(one, other)))
