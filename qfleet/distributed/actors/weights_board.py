"""The weights board: the newest weights and a few numbers in shared memory, with one writer and many readers.

Two buffers are written in turn, each with its version and a checksum over version and content. A reader copies the
newer one, checks the copy, and only then replaces the weights in use. Stores of the writer may reach a reader in any
order, and the writer may overwrite the buffer that is being read (if it publishes twice meanwhile): either way the
checksum of the copy is wrong, and the reader tries again later. The numbers are kept in two buffers in the same way.
"""

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qfleet.act.policy import NonFiniteValues
from qfleet.data import Array
from qfleet.data.wire_format import checksum
from qfleet.learn.transfer import to_floats
from qfleet.system.shared_memory import CACHE_LINE_BYTES, SharedMemory, round_to_cache_lines

Weights: TypeAlias = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]  # of one network, or of each member

HEADER = struct.Struct("=QQ")  # version, checksum


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of one tensor in the flat bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """The layout of weights in flat bytes: of one network, or of each member of a population."""

    members: tuple[tuple[TensorPlace, ...], ...]
    single: bool
    size: int

    def views(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """The tensors as views into these bytes."""
        return [
            {
                place.name: flat[place.begin : place.end].view(place.dtype).as_strided(place.shape, place.stride)
                for place in member
            }
            for member in self.members
        ]

    def tensors(self, weights: Weights) -> list[Tensor]:
        """The tensors of weights in the order of the layout."""
        members = [weights] if isinstance(weights, Mapping) else weights
        found = [own[place.name] for places, own in zip(self.members, members, strict=True) for place in places]
        for place, tensor in zip((place for member in self.members for place in member), found, strict=True):
            if tuple(tensor.shape) != place.shape or tensor.dtype != place.dtype:
                raise ValueError(
                    f"{place.name} is {tensor.dtype} {tuple(tensor.shape)}, not {place.dtype} {place.shape}"
                )
        return found


def layout_of(weights: Weights) -> WeightsLayout:
    """The layout for weights like these; dense tensors keep their memory format, such as channels last."""
    end = 0
    members = []
    for member in [weights] if isinstance(weights, Mapping) else weights:
        places = []
        for name, tensor in member.items():
            begin = round_to_cache_lines(end)
            end = begin + tensor.numel() * tensor.element_size()
            stride = torch.empty_like(tensor, device="meta").stride()
            places.append(TensorPlace(name, tensor.dtype, tuple(tensor.shape), stride, begin, end))
        members.append(tuple(places))
    return WeightsLayout(tuple(members), isinstance(weights, Mapping), round_to_cache_lines(end))


class SharedNumbers:
    """A few named integers; a reader keeps the last valid values while they change."""

    def __init__(self, names: Sequence[str], memory: memoryview) -> None:
        self.packing = struct.Struct(f"={len(names) + 1}q")  # write count and numbers
        self.cell_bytes = self.packing.size + 8
        self.memory = memory[: 2 * self.cell_bytes]
        self.serial = 0
        self.last_bytes = b""
        self.known = dict.fromkeys(names, 0)

    @staticmethod
    def size_bytes(names: Sequence[str]) -> int:
        """The bytes that these numbers need."""
        return round_to_cache_lines(2 * (8 * len(names) + 16))

    def write(self, **numbers: int) -> None:
        """Replace some numbers."""
        self.read()
        if unknown := numbers.keys() - self.known.keys():
            raise KeyError(f"the board has no {sorted(unknown)}")
        self.serial += 1
        self.known = self.known | numbers
        cell = self.packing.pack(self.serial, *self.known.values())
        begin = self.serial % 2 * self.cell_bytes
        self.memory[begin : begin + self.cell_bytes] = cell + struct.pack("=Q", zlib.crc32(cell))

    def read(self) -> dict[str, int]:
        """All numbers."""
        current = bytes(self.memory)
        if current != self.last_bytes:
            self.last_bytes = current
            for cell in (current[: self.cell_bytes], current[self.cell_bytes :]):
                serial, *values = self.packing.unpack_from(cell)
                whole = struct.unpack_from("=Q", cell, self.packing.size)[0] == zlib.crc32(cell[: self.packing.size])
                if whole and serial > self.serial:
                    self.serial = serial
                    self.known = dict(zip(self.known, values, strict=True))
        return self.known


class SharedWeightsBoard:
    """The newest weights, and numbers such as the step count; only the process that made the board writes to it."""

    def __init__(
        self,
        layout: WeightsLayout,
        names: Sequence[str] = ("env_steps",),
        *,
        device: torch.device | None = None,
        region: SharedMemory | None = None,
    ) -> None:
        self.layout = layout
        self.names = tuple(names)
        self.device = device or torch.device("cpu")
        first = SharedNumbers.size_bytes(names)
        size = CACHE_LINE_BYTES + layout.size
        self.region = region or SharedMemory(first + 2 * size)
        view = self.region.view
        self._numbers = SharedNumbers(names, view)
        self.headers = [view[first + side * size :][: HEADER.size] for side in (0, 1)]
        self.flats = [
            np.frombuffer(view, np.uint8, layout.size, first + side * size + CACHE_LINE_BYTES) for side in (0, 1)
        ]
        self.targets: list[list[Tensor]] = []
        self.version = 0  # published last
        self.copy: Array | None = None
        self.live: Tensor | None = None
        self.weights: Weights = []

    def publish(self, version: int, weights: Weights, **numbers: int) -> None:
        """Publish new weights; versions must rise, and weights that are not finite are refused."""
        if version <= self.version:
            raise ValueError(f"version {version} after version {self.version}")
        tensors = self.layout.tensors(weights)
        if not all_finite(tensors):
            raise NonFiniteValues("weights are not finite")
        if not self.targets:
            views = [self.layout.views(torch.from_numpy(flat)) for flat in self.flats]
            self.targets = [list(chain.from_iterable(own.values() for own in members)) for members in views]
        side = int(HEADER.unpack(self.headers[0])[0] == self.version)  # the older buffer
        with torch.no_grad():
            torch._foreach_copy_(self.targets[side], tensors)
        self.headers[side][:] = HEADER.pack(version, weights_checksum(version, self.flats[side]))
        self.version = version
        if numbers:
            self.write_numbers(**numbers)

    def write_numbers(self, **numbers: int) -> None:
        """Replace some of the numbers."""
        self._numbers.write(**numbers)

    def numbers(self) -> dict[str, int]:
        """All numbers; cheap enough to call at every step."""
        return self._numbers.read()

    def read(self, newer_than: int) -> tuple[int, Any] | None:
        """The newest weights, if newer than this version: always the same tensors, with new values."""
        found = [(*HEADER.unpack(header), side) for side, header in enumerate(self.headers)]
        for version, check, side in found if found[0] > found[1] else reversed(found):
            if version > max(newer_than, 0) and self._copy_if_whole(side, version, check):
                return version, self.weights
        return None

    def _copy_if_whole(self, side: int, version: int, check: int) -> bool:
        if self.copy is None or self.live is None:
            self.copy = np.empty(self.layout.size, np.uint8)
            self.live = torch.zeros(self.layout.size, dtype=torch.uint8, device=self.device)
            members = self.layout.views(self.live)
            self.weights = members[0] if self.layout.single else members
        self.copy[:] = self.flats[side]
        if weights_checksum(version, self.copy) != check:
            return False
        self.live.copy_(torch.from_numpy(self.copy))
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SharedWeightsBoard, device=self.device, region=self.region), (self.layout, self.names)

    def close(self) -> None:
        """Release the memory."""
        self.targets = []
        self.flats = []
        self.headers = []
        self._numbers.memory.release()
        self.region.close()


def weights_checksum(version: int, content: Array) -> int:
    """The checksum of flat weights and their version."""
    return checksum(content, zlib.crc32(struct.pack("=Q", version)))


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Are all values finite? Checks sums, which is fast; only diverged weights overflow a sum."""
    sums = [tensor.sum() for tensor in tensors if tensor.is_floating_point()]
    return not sums or all(map(math.isfinite, to_floats(*sums)))
