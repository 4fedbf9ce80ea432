"""The messages of a worker that prepares data."""

from typing import TypeAlias

import numpy as np

from qfleet.data.wire_format import Arrays, Message


class DoOrder(Message):
    """Do the work of an order, the array `bytes`. Reply: OrderDone."""


class OrderDone(Message):
    """The answer is the array `bytes`."""


PreparingRequest: TypeAlias = DoOrder
PreparingReply: TypeAlias = OrderDone


def as_arrays(content: bytes) -> Arrays:
    """Bytes as the array of a message."""
    return {"bytes": np.frombuffer(content, np.uint8)}


def content_of(arrays: Arrays) -> bytes:
    """The bytes in the array of a message, which must have one."""
    found = arrays.get("bytes")
    if found is None or found.dtype != np.uint8 or found.ndim != 1:
        raise ValueError("a message without the bytes that belong to it")
    return found.tobytes()
