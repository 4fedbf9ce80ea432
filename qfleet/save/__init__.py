"""Saving state: checkpoints that are whole or absent, their manifests, and the lock of a run."""

from qfleet.save.checkpoint import Checkpoint, Checkpoints, CheckpointWarning, Link
from qfleet.save.damage import Damaged
from qfleet.save.lock import hold_run
from qfleet.save.segments import compress, decompress
from qfleet.save.state import pack_state, pack_tensors, unpack_state, unpack_tensors
from qfleet.save.verify import verify_run

__all__ = [
    "Checkpoint",
    "CheckpointWarning",
    "Checkpoints",
    "Damaged",
    "Link",
    "compress",
    "decompress",
    "hold_run",
    "pack_state",
    "pack_tensors",
    "unpack_state",
    "unpack_tensors",
    "verify_run",
]
