"""Parts of a batch: for members of a population, for several learners, for memory that is too small. N items."""

from typing import Any

import numpy as np

from qfleet.data import Array, Batch, Sequences

PER_ITEM = ("state", "weight", "ids")  # what sequences hold once per item; the rest is rows first


def part(batch: Batch | Sequences, at: int, num: int) -> Batch | Sequences:
    """The items at, at + num, at + 2 num, ... as a batch."""
    return chosen(batch, slice(at, None, num))


def chosen(batch: Batch | Sequences, items: slice | Array) -> Batch | Sequences:
    """These items as a batch; `items` is a slice, or flags [N]."""
    own: dict[str, Any] = {}
    for name in batch.__slots__:
        value = getattr(batch, name)
        rows_first = isinstance(batch, Sequences) and name not in PER_ITEM
        # Copied: kernels are made for arrays without gaps.
        own[name] = None if value is None else np.ascontiguousarray(value[:, items] if rows_first else value[items])
    return type(batch)(**own)
