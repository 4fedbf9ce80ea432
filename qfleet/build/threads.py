"""How many threads an update uses, and how it uses them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from qfleet.nets import draws_random_numbers
from qfleet.plan.schema import ConvTorso, ImpalaTorso, MinatarTorso, NatureTorso, NoMemory, Plan, StepsView


def choose_threads(plan: Plan) -> int:
    """Small networks are fastest on one thread; convolutions use every core."""
    if plan.runtime.threads is not None:
        return plan.runtime.threads
    return len(os.sched_getaffinity(0)) if isinstance(plan.net.torso, NatureTorso | ConvTorso | ImpalaTorso) else 1


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
