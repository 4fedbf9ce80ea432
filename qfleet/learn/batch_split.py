"""Parts of a batch, and batches joined: for members of a population, several learners, gradient accumulation, and data.

Shapes: N items.
"""

from collections.abc import Sequence
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


def join_batches(parts: Sequence[Batch | Sequences], order: Array | None = None) -> Batch | Sequences:
    """Several batches as one, whose items are then taken in this order."""
    kind = type(parts[0])
    fields: dict[str, Any] = {}
    for name in kind.__slots__:
        values = [getattr(part, name) for part in parts]
        axis = int(kind is Sequences and name not in PER_ITEM)
        whole = None if values[0] is None else np.concatenate(values, axis)
        fields[name] = whole if whole is None or order is None else whole.take(order, axis)
    return kind(**fields)
