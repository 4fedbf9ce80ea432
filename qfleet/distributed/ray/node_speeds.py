"""How fast the nodes of a Ray cluster are: each does the same small work, by itself."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from qfleet.distributed.preparing.capacity import speed_of_this_node
from qfleet.distributed.ray.preparing import ray_session
from qfleet.errors import QfleetError, UsageError

WAIT_SECONDS = 120.0  # for all nodes: their processes start, and wait until a CPU is free


def measure_nodes(jobs: int | None, address: str | None, shards: int | None) -> list[float]:
    """The speed of every node that has CPUs, in the order of their addresses and ids."""
    with ray_session(jobs, address):
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        nodes.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        if shards not in (None, len(nodes)):
            raise UsageError(
                f"--shards {shards} does not go with --capacity measured",
                f"The Ray cluster has {len(nodes)} nodes with CPUs, and each gets one shard.",
                "Leave --shards out, or give the speeds yourself: --capacity 1,1,0.5",
            )
        return _speeds(nodes)


def _speeds(nodes: Sequence[dict[str, Any]]) -> list[float]:
    measure = ray.remote(num_cpus=1, max_retries=3)(speed_of_this_node)
    calls = [
        measure.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in nodes
    ]
    try:
        return [float(speed) for speed in ray.get(calls, timeout=WAIT_SECONDS)]
    except (GetTimeoutError, RayError) as error:
        raise QfleetError(
            "not every node of the Ray cluster could be measured",
            " ".join(str(error).split())[:300],
            "Wait until the cluster is idle, or give the speeds yourself: --capacity 1,1,0.5",
        ) from error
