"""A copy of the store's observations on the learner's device. Shapes: N items, R rows, L lanes.

Each observation crosses the bus once, when it is written, and as bytes; a batch then carries frame indices instead of
observations, and stacks are gathered on the device. Items are still drawn on the host, beside the sum tree.
Written for accelerators and not run on hardware here; on a CPU it returns the same batches and saves nothing.
"""

import numpy as np
import torch
from torch import Tensor

from qfleet.replay.store import Store


class Mirror:
    """The observations of a store, one after the other, followed by a blank one."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store = store
        self.copied_heads = np.zeros(store.lanes, np.int64)
        self.num_restores = store.num_restores
        blank = np.zeros((store.rows * store.lanes + 1, *store.spec.obs), store.spec.dtype)
        self.frames = torch.from_numpy(blank).to(device)

    def copy_new_rows(self) -> None:
        """Copy the rows that were written since the last call; after a restore, all rows."""
        store = self.store
        if self.num_restores != store.num_restores:
            self.num_restores = store.num_restores
            self.copied_heads[:] = 0
        begins = np.maximum(self.copied_heads, store.heads - store.rows)
        rows = [np.arange(begin, end) % store.rows for begin, end in zip(begins, store.heads, strict=True)]
        self.copied_heads = store.heads.copy()
        indices = np.concatenate([slots * store.lanes + lane for lane, slots in enumerate(rows)])
        if len(indices):
            new = torch.from_numpy(store.obs.reshape(-1, *store.spec.obs)[indices])
            on_device = torch.from_numpy(indices).to(self.frames.device)
            self.frames.index_copy_(0, on_device, new.to(self.frames.device, non_blocking=True))

    def gather_stacks(self, indices: Tensor) -> Tensor:  # [N, stack] -> [N, *input_shape]
        """The stacks of observations with these frame indices."""
        return self.frames[indices].reshape(len(indices), *self.store.spec.input_shape)
