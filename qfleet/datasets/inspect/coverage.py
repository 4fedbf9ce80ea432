"""How much of a world a data set has seen: the different pairs of observation and action. It reads every data file."""

import hashlib
from collections.abc import Iterator

import numpy as np

from qfleet.datasets.format import Dataset, StepRows


def coverage_summary(dataset: Dataset) -> dict[str, float]:
    """The number of different pairs, and their share of the steps. Memory: about 100 bytes per different pair."""
    found: set[bytes] = set()
    for file in dataset.files():
        for rows in dataset.rows(file):
            found.update(pair_hashes(rows))
    steps = dataset.manifest.num_steps
    return {"pairs": len(found), "share": len(found) / max(1, steps)}


def pair_hashes(rows: StepRows) -> Iterator[bytes]:
    """A hash of observation and action for each step; two of 10^9 pairs share one with a chance of 3 %."""
    arrays = [np.ascontiguousarray(array) for _, array in sorted(rows.observations.items())]
    for at in np.flatnonzero(~rows.last).tolist():
        digest = hashlib.blake2b(rows.action[at].tobytes(), digest_size=8)
        for array in arrays:
            digest.update(array[at].tobytes())
        yield digest.digest()
