"""How much memory and disk a plan needs, and whether this machine has it: asked before the first step."""

from pathlib import Path

from qfleet.data import Spec
from qfleet.errors import UsageError
from qfleet.plan.schema import DuplicatesFilter, Fresh, Plan, PrioritizedSampler
from qfleet.replay import make_cut, ring_rows, row_bytes

GIB = 2**30
COPY_BYTES = 100  # of one entry in the count of copies


def replay_bytes(plan: Plan, spec: Spec) -> int:
    """Bytes of a full replay: rows, queue, and the sum tree and the count of copies if there are such."""
    if isinstance(plan.replay, Fresh):
        return ring_rows(plan.replay.rows * plan.env.num, spec, plan.env.num, plan.replay.rows) * row_bytes(spec)
    cut, capacity = make_cut(plan.algo), plan.replay.capacity
    items = cut.items_in(capacity)
    rows = ring_rows(capacity, spec, plan.env.num, cut.window) * plan.env.num
    tree = 16 * (1 << (items - 1).bit_length()) if isinstance(plan.replay.sampler, PrioritizedSampler) else 0
    copies = COPY_BYTES * items if isinstance(plan.replay.filter, DuplicatesFilter) else 0
    return rows * row_bytes(spec) + 8 * items + tree + copies


def available_bytes(group: Path = Path("/sys/fs/cgroup"), machine: Path = Path("/proc/meminfo")) -> int:
    """What the machine, or the container's limit, still has to give."""
    free = counts(machine)["MemAvailable:"] * 1024
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        # Files that the kernel remembers count as used there, but make way when somebody needs the room.
        cached = counts(group / "memory.stat").get("inactive_file", 0)
        free = min(free, int(text) - int((group / "memory.current").read_text()) + cached)
    return free


def counts(file: Path) -> dict[str, int]:
    """A file of lines `name number`."""
    return {line.split()[0]: int(line.split()[1]) for line in file.read_text().splitlines()}


def estimate(plan: Plan, spec: Spec) -> dict[str, int]:
    """Bytes of the replay in memory, of one checkpoint on disk at most, and what the machine has."""
    need = replay_bytes(plan, spec)
    saved = need if plan.save.replay == "full" else 0
    return {"replay_bytes": need, "checkpoint_bytes": saved, "available_bytes": available_bytes()}


def require_memory(plan: Plan, spec: Spec) -> None:
    """Refuse a plan whose replay cannot fit, with the sum shown."""
    sizes = estimate(plan, spec)
    need, have = sizes["replay_bytes"], sizes["available_bytes"]
    if need > 0.9 * have and not isinstance(plan.replay, Fresh):
        steps = int(plan.replay.capacity * 0.8 * have / need)
        raise UsageError(
            f"replay.capacity={plan.replay.capacity} does not fit into memory",
            f"{plan.replay.capacity} steps of {row_bytes(spec)} bytes need {need / GIB:.1f} GiB; "
            f"{have / GIB:.1f} GiB are available.",
            f"Use replay.capacity={steps} or less.",
        )
