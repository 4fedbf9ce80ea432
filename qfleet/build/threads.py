"""How many threads an update uses, and how it uses them; with the run's other processes never more than the cores."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from qfleet.nets import draws_random_numbers
from qfleet.plan.schema import (
    ConvTorso,
    ImpalaTorso,
    InlineRuntime,
    MinatarTorso,
    NatureTorso,
    NoMemory,
    Plan,
    RayRuntime,
    StepsView,
)
from qfleet.plan.validate.placement import has_central_inference, has_replay_process
from qfleet.system.cores import usable_cores

# The learner's own thread and one more. The second one pauses while another process uses its core, so it needs no
# core that is always free (system/parallel_tasks.py).
TASK_THREADS = 2


def choose_threads(plan: Plan) -> int:
    """The plan's number; else one for small networks, which are fastest so, and the free cores for convolutions."""
    if plan.runtime.threads is not None:
        return plan.runtime.threads
    if not isinstance(plan.net.torso, NatureTorso | ConvTorso | ImpalaTorso):
        return 1
    return most_threads(plan)


def most_threads(plan: Plan) -> int:
    """As many threads as an update of each learner may use; learners compute all the time and share the cores."""
    if plan.runtime.parallel == "tasks":
        return min(TASK_THREADS, max(1, usable_cores() // plan.learners.num))
    return max(1, (usable_cores() - num_other_processes(plan)) // plan.learners.num)


def num_other_processes(plan: Plan) -> int:
    """Processes on this machine that compute beside the learners: actors, steppers of environments, the replay."""
    runtime = plan.runtime
    if isinstance(runtime, RayRuntime) and runtime.address is not None:
        return 0  # they are on other nodes
    if isinstance(runtime, InlineRuntime):
        return plan.env.workers * (plan.learners.num if plan.learners.bundles else 1)
    if has_central_inference(plan):
        actors = 1 + max(plan.env.workers, plan.actors.num)
    else:
        actors = plan.actors.num * max(1, plan.env.workers)  # an actor waits while its workers step
    return actors + has_replay_process(plan)


def choose_parallel(plan: Plan) -> Literal["tasks", "operations"]:
    """What the plan says; else halves of batches and whole operations side by side, if their order changes nothing."""
    if plan.runtime.parallel is not None:
        return plan.runtime.parallel
    net = plan.net
    custom = plan.custom.head is not None or plan.custom.loss is not None
    chain = isinstance(net.torso, NatureTorso | ConvTorso | MinatarTorso)
    halves = isinstance(net.torso, ImpalaTorso) and not draws_random_numbers(net) and plan.custom.rule is None
    plain = isinstance(net.memory, NoMemory) and isinstance(plan.algo.view, StepsView) and not net.spectral_norm
    on_cpu = torch.device(plan.runtime.device or "cpu").type == "cpu"
    return "tasks" if (chain or halves) and plain and on_cpu and not custom else "operations"


def operation_threads(plan: Plan) -> int | None:
    """The threads of one operation of torch: one, if an update is divided into tasks."""
    return 1 if plan.runtime.parallel == "tasks" else plan.runtime.threads


@contextmanager
def torch_threads(num: int | None) -> Iterator[None]:
    """Inside the block torch computes on `num` threads; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(num or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
