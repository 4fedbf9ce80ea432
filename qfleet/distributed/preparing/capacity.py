"""How fast nodes are, measured by a small work that is the same on each."""

import hashlib
import importlib
import time
from collections.abc import Sequence

from qfleet.distributed.preparing.choosing import require_ray_engine
from qfleet.errors import UsageError

MEASURED = "measured"
ROUNDS = 5
ROUND_BYTES = 8 << 20
MOST_SECONDS = 20.0  # on one node
STEPS_OF_ONE = 20  # capacities are multiples of 1/20: what changes from one measurement to the next is rounded away


def measure_capacities(engine: str, shards: int | None, jobs: int | None, address: str | None) -> tuple[float, ...]:
    """The capacity of each shard's node, the fastest has 1. On this machine all nodes are this one."""
    if engine == "ray":
        require_ray_engine()
        measure = importlib.import_module("qfleet.distributed.ray.node_speeds").measure_nodes
        return relative(measure(jobs, address, shards))
    if shards is None:
        raise UsageError(
            "--capacity measured needs --shards N, or --engine ray",
            "Only a Ray cluster has nodes that could be measured; on this machine all shards are equal.",
            "Example: --shards 4 --capacity measured",
        )
    return (1.0,) * shards


def relative(speeds: Sequence[float]) -> tuple[float, ...]:
    """Speeds in twentieths of the largest, at least one."""
    largest = max(speeds)
    return tuple(max(1, round(speed / largest * STEPS_OF_ONE)) / STEPS_OF_ONE for speed in speeds)


def speed_of_this_node() -> float:
    """How often the work is done in a second: the best of some rounds, so that a short pause does not count."""
    data = bytes(ROUND_BYTES)
    began = time.monotonic()
    best = 0.0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        hashlib.sha256(data).digest()
        best = max(best, 1.0 / (time.perf_counter() - start))
        if time.monotonic() - began > MOST_SECONDS:
            break
    return best
