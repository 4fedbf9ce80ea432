"""Objects of the user as bytes, sent by this process to processes that it has started itself.

This is the only place that pickles. What a script or a notebook defines is sent whole (cloudpickle). Nothing of it is
written to disk, and nothing is unpickled that did not come from the process that started this one.
"""

import pickle
from typing import Any


def pack_object(value: Any) -> bytes:
    """An object as bytes; raises what Python says if it cannot be sent."""
    import cloudpickle  # most runs need no other process

    return bytes(cloudpickle.dumps(value))


def unpack_object(packed: bytes) -> Any:
    """The object that the parent process has sent."""
    return pickle.loads(packed)  # noqa: S301 - from the parent process
