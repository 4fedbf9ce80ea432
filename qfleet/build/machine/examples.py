"""The updates that are measured: small examples of what runs do."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from qfleet.build.machine.choices import multiplies_bfloat16
from qfleet.build.machine.table import GRIDS, LAYOUT, ONE_THREAD, OPERATIONS, PICTURES, TASKS, VECTORS
from qfleet.build.resolve import with_runtime
from qfleet.build.threads import TASK_THREADS, operation_threads
from qfleet.data import Batch, Spec
from qfleet.learn import make_learner
from qfleet.nets import NATURE, make_net
from qfleet.plan.schema import Algo, Env, InlineRuntime, MinatarTorso, MlpTorso, NatureTorso, Net, Plan


@dataclass(frozen=True)
class Example:
    """An update that is measured: its network, observations and batch, and words about it."""

    short: str
    details: str
    net: Net
    spec: Spec
    batch_size: int


EXAMPLES = {
    PICTURES: Example(
        "nature", "84x84 pixels, batch 32", Net(torso=NatureTorso()), Spec((84, 84), "uint8", (6,), stack=4), 32
    ),
    GRIDS: Example("minatar", "10x10 cells, batch 32", Net(torso=MinatarTorso()), Spec((4, 10, 10), "uint8", (6,)), 32),
    VECTORS: Example(
        "mlp", "120-84, batch 128", Net(torso=MlpTorso(sizes=(120, 84))), Spec((4,), "float32", (2,)), 128
    ),
}
TEXTS = {name: f"{example.short}, {example.details}" for name, example in EXAMPLES.items()}
TEXTS |= {LAYOUT: "convolutions of nature alone, batch 32"}


class Contestant(Protocol):
    """One way of an update."""

    threads: int | None

    def update(self) -> object:
        """Make one update."""

    def is_hindered(self) -> bool:
        """Does a part of it pause, because another program needs the core?"""


class LearnerContestant:
    """Updates of a learner."""

    def __init__(self, plan: Plan, spec: Spec) -> None:
        self.threads = operation_threads(plan)
        net = make_net(plan.net, spec, normalize=plan.env.normalize, seed=0)
        self.learner = make_learner(plan, spec, net, torch.device("cpu"))
        self.batch = random_batch(plan, spec)

    def update(self) -> object:
        """Make one update."""
        return self.learner.update(self.batch)

    def is_hindered(self) -> bool:
        """Does the second thread pause, because another program needs its core?"""
        tasks = self.learner.gradients.tasks
        return tasks is not None and tasks.contention.is_paused(tasks.clock())

    def close(self) -> None:
        """End the second thread."""
        if self.learner.gradients.tasks is not None:
            self.learner.gradients.tasks.close()


class LayoutContestant:
    """Convolutions forwards and backwards, with the numbers of a pixel side by side or not."""

    threads: int | None = 1

    def __init__(self, example: Example, layout: torch.memory_format) -> None:
        depths = [example.spec.input_shape[0], *(channels for channels, _, _ in NATURE)]
        layers = [nn.Conv2d(depth, *convolution) for depth, convolution in zip(depths, NATURE, strict=False)]
        self.layers = nn.Sequential(*layers).to(memory_format=layout)  # type: ignore[call-overload]
        self.images = torch.rand(example.batch_size, *example.spec.input_shape).contiguous(memory_format=layout)

    def update(self) -> object:
        """Compute outputs and gradients."""
        values = self.images
        for layer in self.layers:
            values = functional.relu(layer(values))
        return torch.autograd.grad(values.sum(), list(self.layers.parameters()))

    def is_hindered(self) -> bool:
        """It has one thread."""
        return False


def random_batch(plan: Plan, spec: Spec) -> Batch:
    """A random batch in the plan's shape."""
    num = plan.algo.batch_size
    rng = np.random.default_rng(0)
    top = 256 if spec.dtype == "uint8" else 2
    obs, next_obs = (rng.integers(0, top, (num, *spec.input_shape)).astype(spec.dtype) for _ in range(2))
    ones = np.ones(num, np.float32)
    action = rng.integers(0, spec.num_actions, num)
    return Batch(obs, action, ones, ones * 0.9, next_obs, ones, np.arange(num))


def example_plan(example: Example, **runtime: object) -> Plan:
    """The plan of an example, with these settings of `runtime`."""
    plan = Plan(
        env=Env(id="none"), net=example.net, algo=Algo(batch_size=example.batch_size), runtime=InlineRuntime("cpu")
    )
    return with_runtime(plan, **runtime)


def ways_of(name: str, cores: int) -> dict[str, dict[str, object]]:
    """The ways in which an example is measured, as settings of `runtime`."""
    ways: dict[str, dict[str, object]] = {ONE_THREAD: {"threads": 1, "parallel": "tasks"}}
    if name != VECTORS and cores > 1:
        ways[TASKS] = {"threads": TASK_THREADS, "parallel": "tasks"}
    if name == PICTURES and cores > 1:
        ways[OPERATIONS] = {"threads": cores, "parallel": "operations"}
    precisions = ("float32", "bfloat16") if name == PICTURES and multiplies_bfloat16() else ("float32",)
    return {
        f"{precision} {way}": {**settings, "precision": precision, "compile": False}
        for precision in precisions
        for way, settings in ways.items()
    }
