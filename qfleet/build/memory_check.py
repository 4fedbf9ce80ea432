"""How much memory and disk a plan needs, and whether this machine has it; checked before the first step."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from qfleet.data import Spec
from qfleet.errors import UsageError
from qfleet.nets.qnet import make_memory, make_net
from qfleet.plan.schema import DatasetReplay, FreshReplay, NoMemory, OwnTorso, Plan, ProcessesRuntime, RayRuntime
from qfleet.plan.traits import learns_in_epochs
from qfleet.plan.validate.placement import has_replay_process
from qfleet.replay import Prioritized, Replay, frame_bytes, make_replay, queue_length, ring_rows, tree_levels

GIB = 2**30
COPY_BYTES = 100  # of one entry in the count of copies
LEARNING_COPIES = 5  # online and target network, gradients, and the two moments of Adam
MEMORY_SHARE = 0.9
PROCESS_BYTES = 128 << 20  # of a child of the fork server, beside what it shares with the others
MIN_COMPRESSION = 4  # of frames, in most games


def replay_bytes(plan: Plan, spec: Spec) -> int:
    """Bytes of a full replay of this spec: rows, queue, sampler, and the count of copies."""
    if isinstance(plan.replay, DatasetReplay):
        # Every learner has a cache of its own; without epochs there is none, and the data set itself is checked.
        return plan.replay.cache_bytes * plan.learners.num if learns_in_epochs(plan) else 0
    sample = sample_replay(plan, spec)
    spec = stored_spec(plan, spec)
    lanes = plan.env.num
    steps = plan.replay.rows * lanes if isinstance(plan.replay, FreshReplay) else plan.replay.capacity
    window = sample.cut.window
    items = sample.cut.items_in(steps)
    if isinstance(plan.replay, FreshReplay):
        # the sample's block has one row
        window = plan.replay.rows
        items = lanes
    rows = ring_rows(steps, spec, lanes, window) * lanes
    tree = 8 * int(tree_levels(items)[-1]) if isinstance(sample.sampler, Prioritized) else 0
    copies = COPY_BYTES * items if sample.filter is not None else 0
    # Of every row the serial number of the item that begins there; of every item where it begins.
    numbers = 8 * (rows + queue_length(items, lanes, window))
    kept = sample.store.row_bytes
    if sample.store.packed is not None:
        kept -= frame_bytes(spec) * (MIN_COMPRESSION - 1) // MIN_COMPRESSION
    return rows * kept + numbers + tree + copies


def sample_replay(plan: Plan, spec: Spec) -> Replay:
    """The smallest replay of one lane that the plan describes, with the columns of the real one."""
    replay = plan.replay
    if isinstance(replay, FreshReplay):
        plan = msgspec.structs.replace(plan, replay=msgspec.structs.replace(replay, rows=1))
    elif not isinstance(replay, DatasetReplay):
        plan = msgspec.structs.replace(plan, replay=msgspec.structs.replace(replay, capacity=1))
    return make_replay(plan, stored_spec(plan, spec), 1, np.random.default_rng(0))


def stored_spec(plan: Plan, spec: Spec) -> Spec:
    """The world's spec with the size of the memory that a policy of this plan stores beside each row."""
    if isinstance(plan.net.memory, NoMemory):
        return spec
    with torch.device("meta"):  # nothing is initialised or stored
        memory = make_memory(plan.net, 1, spec.num_actions)
    return spec if memory is None else replace(spec, state=(memory.state_size,))


def available_bytes(group: Path = Path("/sys/fs/cgroup"), machine: Path = Path("/proc/meminfo")) -> int:
    """Memory that the machine, or the container's limit, still has."""
    free = counts(machine)["MemAvailable:"] * 1024
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        # Cached files count as used there, but the kernel frees them on demand.
        cached = counts(group / "memory.stat").get("inactive_file", 0)
        free = min(free, int(text) - int((group / "memory.current").read_text()) + cached)
    return free


def counts(file: Path) -> dict[str, int]:
    """A file of lines `name number`."""
    return {line.split()[0]: int(line.split()[1]) for line in file.read_text().splitlines()}


def estimate(plan: Plan, spec: Spec) -> dict[str, int]:
    """Bytes of the replay in memory, of one checkpoint on disk at most, and what the machine has."""
    need = replay_bytes(plan, spec)
    saved = need if plan.save.replay == "full" and not isinstance(plan.replay, DatasetReplay) else 0
    return {"replay_bytes": need, "checkpoint_bytes": saved, "available_bytes": available_bytes()}


def network_bytes(plan: Plan, spec: Spec) -> int:
    """Bytes of one copy of the network's weights; 0 for a torso or head of the user's own, which a plan cannot know."""
    if isinstance(plan.net.torso, OwnTorso) or plan.custom.head is not None:
        return 0
    with torch.device("meta"):  # shapes only
        net = make_net(plan.net, spec, normalize=plan.env.normalize, seed=0)
    return sum(value.nbytes for value in net.state_dict().values())


def require_network(plan: Plan, spec: Spec, copies: int = 1) -> None:
    """Refuse a network of which `copies` copies do not fit into this machine's memory."""
    need = copies * network_bytes(plan, spec)
    have = available_bytes()
    if need > max(GIB, MEMORY_SHARE * have):  # smaller ones are decided by the replay
        raise UsageError(
            "the network that net.* asks for does not fit into memory",
            f"{copies} copies of its weights need {need / GIB:.1f} GiB; {have / GIB:.1f} GiB are available.",
            "Use smaller layers: net.torso.* and net.head.*.",
        )


def require_processes(plan: Plan) -> None:
    """Refuse more processes than this machine has memory for; on a cluster its nodes decide."""
    if isinstance(plan.runtime, RayRuntime):
        return
    actors = plan.actors.num if isinstance(plan.runtime, ProcessesRuntime) else 0
    wanted = {"actors.num": actors, "learners.num": plan.learners.num, "env.workers": plan.env.workers}
    need = PROCESS_BYTES * sum(wanted.values())
    have = available_bytes()
    if need > max(GIB, MEMORY_SHARE * have):
        path = max(wanted, key=lambda name: wanted[name])
        raise UsageError(
            f"{path}={wanted[path]} processes do not fit into memory",
            f"Each needs {PROCESS_BYTES >> 20} MiB at least, {need / GIB:.1f} GiB in all; "
            f"{have / GIB:.1f} GiB are available.",
            f"Use {path}={max(1, int(0.5 * have / PROCESS_BYTES))} or less, or runtime.type=ray on several machines.",
        )


def require_memory(plan: Plan, spec: Spec) -> None:
    """Refuse a plan that does not fit into memory; a replay on another node is checked there."""
    require_network(plan, spec, LEARNING_COPIES)
    require_processes(plan)
    if not (has_replay_process(plan) and isinstance(plan.runtime, RayRuntime) and plan.runtime.address is not None):
        require_replay(plan, spec)


def require_replay(plan: Plan, spec: Spec) -> None:
    """Refuse a plan whose replay does not fit into this machine's memory, with the numbers."""
    sizes = estimate(plan, spec)
    need = sizes["replay_bytes"]
    have = sizes["available_bytes"]
    if need <= MEMORY_SHARE * have:
        return
    if isinstance(plan.replay, DatasetReplay):
        raise UsageError(
            f"replay.cache_bytes={need} does not fit into memory",
            f"{have / GIB:.1f} GiB are available.",
            f"Use replay.cache_bytes={int(0.8 * have)} or less.",
        )
    fresh = isinstance(plan.replay, FreshReplay)
    path = "replay.rows" if fresh else "replay.capacity"
    given = plan.replay.rows if isinstance(plan.replay, FreshReplay) else plan.replay.capacity
    steps = given * plan.env.num if fresh else given
    raise UsageError(
        f"{path}={given} does not fit into memory",
        f"{steps} steps of {sample_replay(plan, spec).store.row_bytes} bytes need {need / GIB:.1f} GiB; "
        f"{have / GIB:.1f} GiB are available.",
        f"Use {path}={max(1, int(given * 0.8 * have / need))} or less.",
    )
