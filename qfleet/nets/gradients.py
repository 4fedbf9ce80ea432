"""Gradients and memory without torch's overhead, which is a large part of a small update."""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

# mallopt's parameter numbers
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
KEEP_BYTES = 512 << 20
LARGE_BYTES = 128 << 20
OnGradient = Callable[[int, Tensor], None]  # called with the index of an input and its gradient
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def gradients_of(loss: Tensor, inputs: Sequence[Tensor], on_gradient: OnGradient | None = None) -> list[Tensor]:
    """d loss / d inputs, zeros where the loss does not depend on an input: `torch.autograd.grad` without its checks.

    `on_gradient` is called with each gradient as soon as it is computed, except for those zeros.
    """
    seed = (torch.ones_like(loss),)
    hooks: list[Any] = []
    if on_gradient is not None:
        hooks = [each.register_hook(partial(on_gradient, at)) for at, each in enumerate(inputs)]  # type: ignore[no-untyped-call]
    try:
        gradients = _engine_run_backward(
            (loss,), seed, False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    finally:
        for hook in hooks:
            hook.remove()
    pairs = zip(gradients, inputs, strict=True)
    return [torch.zeros_like(each) if gradient is None else gradient for gradient, each in pairs]


@cache
def keep_freed_memory() -> bool:
    """Let this process reuse freed memory instead of returning it to the system; whether that was possible.

    Every update allocates and frees the same few megabytes. By default glibc returns them to the system and requests
    them again: thousands of page faults per update of a convolutional network, a tenth of its time.
    """
    if sys.platform != "linux" or any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(TRIM_THRESHOLD, KEEP_BYTES)) and bool(mallopt(MMAP_THRESHOLD, LARGE_BYTES))
