"""How many members of a sweep fit on this machine at once."""

from contextlib import closing
from typing import NamedTuple

from qfleet.build.memory_check import estimate, require_memory
from qfleet.build.resolve import resolve
from qfleet.build.threads import num_other_processes
from qfleet.build.worlds import EnvMaker, make_train_world
from qfleet.plan.schema import Plan
from qfleet.system.cores import usable_cores

PROCESS_BYTES = 600 << 20  # a Python process with torch imported, beside its replay
MEMORY_SHARE = 0.9


class Capacity(NamedTuple):
    """How many members run at once on this machine, with how many threads and on how many cores each."""

    jobs: int
    threads: int
    notes: tuple[str, ...]
    cores: int = 1


def find_capacity(plan: Plan, num: int, jobs: int | None = None, make: EnvMaker | None = None) -> Capacity:
    """As many members at once as there are cores for their processes and memory for their replays.

    `make` makes an environment of the user's own.
    """
    given_threads = plan.runtime.threads
    with closing(make_train_world(plan, make)) as world:
        plan = resolve(plan, world.spec)
        require_memory(plan, world.spec)
        needs = estimate(plan, world.spec)
    alone = plan.runtime.device not in (None, "cpu")  # how much of an accelerator a member needs is not known
    wanted = min(num, jobs or (1 if alone else max(1, usable_cores() // least_cores(plan, given_threads))))
    fitting = int(MEMORY_SHARE * needs["available_bytes"]) // (needs["replay_bytes"] + PROCESS_BYTES)
    at_once = max(1, min(wanted, fitting))
    notes = [f"memory for {at_once} at once, not for {wanted}"] if at_once < wanted else []
    if alone and jobs is None and num > 1:
        notes.append(f"one at once on {plan.runtime.device}; --jobs says how many it has room for")
    share = max(1, usable_cores() // at_once)
    threads = given_threads or max(1, min(plan.runtime.threads or 1, share))
    return Capacity(at_once, threads, tuple(notes), share)


def least_cores(plan: Plan, given_threads: int | None) -> int:
    """Cores that keep a member busy: its learners' threads, and its other processes.

    Members make the same numbers together faster with one thread each, if the numbers do not depend on that.
    """
    free = given_threads is None and plan.runtime.parallel == "tasks"
    threads = 1 if free else plan.runtime.threads or 1
    return plan.learners.num * threads + num_other_processes(plan)
