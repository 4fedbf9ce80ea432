"""Parts of a batch: for members of a population, for several learners, for gradient accumulation. Shapes: N items."""

from typing import Any

import numpy as np

from qfleet.data import Array, Batch, Sequences

PER_ITEM = ("state", "weight", "ids")  # the fields of sequences that have no axis of rows before that of items


def strided_part(batch: Batch | Sequences, start: int, stride: int) -> Batch | Sequences:
    """The items start, start + stride, start + 2 stride, ... as a batch."""
    return select_items(batch, slice(start, None, stride))


def select_items(batch: Batch | Sequences, items: slice | Array) -> Batch | Sequences:
    """These items as a batch; `items` is a slice, or flags [N]."""
    fields: dict[str, Any] = {}
    for name in batch.__slots__:
        value = getattr(batch, name)
        rows_first = isinstance(batch, Sequences) and name not in PER_ITEM
        # Contiguous copies: kernels are slow on strided arrays.
        fields[name] = None if value is None else np.ascontiguousarray(value[:, items] if rows_first else value[items])
    return type(batch)(**fields)
