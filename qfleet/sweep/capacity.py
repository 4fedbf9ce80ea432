"""How many members of a sweep fit on this machine at once."""

import os
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from qfleet.build.memory_check import estimate, require_memory
from qfleet.build.resolve import resolve
from qfleet.build.worlds import EnvMaker, make_train_world
from qfleet.plan.schema import Plan

PROCESS_BYTES = 600 << 20  # a Python process with torch imported, beside its replay
MEMORY_SHARE = 0.9


class Capacity(NamedTuple):
    """How many members run at once on this machine, and with how many threads each."""

    jobs: int
    threads: int
    notes: tuple[str, ...]


def find_capacity(plan: Plan, num: int, jobs: int | None = None, make: EnvMaker | None = None) -> Capacity:
    """As many members at once as there are cores for their threads and memory for their replays.

    `make` makes an environment of the user's own.
    """
    with closing(make_train_world(plan, make)) as world:
        plan = resolve(plan, world.spec)
        require_memory(plan, world.spec)
        needs = estimate(plan, world.spec)
    threads = plan.runtime.threads or 1
    alone = plan.runtime.device not in (None, "cpu")  # how much of an accelerator a member needs is not known
    wanted = min(num, jobs or (1 if alone else max(1, cores() // threads)))
    fitting = int(MEMORY_SHARE * needs["available_bytes"]) // (needs["replay_bytes"] + PROCESS_BYTES)
    at_once = max(1, min(wanted, fitting))
    notes = [f"memory for {at_once} at once, not for {wanted}"] if at_once < wanted else []
    if alone and jobs is None and num > 1:
        notes.append(f"one at once on {plan.runtime.device}; --jobs says how many it has room for")
    return Capacity(at_once, threads, tuple(notes))


def cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use; a container may be allowed the time of fewer than are visible."""
    visible = len(os.sched_getaffinity(0))
    try:
        quota_us, period_us = quota_file.read_text().split()[:2]
        return max(1, min(visible, int(quota_us) // int(period_us)))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no limit
        return visible
