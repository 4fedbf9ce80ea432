"""Gradients and memory by the shortest way: what torch's convenience costs is a good part of a small update."""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

# mallopt's own numbers
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
KEEP_BYTES = 512 << 20
LARGE_BYTES = 128 << 20
Ready = Callable[[int, Tensor], None]  # an input's number, and the gradient by it
CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def gradients_of(loss: Tensor, inputs: Sequence[Tensor], ready: Ready | None = None) -> list[Tensor]:
    """d loss / d inputs; zeros for what the loss does not depend on. `torch.autograd.grad` without its checks.

    `ready` hears of each one that is not zero as soon as it is known.
    """
    seed = (torch.ones_like(loss),)
    hooks: list[Any] = []
    if ready is not None:
        hooks = [own.register_hook(partial(ready, at)) for at, own in enumerate(inputs)]  # type: ignore[no-untyped-call]
    try:
        found = _engine_run_backward(
            (loss,), seed, False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    finally:
        for hook in hooks:
            hook.remove()
    pairs = zip(found, inputs, strict=True)
    return [torch.zeros_like(own) if gradient is None else gradient for gradient, own in pairs]


@cache
def keep_freed_memory() -> bool:
    """Let this process keep memory that it freed for its next use; says whether it could be done.

    Every update allocates and frees the same few megabytes. Left alone, glibc gives them back to the system and asks
    again: thousands of page faults per update of a convolutional network, a tenth of its time.
    """
    if sys.platform != "linux" or any(name in os.environ for name in CHOSEN_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(TRIM_THRESHOLD, KEEP_BYTES)) and bool(mallopt(MMAP_THRESHOLD, LARGE_BYTES))
