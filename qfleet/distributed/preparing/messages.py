"""The messages of a worker that prepares data."""

from typing import TypeAlias

import numpy as np

from qfleet.data.wire_format import Arrays, Message


class DoWork(Message):
    """Do the work of an order, the array `bytes`. Reply: WorkDone."""


class WorkDone(Message):
    """The answer is the array `bytes`."""


PreparingRequest: TypeAlias = DoWork
PreparingReply: TypeAlias = WorkDone


def as_arrays(content: bytes) -> Arrays:
    """Bytes as the array of a message."""
    return {"bytes": np.frombuffer(content, np.uint8)}


def content_of(arrays: Arrays) -> bytes:
    """The bytes in the array of a message, which must have one."""
    found = arrays.get("bytes")
    if found is None or found.dtype != np.uint8 or found.ndim != 1:
        raise ValueError("a message without the bytes that belong to it")
    return found.tobytes()
