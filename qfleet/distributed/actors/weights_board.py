"""The board: the newest weights and a few numbers in shared memory, written by one process and read by many.

Two buffers are written in turn, each with its version and a checksum over version and content. A reader copies the
newer one, checks the copy, and only then lets it replace the weights in use. Stores of the writer may reach a reader in
any order, and the writer may overwrite what is being read (if it publishes twice meanwhile): either way the checksum of
the copy is wrong, and the reader tries again later. The numbers beside the weights are kept in that way too.
"""

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qfleet.act.policy import NonFiniteValues
from qfleet.data import Array
from qfleet.data.wire_format import checksum
from qfleet.learn.transfer import numbers
from qfleet.system.shared_memory import LINE, SharedMemory, lines

Weights: TypeAlias = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]  # of one network, or of each member

HEADER = struct.Struct("=QQ")  # version, checksum


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies in the flat bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """How weights lie in flat bytes: one network's, or those of each member of a population."""

    members: tuple[tuple[TensorPlace, ...], ...]
    alone: bool
    size: int

    def views(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """The tensors that these bytes are."""
        return [
            {
                piece.name: flat[piece.begin : piece.end].view(piece.dtype).as_strided(piece.shape, piece.stride)
                for piece in member
            }
            for member in self.members
        ]

    def tensors(self, weights: Weights) -> list[Tensor]:
        """Weights in the order of the layout."""
        members = [weights] if isinstance(weights, Mapping) else weights
        found = [own[piece.name] for pieces, own in zip(self.members, members, strict=True) for piece in pieces]
        for piece, tensor in zip((piece for member in self.members for piece in member), found, strict=True):
            if tuple(tensor.shape) != piece.shape or tensor.dtype != piece.dtype:
                raise ValueError(
                    f"{piece.name} is {tensor.dtype} {tuple(tensor.shape)}, not {piece.dtype} {piece.shape}"
                )
        return found


def layout_of(weights: Weights) -> WeightsLayout:
    """A layout for weights like these; dense tensors keep their order in memory, such as channels last."""
    end = 0
    members = []
    for member in [weights] if isinstance(weights, Mapping) else weights:
        pieces = []
        for name, tensor in member.items():
            begin = lines(end)
            end = begin + tensor.numel() * tensor.element_size()
            stride = torch.empty_like(tensor, device="meta").stride()
            pieces.append(TensorPlace(name, tensor.dtype, tuple(tensor.shape), stride, begin, end))
        members.append(tuple(pieces))
    return WeightsLayout(tuple(members), isinstance(weights, Mapping), lines(end))


class SharedNumbers:
    """A few named whole numbers; the last ones known stay while they change."""

    def __init__(self, names: Sequence[str], memory: memoryview) -> None:
        self.form = struct.Struct(f"={len(names) + 1}q")  # how often they were written, and the numbers
        self.cell_bytes = self.form.size + 8
        self.memory = memory[: 2 * self.cell_bytes]
        self.serial = 0
        self.seen = b""
        self.known = dict.fromkeys(names, 0)

    @staticmethod
    def room(names: Sequence[str]) -> int:
        """How many bytes so many numbers need."""
        return lines(2 * (8 * len(names) + 16))

    def write(self, **numbers: int) -> None:
        """Replace some of them."""
        self.read()
        if unknown := numbers.keys() - self.known.keys():
            raise KeyError(f"the board has no {sorted(unknown)}")
        self.serial += 1
        self.known = self.known | numbers
        cell = self.form.pack(self.serial, *self.known.values())
        begin = self.serial % 2 * self.cell_bytes
        self.memory[begin : begin + self.cell_bytes] = cell + struct.pack("=Q", zlib.crc32(cell))

    def read(self) -> dict[str, int]:
        """All of them."""
        seen = bytes(self.memory)
        if seen != self.seen:  # else there is nothing new to check
            self.seen = seen
            for cell in (seen[: self.cell_bytes], seen[self.cell_bytes :]):
                serial, *values = self.form.unpack_from(cell)
                whole = struct.unpack_from("=Q", cell, self.form.size)[0] == zlib.crc32(cell[: self.form.size])
                if whole and serial > self.serial:
                    self.serial = serial
                    self.known = dict(zip(self.known, values, strict=True))
        return self.known


class SharedWeightsBoard:
    """The newest weights, and numbers such as the step count; only the process that made the board writes on it."""

    def __init__(
        self,
        layout: WeightsLayout,
        names: Sequence[str] = ("env_steps", "stop"),
        *,
        device: torch.device | None = None,
        region: SharedMemory | None = None,
    ) -> None:
        self.layout = layout
        self.names = tuple(names)
        self.device = device or torch.device("cpu")
        first = SharedNumbers.room(names)
        size = LINE + layout.size
        self.region = region or SharedMemory(first + 2 * size)
        view = self.region.view
        self._numbers = SharedNumbers(names, view)
        self.headers = [view[first + side * size :][: HEADER.size] for side in (0, 1)]
        self.flats = [np.frombuffer(view, np.uint8, layout.size, first + side * size + LINE) for side in (0, 1)]
        self.targets: list[list[Tensor]] = []
        self.version = 0  # the newest that was published here
        self.copy: Array | None = None
        self.live: Tensor | None = None
        self.weights: Weights = []

    def publish(self, version: int, weights: Weights, **numbers: int) -> None:
        """Replace what readers see; versions only rise, and weights that are not finite are never shown."""
        if version <= self.version:
            raise ValueError(f"version {version} after version {self.version}")
        shown = self.layout.tensors(weights)
        if not finite(shown):
            raise NonFiniteValues("weights are not finite")
        if not self.targets:
            views = [self.layout.views(torch.from_numpy(flat)) for flat in self.flats]
            self.targets = [list(chain.from_iterable(own.values() for own in members)) for members in views]
        side = int(HEADER.unpack(self.headers[0])[0] == self.version)  # the one that is not the newest
        with torch.no_grad():
            torch._foreach_copy_(self.targets[side], shown)
        self.headers[side][:] = HEADER.pack(version, stamped(version, self.flats[side]))
        self.version = version
        if numbers:
            self.tell(**numbers)

    def tell(self, **numbers: int) -> None:
        """Replace some of the numbers alone."""
        self._numbers.write(**numbers)

    def numbers(self) -> dict[str, int]:
        """All numbers; cheap enough for every step."""
        return self._numbers.read()

    def read(self, newer_than: int) -> tuple[int, Any] | None:
        """The newest weights, if they are newer: always the same tensors, with new values."""
        found = [(*HEADER.unpack(header), side) for side, header in enumerate(self.headers)]
        for version, check, side in found if found[0] > found[1] else reversed(found):
            if version > max(newer_than, 0) and self._take(side, version, check):
                return version, self.weights
        return None

    def _take(self, side: int, version: int, check: int) -> bool:
        if self.copy is None or self.live is None:
            self.copy = np.empty(self.layout.size, np.uint8)
            self.live = torch.zeros(self.layout.size, dtype=torch.uint8, device=self.device)
            members = self.layout.views(self.live)
            self.weights = members[0] if self.layout.alone else members
        self.copy[:] = self.flats[side]
        if stamped(version, self.copy) != check:
            return False
        self.live.copy_(torch.from_numpy(self.copy))
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return _board, (self.layout, self.names, str(self.device), self.region)

    def close(self) -> None:
        """Let go of the memory."""
        self.targets = []
        self.flats = []
        self.headers = []
        self._numbers.memory.release()
        self.region.close()


def stamped(version: int, content: Array) -> int:
    """The checksum of weights of this version."""
    return checksum(content, zlib.crc32(struct.pack("=Q", version)))


def _board(layout: WeightsLayout, names: tuple[str, ...], device: str, region: SharedMemory) -> SharedWeightsBoard:
    return SharedWeightsBoard(layout, names, device=torch.device(device), region=region)


def finite(tensors: Sequence[Tensor]) -> bool:
    """Is every number finite? Asked of sums, which is fast; only weights that are past help overflow one."""
    sums = [tensor.sum() for tensor in tensors if tensor.is_floating_point()]
    return not sums or all(map(math.isfinite, numbers(*sums)))
