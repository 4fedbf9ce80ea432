"""A copy of the store's observations where the learner computes. Shapes: N items, R rows, L lanes.

Each observation crosses the bus once, when it comes in, and as bytes; a batch then carries places instead of pictures,
and is stacked there. Which items are drawn is decided beside the sum tree: that is a few numbers per batch.
Written for accelerators and not run on hardware here; on a CPU it answers the same batches and saves nothing.
"""

import numpy as np
import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.replay.store import Store


class Mirror:
    """The observations of a store, one after the other, and a blank one behind them."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store = store
        self.known = np.zeros(store.lanes, np.int64)
        self.restored = store.restored
        blank = np.zeros((store.rows * store.lanes + 1, *store.spec.obs), store.spec.dtype)
        self.frames = torch.from_numpy(blank).to(device)

    def follow(self) -> None:
        """Copy what came into the store since the last time."""
        store = self.store
        if self.restored != store.restored:
            self.restored = store.restored
            self.known[:] = 0
        since = np.maximum(self.known, store.heads - store.rows)
        places = [places_of(store, int(since[lane]), int(store.heads[lane]), lane) for lane in range(store.lanes)]
        self.known = store.heads.copy()
        if len(fresh := np.concatenate(places)):
            new = torch.from_numpy(store.obs.reshape(-1, *store.spec.obs)[fresh])
            there = torch.from_numpy(fresh).to(self.frames.device)
            self.frames.index_copy_(0, there, new.to(self.frames.device, non_blocking=True))

    def look(self, places: Tensor) -> Tensor:  # [N, stack] -> [N, *input_shape]
        """The stacks of observations at these places."""
        found = self.frames[places]
        return found.reshape(len(places), *self.store.spec.input_shape)


def places_of(store: Store, begin: int, end: int, lane: int) -> Array:
    """Where rows [begin, end) of a lane lie."""
    places: Array = np.arange(begin, end) % store.rows * store.lanes + lane
    return places
