"""Two nodes of a Ray cluster on this machine, on loopback; prints the address, and removes or adds nodes on demand.

Run as a script: `python ray_cluster.py [port]`, then write `remove`, `add [FOLDER]` or `end` to its standard input.
"""

import os
import sys

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else 127.0.0.1 becomes an address that others reach

from ray.cluster_utils import Cluster


def main() -> None:
    small = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    port = {"gcs_server_port": int(sys.argv[1])} if len(sys.argv) > 1 else {}
    cluster = Cluster(initialize_head=True, head_node_args={**small, **port})
    second = cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(second, allow_graceful=False)
            print("removed", flush=True)
        elif line.startswith("add"):
            code = line.split()[1:]  # a folder: the node has the qfleet in it
            variables = {"PYTHONPATH": code[0]} if code else None
            cluster.add_node(num_cpus=2, object_store_memory=100 << 20, env_vars=variables)
            print("added", flush=True)
        else:
            break
    cluster.shutdown()


if __name__ == "__main__":
    main()
