"""Transferring batches to the learner's device.

On a CPU arrays become tensors without a copy. The rest of this file is for accelerators (CUDA, and ROCm by the same
calls): written as torch documents it and guarded, but not run on hardware here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.replay import Mirror

Fields: TypeAlias = Sequence[tuple[str, Array | None]]
Transfer: TypeAlias = Callable[[Fields], dict[str, Tensor | None]]
OBS_FIELDS = ("obs", "next_obs")


def as_tensors(fields: Fields) -> dict[str, Tensor | None]:
    """Tensors that share the arrays' memory; valid only until the update is over."""
    return {name: None if values is None else torch.from_numpy(values) for name, values in fields}


@dataclass
class PinnedPages:
    """Page-locked buffers of one batch, and the event after which the device has read them."""

    pages: dict[str, Tensor] = field(default_factory=dict)
    read: Any = None  # torch.cuda.Event

    def page(self, name: str, values: Tensor) -> Tensor:
        """A page-locked buffer for these values."""
        page = self.pages.get(name)
        if page is None or page.shape != values.shape or page.dtype != values.dtype:
            page = self.pages[name] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return page


class BatchTransfer:
    """Copies batches on its own stream through two sets of page-locked buffers; bytes are sent as bytes.

    Not run on hardware here. The arrays may be reused as soon as the call returns: the device reads the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots = (PinnedPages(), PinnedPages())
        self.transfers = 0
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, fields: Fields) -> dict[str, Tensor | None]:
        """The batch on the device; the current stream waits for it, the host does not."""
        slot = self.slots[self.transfers % 2]
        main = torch.cuda.current_stream(self.device)
        self.transfers += 1
        if slot.read is not None:
            slot.read.synchronize()  # of two transfers ago: done long since
        sent: dict[str, Tensor | None] = {}
        with torch.cuda.stream(self.stream):
            for name, values in as_tensors(fields).items():
                sent[name] = None if values is None else self.to_device(slot.page(name, values).copy_(values), main)
            slot.read = self.stream.record_event()
        main.wait_stream(self.stream)
        return sent

    def to_device(self, page: Tensor, main: Any) -> Tensor:
        """Copy one buffer to the device, for use on the main stream."""
        copy = page.to(self.device, non_blocking=True)
        copy.record_stream(main)
        return copy


def make_transfer(device: torch.device) -> Transfer:
    """The transfer of batches to this device."""
    if device.type == "cuda":
        return BatchTransfer(device)
    if device.type == "cpu":
        return as_tensors
    return lambda fields: {
        name: value if value is None else value.to(device) for name, value in as_tensors(fields).items()
    }


def with_mirror(transfer: Transfer, mirror: Mirror) -> Transfer:
    """Batches hold indices of observations; the observations are on the learner's device already."""

    def transfer_and_gather(fields: Fields) -> dict[str, Tensor | None]:
        mirror.copy_new_rows()
        sent = transfer(fields)
        obs = {name: mirror.gather_stacks(indices) for name in OBS_FIELDS if (indices := sent.get(name)) is not None}
        return {**sent, **obs}

    return transfer_and_gather


def to_floats(*values: Tensor) -> list[float]:
    """Scalars as floats; from an accelerator in one copy, because each copy waits for the device."""
    if values[0].device.type == "cpu":
        return [value.item() for value in values]
    floats: list[float] = torch.stack([value.float() for value in values]).tolist()
    return floats
