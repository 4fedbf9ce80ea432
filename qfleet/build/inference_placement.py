"""Where actions are chosen: in every actor, or in one for all of them; decided by a measurement of a second or two.

`local`: each actor's process steps its own environments and runs the network on their observations. `central`: one
process runs the network on everybody's observations, and environments are stepped in processes of their own (native
worlds in threads of their own). Small batches favour the first, accelerators and large networks the second.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Literal

import msgspec
import numpy as np
import torch

from qfleet.act import Policy
from qfleet.build.components import ROLES, EnvMaker
from qfleet.build.resolve import require_device
from qfleet.data import World
from qfleet.envs import time_env
from qfleet.envs.step_timer import random_allowed_actions
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.errors import EnvError
from qfleet.plan.schema import Plan, ProcessesRuntime
from qfleet.system.child_process import die_with_parent, fork_server, hidden_main

HANDOVER_SECONDS = 1.5e-4  # where it could not be measured
ECHO_SECONDS = 60.0  # until the other process answers for the first time, imports included
MEASURE_SECONDS = 0.3
FEWEST_TIMES = 5
WARM_TIMES = 3
END_SECONDS = 0.5


@dataclass(frozen=True)
class Costs:
    """What was measured: seconds of one environment's step, and of the network by device and batch size.

    `handover_seconds` is the way from one process to another and back, for one step of all lanes.
    """

    step_seconds: float
    look_seconds: dict[tuple[str, int], float]
    handover_seconds: float = HANDOVER_SECONDS


@dataclass(frozen=True)
class Place:
    """One way to act, and how fast it should be."""

    inference: Literal["local", "central"]
    device: str
    batch: int
    steps_per_second: float

    def __str__(self) -> str:
        return f"{self.inference} (batch {self.batch} on {self.device}): {self.steps_per_second:,.0f} steps/s"


def places(plan: Plan, costs: Costs, cores: int) -> list[Place]:
    """Every way that the plan leaves open, the fastest first. One core is the learner's, if there are several."""
    envs = plan.env.num
    actors = plan.actors.num
    crowding = max(1.0, actors / max(1, cores - 1))  # processes per core
    stepping = envs / actors * costs.step_seconds * crowding
    found = []
    for (device, batch), look in costs.look_seconds.items():
        if batch == envs // actors:
            found.append(Place("local", device, batch, envs / (look * crowding + stepping)))
        if batch == envs:
            found.append(Place("central", device, batch, envs / (look + stepping + costs.handover_seconds)))
    return sorted((place for place in found if is_open(plan, place)), key=lambda place: -place.steps_per_second)


def is_open(plan: Plan, place: Place) -> bool:
    """Does the plan leave this place open? One actor is as central as can be."""
    runtime = plan.runtime
    if not isinstance(runtime, ProcessesRuntime) or (plan.actors.num == 1 and place.inference == "central"):
        return False
    return runtime.inference in (None, place.inference) and runtime.inference_device in (None, place.device)


def measure(
    plan: Plan, world: World, policy_on: Callable[[torch.device], Policy], make: EnvMaker | None = None
) -> Costs:
    """Time one environment, and the network for the batches and devices in question.

    An environment in Python is timed in a process of its own, where it may hang or crash.
    """
    taken = time_env(plan.env, make) if isinstance(world, SyncVectorEnv) else step_seconds(world)
    looks: dict[tuple[str, int], float] = {}
    named = plan.runtime.inference_device if isinstance(plan.runtime, ProcessesRuntime) else None
    for device in devices() if named is None else [named]:
        policy = policy_on(torch.device(device))
        for batch in sorted({plan.env.num // plan.actors.num, plan.env.num}):
            obs = np.zeros((batch, *world.spec.input_shape), world.spec.dtype)
            state = policy.initial_state(batch)
            looked = timed(partial(policy.forward, obs, state))
            looks[device, batch] = median(looked)  # somebody else may have had the core for a while
    handover = handover_seconds() if plan.actors.num > 1 else 0.0  # of one actor none is central
    return Costs(taken, looks, handover)


def echo(line: Connection) -> None:
    """Another process that says what it hears."""
    die_with_parent()
    with suppress(EOFError, OSError):
        while line.poll(ECHO_SECONDS):
            line.send_bytes(line.recv_bytes(64))


def handover_seconds() -> float:
    """Two wake-ups and their way, tried with another process."""
    context = fork_server(ROLES)
    line, theirs = context.Pipe()
    process = context.Process(target=echo, args=(theirs,), name="qfleet-echo", daemon=True)
    with hidden_main(), theirs:
        process.start()

    def ask() -> None:
        line.send_bytes(b"?")
        if not line.poll(ECHO_SECONDS):
            raise TimeoutError
        line.recv_bytes(64)

    try:
        return median(timed(ask))
    except (TimeoutError, EOFError, OSError):
        return HANDOVER_SECONDS
    finally:
        process.kill()
        process.join(END_SECONDS)
        line.close()


def devices() -> list[str]:
    """Where a network can run here."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def step_seconds(world: World) -> float:
    """Seconds of one step of one environment, resets included."""
    rng = np.random.default_rng(0)
    last = [world.reset()]

    def step() -> None:
        world.send(random_allowed_actions(world, last[0], rng))
        last[0] = world.receive()

    return fmean(timed(step)) / world.num  # not their median: resets are rare and dear


def timed(act: Callable[[], object]) -> list[float]:
    """Seconds of a call, warmed up, of as many as fit into the time; on one thread, as an actor has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(WARM_TIMES):
            act()
        begin = last = time.perf_counter()
        found = list[float]()
        while len(found) < FEWEST_TIMES or last - begin < MEASURE_SECONDS:
            act()
            now = time.perf_counter()
            found.append(now - last)
            last = now
        return found
    finally:
        torch.set_num_threads(before)


def settled(
    plan: Plan, world: World, policy_on: Callable[[torch.device], Policy], make: EnvMaker | None = None
) -> tuple[Plan, list[str]]:
    """The plan with inference where it is fastest, and what to tell about it; `world` has one lane."""
    runtime = plan.runtime
    if not isinstance(runtime, ProcessesRuntime):
        return plan, []
    if runtime.inference_device is not None:
        require_device("runtime.inference_device", runtime.inference_device)
    if None not in (runtime.inference, runtime.inference_device):
        return plan, []
    try:
        found = places(plan, measure(plan, world, policy_on, make), len(os.sched_getaffinity(0)))
        chosen = found[0]
        note = listed(found)
    except EnvError as error:  # actors are replaced when an environment fails; a measurement is not worth the run
        chosen = Place(runtime.inference or "local", runtime.inference_device or "cpu", 0, 0.0)
        note = f"{chosen.inference} on {chosen.device}, not measured: {error.what}"
    runtime = msgspec.structs.replace(runtime, inference=chosen.inference, inference_device=chosen.device)
    return msgspec.structs.replace(plan, runtime=runtime), [f"inference: {note}"]


def listed(found: Iterable[Place]) -> str:
    """The places in words, the one that was chosen first."""
    first, *rest = map(str, found)
    return f"{first} expected" + "".join(f"; {other}" for other in rest)
