"""How many cores this machine lets a run use."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# The cores of one member of a sweep, which shares the machine with the others; the sweep sets it for their processes.
SHARE_VARIABLE = "QFLEET_CORES"
# What libraries read when they are loaded, to know how many threads they may start.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores for this run and all its processes: those of the machine, or a member's share of them."""
    cores = machine_cores()
    share = os.environ.get(SHARE_VARIABLE, "")
    return min(cores, max(1, int(share))) if share.isdecimal() and len(share) < 6 else cores


def thread_variables(num: int) -> dict[str, str]:
    """Environment variables for a process whose libraries may use this many threads; those that are set stay."""
    return {name: str(num) for name in THREAD_VARIABLES if name not in os.environ}


def machine_cores(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Cores that this process may use; a container may be allowed the time of fewer than are visible."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([visible, *map(int, quotas(groups, own))]))


def quotas(groups: Path, own: Path) -> Iterator[float]:
    """The limits, in cores, of this process's control groups and of those around them."""
    for folder in control_folders(groups, own):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no limit
            quota_us, period_us = (folder / "cpu.max").read_text().split()[:2]
            yield int(quota_us) / int(period_us)
        with suppress(OSError, ValueError, ZeroDivisionError):  # version 1; -1: no limit
            quota_us = (folder / "cpu.cfs_quota_us").read_text()
            period_us = (folder / "cpu.cfs_period_us").read_text()
            if int(quota_us) > 0:
                yield int(quota_us) / int(period_us)


def control_folders(groups: Path, own: Path) -> list[Path]:
    """Folders with limits of this process. A container often sees its own group as the root."""
    found = [groups, groups / "cpu"]
    with suppress(OSError):
        for line in own.read_text(errors="replace").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = groups / "cpu" if controllers else groups
            names = [name for name in path.split("/") if name not in ("", "..")]
            found += [root.joinpath(*names[:depth]) for depth in range(1, len(names) + 1)]
    return found
