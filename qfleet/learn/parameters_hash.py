"""The hash of a learner's parameters: learners that start from identical ones report equal hashes."""

import hashlib
from collections.abc import Iterable

from torch import Tensor


def parameters_hash(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the numbers of these tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
