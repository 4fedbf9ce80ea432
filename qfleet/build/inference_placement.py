"""Where actions are chosen: in every actor, or in one process for all; a measurement of a second or two decides.

`local`: each actor's process steps its own environments and runs the network on their observations. `central`: one
process runs the network on all observations, and environments are stepped in processes of their own (native
worlds in threads of their own). Small batches favour the first, accelerators and large networks the second.
"""

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
from qfleet.build.resolve import require_device
from qfleet.build.threads import torch_threads
from qfleet.build.worlds import ROLES, EnvMaker
from qfleet.data import World
from qfleet.envs import time_env
from qfleet.envs.step_timer import random_allowed_actions
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.errors import EnvError
from qfleet.plan.schema import Plan, ProcessesRuntime
from qfleet.system.child_process import fork_server
from qfleet.system.cores import usable_cores
from qfleet.system.worker_process import WorkerOptions, WorkerProcess

ROUND_TRIP_SECONDS = 1.5e-4  # if it cannot be measured
ECHO_SECONDS = 60.0  # until the other process replies for the first time, imports included
MEASURE_SECONDS = 0.3
MIN_CALLS = 5
WARM_CALLS = 3


@dataclass(frozen=True)
class Costs:
    """Measured seconds: of one environment's step, and of a forward pass by device and batch size.

    `round_trip_seconds` is the time to another process and back, for one step of all lanes.
    """

    step_seconds: float
    forward_seconds: dict[tuple[str, int], float]
    round_trip_seconds: float = ROUND_TRIP_SECONDS


@dataclass(frozen=True)
class Placement:
    """One placement of inference, and its expected speed."""

    inference: Literal["local", "central"]
    device: str
    batch: int
    steps_per_second: float

    def __str__(self) -> str:
        return f"{self.inference} (batch {self.batch} on {self.device}): {self.steps_per_second:,.0f} steps/s"


def rank_placements(plan: Plan, costs: Costs, cores: int) -> list[Placement]:
    """Every placement that the plan allows, the fastest first. One core is the learner's, if there are several."""
    envs = plan.env.num
    actors = plan.actors.num
    processes_per_core = max(1.0, actors / max(1, cores - 1))
    stepping = envs / actors * costs.step_seconds * processes_per_core
    found = []
    for (device, batch), forward_time in costs.forward_seconds.items():
        if batch == envs // actors:
            found.append(Placement("local", device, batch, envs / (forward_time * processes_per_core + stepping)))
        if batch == envs:
            found.append(
                Placement("central", device, batch, envs / (forward_time + stepping + costs.round_trip_seconds))
            )
    return sorted((place for place in found if is_open(plan, place)), key=lambda place: -place.steps_per_second)


def is_open(plan: Plan, place: Placement) -> bool:
    """Does the plan allow this placement? With one actor local and central are the same."""
    runtime = plan.runtime
    if not isinstance(runtime, ProcessesRuntime) or (plan.actors.num == 1 and place.inference == "central"):
        return False
    return runtime.inference in (None, place.inference) and runtime.inference_device in (None, place.device)


def measure(
    plan: Plan, world: World, policy_on: Callable[[torch.device], Policy], make: EnvMaker | None = None
) -> Costs:
    """Time one environment, and the network for the possible batches and devices.

    An environment in Python is timed in a process of its own, where it may hang or crash.
    """
    taken = time_env(plan.env, make) if isinstance(world, SyncVectorEnv) else step_seconds(world)
    forward_seconds: dict[tuple[str, int], float] = {}
    named = plan.runtime.inference_device if isinstance(plan.runtime, ProcessesRuntime) else None
    for device in devices() if named is None else [named]:
        policy = policy_on(torch.device(device))
        for batch in sorted({plan.env.num // plan.actors.num, plan.env.num}):
            obs = np.zeros((batch, *world.spec.input_shape), world.spec.dtype)
            state = policy.initial_state(batch)
            # Not the mean: another program may have used the core for a while.
            forward_seconds[device, batch] = median(call_seconds(partial(policy.forward, obs, state)))
    handover = round_trip_seconds() if plan.actors.num > 1 else 0.0  # with one actor nothing is central
    return Costs(taken, forward_seconds, handover)


def echo(connection: Connection) -> None:
    """The main function of a process that sends back what it receives."""
    with suppress(EOFError, OSError):
        while connection.poll(ECHO_SECONDS):
            connection.send_bytes(connection.recv_bytes(64))


def round_trip_seconds() -> float:
    """Seconds of a message to another process and its reply."""
    context = fork_server(ROLES)
    connection, child_connection = context.Pipe()
    process = WorkerProcess(context, "echo", echo, child_connection, WorkerOptions())
    with child_connection:
        process.start()

    def round_trip() -> None:
        connection.send_bytes(b"?")
        if not connection.poll(ECHO_SECONDS):
            raise TimeoutError
        connection.recv_bytes(64)

    try:
        return median(call_seconds(round_trip))
    except (TimeoutError, EOFError, OSError):
        return ROUND_TRIP_SECONDS
    finally:
        process.close()
        connection.close()


def devices() -> list[str]:
    """Devices of this machine."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def step_seconds(world: World) -> float:
    """Seconds of one step of one environment, resets included."""
    rng = np.random.default_rng(0)
    last = [world.reset()]

    def step() -> None:
        world.send(random_allowed_actions(world, last[0], rng))
        last[0] = world.receive()

    return fmean(call_seconds(step)) / world.num  # not the median: resets are rare and expensive


def call_seconds(act: Callable[[], object]) -> list[float]:
    """Seconds of each call, after a warm-up, on one thread as in an actor."""
    with torch_threads(1):
        for _ in range(WARM_CALLS):
            act()
        begin = time.perf_counter()
        last = begin
        found = list[float]()
        while len(found) < MIN_CALLS or last - begin < MEASURE_SECONDS:
            act()
            now = time.perf_counter()
            found.append(now - last)
            last = now
        return found


def choose_inference(
    plan: Plan, world: World, policy_on: Callable[[torch.device], Policy], make: EnvMaker | None = None
) -> tuple[Plan, list[str]]:
    """The plan with inference where it is fastest, and notes about it; `world` has one lane."""
    runtime = plan.runtime
    if not isinstance(runtime, ProcessesRuntime):
        return plan, []
    if runtime.inference_device is not None:
        require_device("runtime.inference_device", runtime.inference_device)
    if None not in (runtime.inference, runtime.inference_device):
        return plan, []
    try:
        found = rank_placements(plan, measure(plan, world, policy_on, make), usable_cores())
        chosen = found[0]
        note = placements_text(found)
    except EnvError as error:  # actors are restarted when an environment fails, so a measurement need not end the run
        chosen = Placement(runtime.inference or "local", runtime.inference_device or "cpu", 0, 0.0)
        note = f"{chosen.inference} on {chosen.device}, not measured: {error.what}"
    runtime = msgspec.structs.replace(runtime, inference=chosen.inference, inference_device=chosen.device)
    return msgspec.structs.replace(plan, runtime=runtime), [f"inference: {note}"]


def placements_text(found: Iterable[Placement]) -> str:
    """The placements for a note, the chosen one first."""
    first, *rest = map(str, found)
    return f"{first} expected" + "".join(f"; {other}" for other in rest)
