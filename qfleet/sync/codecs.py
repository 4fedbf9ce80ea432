"""Codecs: fewer bytes for a vector of gradients or weights. Shapes: D numbers, C chunks, K kept.

A codec answers the mean over all learners of what came through of their vectors, and what came through of one's own:
the rest is for error feedback (`average.py`). Numbers are sent in float32 or less, whatever they are computed in,
except by `Exact`. Most are `Packing`: what they send can be decoded anywhere, as in a server's shard.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from qfleet.sync.comm import Comm

Find: TypeAlias = Callable[[Tensor, int], Tensor]  # where so many numbers of a vector are that are worth sending


class Codec(Protocol):
    """One way to send a vector."""

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:  # [D] -> [D], [D]
        """What came through of our own values, and the mean of what came through of everybody's."""
        ...

    def forget(self) -> None:
        """Begin anew: what went through was not finite."""
        ...


@runtime_checkable
class Packing(Protocol):
    """A codec that sends parts of which one's vector can be told."""

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:  # -> [D] float32
        """What came through of a vector of so many numbers."""
        ...


class Exact:
    """Every number as it is."""

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """The true mean."""
        total = values.clone()
        comm.sum(total)
        return values, total.div_(comm.size)

    def forget(self) -> None:
        """It remembers nothing."""


class Half:
    """16 bits per number: float16 has more digits, bfloat16 the larger range."""

    def __init__(self, kind: torch.dtype) -> None:
        self.kind = kind

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Summed after decoding: sixteen bits are too few to add many numbers in. What is too large is scaled down."""
        scale = (values.abs().amax() / torch.finfo(self.kind).max).clamp_min(1.0).float().reshape(1)
        return exchanged(self, comm, values, ((values / scale).to(self.kind), scale))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Scaled up again."""
        small, scale = parts
        return small.view(self.kind).float() * scale

    def forget(self) -> None:
        """It remembers nothing."""


class Int8:
    """8 bits per number and a scale per chunk; rounded up or down by chance, so that the mean is right."""

    def __init__(self, chunk: int, rng: torch.Generator) -> None:
        self.chunk = chunk
        self.rng = rng

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """By the largest number of each chunk."""
        parts = in_chunks(values, self.chunk)
        scale = largest(parts) / 127.0
        drawn = torch.rand(parts.shape, generator=self.rng, dtype=torch.float32)
        small = torch.floor(parts / scale + drawn).clamp(-127, 127).to(torch.int8)
        return exchanged(self, comm, values, (small, scale))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Every chunk by its scale."""
        small, scale = parts
        return (small.float() * scale).flatten()[:num]

    def forget(self) -> None:
        """It remembers nothing."""


class Sign:
    """One bit per number, and the mean size of each chunk (Seide et al. 2014); learns only with error feedback."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Which side of zero."""
        parts = in_chunks(values, self.chunk)
        scale = parts.abs().sum(1, keepdim=True) / filled(values, self.chunk)
        return exchanged(self, comm, values, (pack_bits(parts >= 0), scale))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Plus or minus the size of the chunk."""
        bits, scale = parts
        signs = unpack_bits(bits, (len(scale), self.chunk)).float() * 2.0 - 1.0
        return (signs * scale).flatten()[:num]

    def forget(self) -> None:
        """It remembers nothing."""


class Ternary:
    """-1, 0 or 1 times the largest number of a chunk, by chance (TernGrad, Wen et al. 2017): two bits per number."""

    def __init__(self, chunk: int, rng: torch.Generator, clip_deviations: float = 2.5) -> None:
        self.chunk = chunk
        self.rng = rng
        self.clip_deviations = clip_deviations

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Numbers far out are clipped first, else all others become zero."""
        parts = in_chunks(values, self.chunk)
        num = filled(values, self.chunk)
        mean = parts.sum(1, keepdim=True) / num
        square = (parts * parts).sum(1, keepdim=True) / num
        limit = self.clip_deviations * (square - mean * mean).clamp(min=0.0).sqrt()
        parts = parts.clamp(-limit, limit)
        scale = largest(parts)
        kept = torch.rand(parts.shape, generator=self.rng, dtype=torch.float32) < parts.abs() / scale
        up = pack_bits(kept & (parts > 0))
        down = pack_bits(kept & (parts < 0))
        return exchanged(self, comm, values, (up, down, scale))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Up, down or nothing."""
        up, down, scale = parts
        ups, downs = (unpack_bits(bits, (len(scale), self.chunk)).float() for bits in (up, down))
        return ((ups - downs) * scale).flatten()[:num]

    def forget(self) -> None:
        """It remembers nothing."""


class TopK:
    """Only the largest numbers, with their places (Aji and Heafield 2017); `find` tells where so many of them are."""

    def __init__(self, share: float, find: Find | None = None) -> None:
        self.share = share
        self.find = find or largest_places

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """The `share` of numbers that is largest; all of them is exact."""
        num = max(1, round(self.share * len(values)))
        if num >= len(values):
            return Exact().mean(values, comm)
        return self.send(comm, values, self.find(values, num))

    def send(self, comm: Comm, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Only the numbers at these places."""
        return exchanged(self, comm, values, (places.to(torch.int32), values[places].float()))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Zero everywhere else."""
        places, numbers = parts
        whole = torch.zeros(num)
        whole[places.long()] = numbers
        return whole

    def forget(self) -> None:
        """It remembers nothing."""


def largest_places(values: Tensor, num: int) -> Tensor:  # [D] -> [K]
    """Exactly the largest."""
    return torch.topk(values.abs(), num, sorted=False).indices


def sampled_places(rng: torch.Generator, sample_share: float = 0.01) -> Find:
    """About the largest, by a threshold that a sample tells (Lin et al. 2018): no sorting of everything."""

    def find(values: Tensor, num: int) -> Tensor:
        sizes = values.abs()
        drawn = max(64, int(sample_share * len(values)))
        sample = sizes[torch.randint(len(values), (drawn,), generator=rng)]
        threshold = torch.quantile(sample.float(), 1.0 - num / len(values))
        found = torch.nonzero(sizes >= threshold).flatten()
        if len(found) > num:  # the sample was small: of those that pass the largest
            found = found[largest_places(sizes[found], num)]
        if not len(found):
            return largest_places(values, num)
        # Everybody sends as many: a place that is sent anyhow fills up.
        return torch.cat([found, found[-1:].expand(num - len(found))])

    return find


class PowerSgd:
    """Matrices as products of two thin ones, improved from step to step (Vogels et al. 2019); vectors stay exact.

    `shapes` are those of the tensors that the vector is made of.
    """

    def __init__(self, rank: int, shapes: list[tuple[int, ...]], rng: torch.Generator) -> None:
        self.rank = rank
        self.shapes = shapes
        self.rng = rng
        self.thin: dict[int, Tensor] = {}

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Everybody's matrices in the directions that were agreed on, of which the mean is that of the true mean."""
        exact = []
        through = []
        parts = []
        begin = 0
        for at, shape in enumerate(self.shapes):
            end = begin + int(np.prod(shape))
            part = values[begin:end]
            matrix = as_matrix(values[begin:end], shape)
            if matrix is None or self.rank * sum(matrix.shape) >= matrix.numel():
                exact.append((begin, end))
                own = mean = part
            else:
                own, mean = (found.flatten() for found in self.approximated(at, matrix, comm))
            through.append(own)
            parts.append(mean)
            begin = end
        found = torch.cat(parts)
        self.share_exact(found, exact, comm)
        return torch.cat(through), found

    def approximated(self, at: int, matrix: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """One's own and the mean, by one round of power iteration, begun where the last one ended."""
        if at not in self.thin:
            self.thin[at] = torch.randn((matrix.shape[1], self.rank), generator=self.rng).to(matrix)
        left = matrix @ self.thin[at]
        comm.sum(left)
        left = torch.linalg.qr(left).Q
        right = matrix.T @ left
        own = left @ right.T
        comm.sum(right)
        self.thin[at] = right / comm.size
        return own, left @ self.thin[at].T

    def share_exact(self, values: Tensor, places: list[tuple[int, int]], comm: Comm) -> None:
        """The mean of what is not approximated, in one piece."""
        if places:
            whole = torch.cat([values[begin:end] for begin, end in places])
            comm.sum(whole)
            whole /= comm.size
            for begin, end in places:
                values[begin:end] = whole[: end - begin]
                whole = whole[end - begin :]

    def forget(self) -> None:
        """Power iteration begins anew."""
        self.thin.clear()


# What codecs share


def mean_of(found: list[Tensor]) -> Tensor:
    """The mean, added up in the order of ranks."""
    total = found[0].clone()
    for other in found[1:]:
        total += other
    return total / len(found)


def filled(values: Tensor, chunk: int) -> Tensor:  # [D] -> [chunks, 1]
    """How many numbers of each chunk are not there only to fill it up."""
    return (len(values) - torch.arange(0, len(values), chunk)).clamp(max=chunk)[:, None]


def in_chunks(values: Tensor, chunk: int) -> Tensor:  # [D] -> [C, chunk]
    """As float32, the last chunk filled up with zeros."""
    missing = -len(values) % chunk
    return torch.nn.functional.pad(values.float(), (0, missing)).view(-1, chunk)


def largest(parts: Tensor) -> Tensor:  # [C, chunk] -> [C, 1]
    """The largest size in each chunk, never zero."""
    return parts.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def pack_bits(flags: Tensor) -> Tensor:
    """Eight to a byte."""
    return torch.from_numpy(np.packbits(flags.flatten().numpy()))


def unpack_bits(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """As they were."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=shape[0] * shape[1])).view(shape)


def exchanged(codec: Packing, comm: Comm, values: Tensor, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Send parts and decode everybody's: what came through of our own, and the mean."""
    everybody = zip(*(comm.gather(part) for part in parts), strict=True)
    found = [codec.decode(theirs, len(values)).to(values.dtype) for theirs in everybody]
    return codec.decode(parts, len(values)).to(values.dtype), mean_of(found)


def as_matrix(values: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """A tensor as rows of its first dimension; None for a vector."""
    return values.view(shape[0], -1) if len(shape) > 1 else None
