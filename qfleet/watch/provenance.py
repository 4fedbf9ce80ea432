"""Where a run came from: versions, commit, machine and command. No environment variables, no host name."""

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from qfleet.plan.secrets import hidden_words
from qfleet.watch.repository import repository

PACKAGES = ("qfleet", "torch", "numpy", "gymnasium", "safetensors", "msgspec", "numba", "ale-py", "MinAtar")


def program() -> str:
    """What the user types to reach us: scripts/qfleet says how it was called."""
    return os.environ.get("QFLEET_PROGRAM") or "qfleet"


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, git commit of the current folder, hardware, platform and the command line."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": hidden_words(command if command is not None else [Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": platform.platform(),
        "hardware": {"cpu": _cpu(), "cores": cores(), "memory_bytes": _memory_bytes()},
        "git": repository(Path()),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
