"""Bringing batches to where the learner computes.

On a CPU arrays become tensors as they are. The rest of this file is for accelerators (CUDA, and ROCm by the same
calls): written by the book and guarded, but not run on hardware here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.replay import Mirror

Fields: TypeAlias = Sequence[tuple[str, Array | None]]
Carry: TypeAlias = Callable[[Fields], dict[str, Tensor | None]]
SEEN = ("obs", "next_obs")


def share(fields: Fields) -> dict[str, Tensor | None]:
    """The arrays themselves as tensors: nothing is copied, so they are used only until the update is over."""
    return {name: None if values is None else torch.from_numpy(values) for name, values in fields}


@dataclass
class PinnedPages:
    """Page-locked copies of one batch, and the moment when the device has read them."""

    pages: dict[str, Tensor] = field(default_factory=dict)
    read: Any = None  # torch.cuda.Event

    def page(self, name: str, values: Tensor) -> Tensor:
        """A page-locked buffer for these values."""
        page = self.pages.get(name)
        if page is None or page.shape != values.shape or page.dtype != values.dtype:
            page = self.pages[name] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return page


class BatchTransfer:
    """Copies batches on a stream of its own through two sets of page-locked buffers; bytes travel as bytes.

    Not run on hardware here. The array may be reused as soon as the call returns: the device reads our pages.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots = (PinnedPages(), PinnedPages())
        self.trips = 0
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, fields: Fields) -> dict[str, Tensor | None]:
        """The batch on the device; the present stream waits for it, the host does not."""
        slot = self.slots[self.trips % 2]
        main = torch.cuda.current_stream(self.device)
        self.trips += 1
        if slot.read is not None:
            slot.read.synchronize()  # two trips ago: long past
        found: dict[str, Tensor | None] = {}
        with torch.cuda.stream(self.stream):
            for name, values in share(fields).items():
                found[name] = None if values is None else self.send(slot.page(name, values).copy_(values), main)
            slot.read = self.stream.record_event()
        main.wait_stream(self.stream)
        return found

    def send(self, page: Tensor, main: Any) -> Tensor:
        """One buffer's way; its memory belongs to the main stream from then on."""
        there = page.to(self.device, non_blocking=True)
        there.record_stream(main)
        return there


def make_carry(device: torch.device) -> Carry:
    """How batches get to this device."""
    if device.type == "cuda":
        return BatchTransfer(device)
    if device.type == "cpu":
        return share
    return lambda fields: {name: value if value is None else value.to(device) for name, value in share(fields).items()}


def looking_up(carry: Carry, mirror: Mirror) -> Carry:
    """Batches bring places of observations; what they show is where the learner computes already."""

    def carried(fields: Fields) -> dict[str, Tensor | None]:
        mirror.follow()
        found = carry(fields)
        shown = {name: mirror.look(places) for name in SEEN if (places := found.get(name)) is not None}
        return {**found, **shown}

    return carried


def numbers(*values: Tensor) -> list[float]:
    """Scalars as floats; from an accelerator all in one trip, because each trip waits for it."""
    if values[0].device.type == "cpu":
        return [value.item() for value in values]
    found: list[float] = torch.stack([value.float() for value in values]).tolist()
    return found
