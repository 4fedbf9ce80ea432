"""Gradients on their way to a server's shards in as few bytes as their codec makes of them. Shapes: n of D numbers."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qfleet.data.wire_format import Facts, to_bytes, unpack
from qfleet.sync.codecs import Codec, Packing
from qfleet.sync.comm import NoComm


class Packet(NoComm):
    """Where a codec puts what it would send to others: a server's shards are told the same."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Tensor] = []

    def gather(self, values: Tensor) -> list[Tensor]:
        """One's own, kept."""
        self.parts.append(values)
        return super().gather(values)

    def take(self) -> list[Tensor]:
        """What was put here since this was last asked; nothing, if the vector went as it is."""
        taken = self.parts
        self.parts = []
        return taken


@dataclass(frozen=True, slots=True)
class PackedGradient:
    """A whole vector of `num` numbers as its codec sends it; a shard's part begins at `begin`."""

    parts: list[Tensor]
    num: int
    begin: int

    @property
    def nbytes(self) -> int:
        """In all."""
        return sum(part.nbytes for part in self.parts)


def push_parcel(gradient: Tensor, packed: PackedGradient | None) -> bytes:  # [n]
    """A gradient as it is, or its whole vector as the codec sends that, if those are fewer bytes."""
    if packed is None or packed.nbytes >= gradient.nbytes:
        return to_bytes({}, {"whole": np.ascontiguousarray(gradient.numpy())})
    # numpy knows no bfloat16: its bits travel.
    parts = [part.view(torch.int16) if part.dtype == torch.bfloat16 else part for part in packed.parts]
    facts: Facts = {"parts": len(parts), "num": packed.num, "begin": packed.begin}
    return to_bytes(facts, {str(at): np.ascontiguousarray(part.numpy()) for at, part in enumerate(parts)})


def pushed(parcel: bytes, codec: Codec, num: int, limit_bytes: int) -> Tensor:  # [n]
    """The gradient of a shard with so many numbers."""
    facts, arrays = unpack(parcel, limit_bytes=limit_bytes)
    if "whole" in arrays:
        return torch.from_numpy(arrays["whole"])
    if not isinstance(codec, Packing):
        raise ValueError("a packed gradient, but no codec that packs")
    parts = [torch.from_numpy(arrays[str(at)]) for at in range(int(facts["parts"]))]  # type: ignore[arg-type]
    whole = codec.decode(parts, int(facts["num"]))  # type: ignore[arg-type]
    begin = int(facts["begin"])  # type: ignore[arg-type]
    return whole[begin : begin + num].contiguous()
