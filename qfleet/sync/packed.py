"""Compressed gradients as messages to parameter-server shards. Shapes: a shard's n of D numbers."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qfleet.data.wire_format import Arrays, Count, Message
from qfleet.sync.codecs import Codec, DecodableCodec
from qfleet.sync.comm import NoComm


class RecordingComm(NoComm):
    """Records the parts that a codec would send to other ranks, so that they can be sent to shards."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Tensor] = []

    def gather(self, values: Tensor) -> list[Tensor]:
        """This rank's values, recorded."""
        self.parts.append(values)
        return super().gather(values)

    def pop_parts(self) -> list[Tensor]:
        """The parts recorded since the last call; empty if the vector was not compressed."""
        parts = self.parts
        self.parts = []
        return parts


@dataclass(frozen=True, slots=True)
class PackedGradient:
    """A whole vector of `num` numbers as its codec sends it; the shard's numbers begin at `begin`."""

    parts: list[Tensor]
    num: int
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


class WholeGradient(Message):
    """A shard's part of a gradient, as it is."""


class EncodedGradient(Message):
    """A whole gradient of `num` numbers as its codec sends it; the shard's part begins at `begin`."""

    parts: Count
    num: Count
    begin: Count


GradientForm = WholeGradient | EncodedGradient


def pack_push(gradient: Tensor, packed: PackedGradient | None) -> tuple[GradientForm, Arrays]:  # [n]
    """What is pushed: the gradient as it is, or the compressed whole vector, if that has fewer bytes."""
    if packed is None or packed.nbytes >= gradient.nbytes:
        return WholeGradient(), {"whole": np.ascontiguousarray(gradient.numpy())}
    # NumPy has no bfloat16: send its bits.
    parts = [part.view(torch.int16) if part.dtype == torch.bfloat16 else part for part in packed.parts]
    arrays = {str(index): np.ascontiguousarray(part.numpy()) for index, part in enumerate(parts)}
    return EncodedGradient(len(parts), packed.num, packed.begin), arrays


def unpack_push(form: GradientForm, arrays: Arrays, codec: Codec, num: int) -> Tensor:  # [n]
    """The gradient of a shard with `num` numbers."""
    if isinstance(form, WholeGradient):
        return torch.from_numpy(arrays["whole"])
    if not isinstance(codec, DecodableCodec):
        raise ValueError("a compressed gradient, but no codec that can decode it")
    parts = [torch.from_numpy(arrays[str(index)]) for index in range(form.parts)]
    whole = codec.decode(parts, form.num)
    return whole[form.begin : form.begin + num].contiguous()
