"""Codecs: lossy compression of a vector of gradients or weights. Shapes: D numbers, C chunks, K kept.

A codec returns this rank's vector as the others decode it, and the mean of all decoded vectors; the difference to the
given vector is for error feedback (`average.py`). Numbers are sent in float32 or less, whatever they are computed in,
except by `Exact`. Most are `DecodableCodec`: their parts can be decoded anywhere, as in a parameter-server shard.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from qfleet.sync.comm import Comm

SelectIndices: TypeAlias = Callable[[Tensor, int], Tensor]  # a vector and K -> the indices of K numbers to send


class Codec(Protocol):
    """One way to compress a vector."""

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:  # [D] -> [D], [D]
        """This rank's decoded values, and the mean of all ranks' decoded values."""


@runtime_checkable
class DecodableCodec(Protocol):
    """A codec that sends parts from which the sender's vector can be decoded."""

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:  # -> [D] float32
        """The decoded vector of `num` numbers."""


class Exact:
    """No compression."""

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """The true mean."""
        total = values.clone()
        comm.sum(total)
        return values, total.div_(comm.world_size)


class Half:
    """16 bits per number: float16 has more digits, bfloat16 the larger range."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Scale large values down into range; sum after decoding, because 16 bits are too few for sums."""
        scale = (values.abs().amax() / torch.finfo(self.dtype).max).clamp_min(1.0).float().reshape(1)
        return gather_and_decode(self, comm, values, ((values / scale).to(self.dtype), scale))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Undo the scaling."""
        small, scale = parts
        return small.view(self.dtype).float() * scale


class Int8:
    """8 bits per number and a scale per chunk; stochastic rounding keeps the mean unbiased."""

    def __init__(self, chunk: int, rng: torch.Generator) -> None:
        self.chunk = chunk
        self.rng = rng

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Scale by the largest magnitude of each chunk."""
        parts = in_chunks(values, self.chunk)
        scale = largest(parts) / 127.0
        drawn = torch.rand(parts.shape, generator=self.rng, dtype=torch.float32)
        small = torch.floor(parts / scale + drawn).clamp(-127, 127).to(torch.int8)
        return gather_and_decode(self, comm, values, (small, scale))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Multiply every chunk by its scale."""
        small, scale = parts
        return (small.float() * scale).flatten()[:num]


class Sign:
    """One bit per number, and the mean magnitude of each chunk (Seide et al. 2014); learns only with error feedback."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Send the signs."""
        parts = in_chunks(values, self.chunk)
        scale = parts.abs().sum(1, keepdim=True) / chunk_lengths(values, self.chunk)
        return gather_and_decode(self, comm, values, (pack_bits(parts >= 0), scale))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Plus or minus the chunk's mean magnitude."""
        bits, scale = parts
        signs = unpack_bits(bits, (len(scale), self.chunk)).float() * 2.0 - 1.0
        return (signs * scale).flatten()[:num]


class Ternary:
    """-1, 0 or 1 times the largest magnitude of a chunk, drawn at random (TernGrad, Wen et al. 2017): two bits each."""

    def __init__(self, chunk: int, rng: torch.Generator, clip_deviations: float = 2.5) -> None:
        self.chunk = chunk
        self.rng = rng
        self.clip_deviations = clip_deviations

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Clip outliers first, else all others become zero."""
        parts = in_chunks(values, self.chunk)
        num = chunk_lengths(values, self.chunk)
        mean = parts.sum(1, keepdim=True) / num
        square = (parts * parts).sum(1, keepdim=True) / num
        limit = self.clip_deviations * (square - mean * mean).clamp(min=0.0).sqrt()
        parts = parts.clamp(-limit, limit)
        scale = largest(parts)
        kept = torch.rand(parts.shape, generator=self.rng, dtype=torch.float32) < parts.abs() / scale
        up = pack_bits(kept & (parts > 0))
        down = pack_bits(kept & (parts < 0))
        return gather_and_decode(self, comm, values, (up, down, scale))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Plus, minus or zero."""
        up, down, scale = parts
        ups, downs = (unpack_bits(bits, (len(scale), self.chunk)).float() for bits in (up, down))
        return ((ups - downs) * scale).flatten()[:num]


class TopK:
    """Only the largest numbers, with their indices (Aji and Heafield 2017), which `select` finds."""

    def __init__(self, share: float, select: SelectIndices | None = None) -> None:
        self.share = share
        self.select = select or largest_indices

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Send the `share` of numbers with the largest magnitude; a share of one is exact."""
        num = max(1, round(self.share * len(values)))
        if num >= len(values):
            return Exact().mean(values, comm)
        return self.send(comm, values, self.select(values, num))

    def send(self, comm: Comm, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Send the numbers at these indices."""
        return gather_and_decode(self, comm, values, (indices.to(torch.int32), values[indices].float()))

    def decode(self, parts: Sequence[Tensor], num: int) -> Tensor:
        """Zero everywhere else."""
        indices, numbers = parts
        whole = torch.zeros(num)
        whole[indices.long()] = numbers
        return whole


def largest_indices(values: Tensor, num: int) -> Tensor:  # [D] -> [K]
    """The indices of exactly the largest magnitudes."""
    return torch.topk(values.abs(), num, sorted=False).indices


def sampled_indices(rng: torch.Generator, sample_share: float = 0.01) -> SelectIndices:
    """Selects about the largest, by a threshold estimated from a sample (Lin et al. 2018): no sorting of everything."""

    def select(values: Tensor, num: int) -> Tensor:
        sizes = values.abs()
        drawn = max(64, int(sample_share * len(values)))
        sample = sizes[torch.randint(len(values), (drawn,), generator=rng)]
        threshold = torch.quantile(sample.float(), 1.0 - num / len(values))
        found = torch.nonzero(sizes >= threshold).flatten()
        if len(found) > num:  # the estimate was too low
            found = found[largest_indices(sizes[found], num)]
        if not len(found):
            return largest_indices(values, num)
        # All ranks must send equally many: repeat the last index.
        return torch.cat([found, found[-1:].expand(num - len(found))])

    return select


class PowerSgd:
    """Low-rank products instead of matrices, improved from step to step (Vogels et al. 2019); vectors stay exact.

    `shapes` are those of the tensors that the vector is made of.
    """

    def __init__(self, rank: int, shapes: list[tuple[int, ...]], rng: torch.Generator) -> None:
        self.rank = rank
        self.shapes = shapes
        self.rng = rng
        self.right_factors: dict[int, Tensor] = {}

    def mean(self, values: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Project all ranks' matrices on common directions: the mean of the projections is that of the true mean."""
        exact = []
        own_parts = []
        mean_parts = []
        begin = 0
        for index, shape in enumerate(self.shapes):
            end = begin + int(np.prod(shape))
            own = mean = values[begin:end]
            matrix = own.view(shape[0], -1) if len(shape) > 1 else own
            if len(shape) < 2 or self.rank * sum(matrix.shape) >= matrix.numel():
                exact.append((begin, end))
            else:
                own, mean = (found.flatten() for found in self.approximate(index, matrix, comm))
            own_parts.append(own)
            mean_parts.append(mean)
            begin = end
        found = torch.cat(mean_parts)
        self.average_exact(found, exact, comm)
        return torch.cat(own_parts), found

    def approximate(self, index: int, matrix: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """This rank's approximation and the mean, by one power iteration that starts from the last one's result."""
        if index not in self.right_factors:
            self.right_factors[index] = torch.randn((matrix.shape[1], self.rank), generator=self.rng).to(matrix)
        left = matrix @ self.right_factors[index]
        comm.sum(left)
        left = torch.linalg.qr(left).Q
        right = matrix.T @ left
        own = left @ right.T
        comm.sum(right)
        self.right_factors[index] = right / comm.world_size
        return own, left @ self.right_factors[index].T

    def average_exact(self, values: Tensor, ranges: list[tuple[int, int]], comm: Comm) -> None:
        """Average the ranges that are not approximated, in one message."""
        if ranges:
            whole = torch.cat([values[begin:end] for begin, end in ranges])
            comm.sum(whole)
            whole /= comm.world_size
            for begin, end in ranges:
                values[begin:end] = whole[: end - begin]
                whole = whole[end - begin :]

    def reset(self) -> None:
        """Start power iteration from random matrices again."""
        self.right_factors.clear()


# Functions of several codecs


def mean_of(found: list[Tensor]) -> Tensor:
    """The mean, summed in the order of ranks."""
    total = found[0].clone()
    for other in found[1:]:
        total += other
    return total / len(found)


def chunk_lengths(values: Tensor, chunk: int) -> Tensor:  # [D] -> [chunks, 1]
    """The number of values in each chunk, without padding."""
    return (len(values) - torch.arange(0, len(values), chunk)).clamp(max=chunk)[:, None]


def in_chunks(values: Tensor, chunk: int) -> Tensor:  # [D] -> [C, chunk]
    """As float32, the last chunk padded with zeros."""
    missing = -len(values) % chunk
    return torch.nn.functional.pad(values.float(), (0, missing)).view(-1, chunk)


def largest(parts: Tensor) -> Tensor:  # [C, chunk] -> [C, 1]
    """The largest magnitude of each chunk, never zero."""
    return parts.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def pack_bits(flags: Tensor) -> Tensor:
    """Eight flags to a byte."""
    return torch.from_numpy(np.packbits(flags.flatten().numpy()))


def unpack_bits(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """The flags of `pack_bits`."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=shape[0] * shape[1])).view(shape)


def gather_and_decode(
    codec: DecodableCodec, comm: Comm, values: Tensor, parts: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """All-gather the parts and decode them: this rank's decoded values, and the mean of all."""
    gathered = zip(*(comm.gather(part) for part in parts), strict=True)
    decoded = [codec.decode(each, len(values)).to(values.dtype) for each in gathered]
    return codec.decode(parts, len(values)).to(values.dtype), mean_of(decoded)
