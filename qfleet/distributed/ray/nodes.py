"""The nodes of a cluster: their names, and whether one has the same code as the process that trains.

A node with other code would act or learn by other rules, and the scores would not show it. So every worker compares
its own versions with those of the trainer before it does anything.
"""

import hashlib
import importlib.metadata
import importlib.util
import platform
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from ray._private import state as ray_state
from ray.exceptions import RayError

from qfleet import errors
from qfleet.system.worker_errors import FinalError
from qfleet.system.worker_process import final_error_of

HASH_CHARS = 12
Versions = dict[str, str]


def this_node() -> str:
    """The name and the address of the node of this process."""
    return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"


def name_node(error: BaseException) -> FinalError:
    """The report of an error in this process, with the name of its node."""
    report = final_error_of(error)
    return FinalError(f"on node {this_node()}: {report.what}", report.why, report.fix, report.exit_code)


def actor_record(host: Any) -> dict[str, Any]:
    """What Ray's own table says of a Ray actor; empty if it does not know.

    Ray has no public call for this that works without its dashboard.
    """
    try:
        return dict(ray_state.actors(host._actor_id.hex()))
    except (RayError, RuntimeError, AttributeError, ValueError, TypeError):
        return {}


def node_of(host: Any) -> str:
    """The name and the address of the node of a Ray actor, also of one that has ended; empty if it is not known."""
    node_id = actor_record(host).get("Address", {}).get("NodeID")
    try:
        found = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    except (RayError, RuntimeError):
        found = None
    return "" if found is None else f"{found['NodeManagerHostname']} ({found['NodeManagerAddress']})"


def versions_here(env_id: str) -> Versions:
    """The versions that decide what a worker of this process does."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "gymnasium": gymnasium.__version__,
        "qfleet": f"code {code_hash()}",
        "environment": environment_version(env_id),
    }


@cache
def code_hash() -> str:
    """The hash of the source of qfleet."""
    folder = Path(errors.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:HASH_CHARS]


def environment_version(env_id: str) -> str:
    """The version of the package that an environment is from, or the hash of its file; empty if it has neither."""
    module, _, name = env_id.rpartition(":")
    entry = gymnasium.registry.get(name)
    if not module and entry is not None and isinstance(entry.entry_point, str):
        module = entry.entry_point.partition(":")[0]
    root = module.partition(".")[0]
    if not root:
        return ""
    try:
        return f"{root} {importlib.metadata.version(root)}"
    except importlib.metadata.PackageNotFoundError:
        return file_version(root)


def file_version(module: str) -> str:
    """The hash of the file of a module that belongs to no package of this name; empty if there is none."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return ""
    return f"{module}, code {hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:HASH_CHARS]}"


def require_versions(expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Refuse to work with other versions than those of the trainer."""
    other = [
        f"{name} {found.get(name) or 'none'} instead of {version or 'none'}"
        for name, version in expected.items()
        if found.get(name) != version
    ]
    if other:
        raise errors.QfleetError(
            f"it has other versions than the learner's node: {'; '.join(other)}",
            "What it does would follow other rules, and the scores would not show it.",
            "Install the same versions of qfleet, torch and the environment on all nodes.",
        )
