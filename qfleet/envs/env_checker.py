"""Looking an environment over before training on it: `qfleet env check ID`."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qfleet.data import Array, Step, World
from qfleet.envs.episodes import TRAIN
from qfleet.envs.make import make_world
from qfleet.envs.step_timer import any_allowed
from qfleet.envs.sync_vector import AnyEnv
from qfleet.errors import EnvError
from qfleet.plan.schema import Env

_LANES = 2
_STEPS = 200
_SPEED_SECONDS = 0.5

Probe = Callable[[World], tuple[bool, str]]


class EnvCheck(NamedTuple):
    """One thing looked at: its name, whether it is as it should be, and what was seen."""

    name: str
    ok: bool
    detail: str


def check_env(env: Env, make: Callable[[], AnyEnv] | None = None) -> list[EnvCheck]:
    """Everything qfleet can say about an environment; a plan that cannot be made raises `UsageError` as in training."""
    try:
        world = make_world(env, seed=0, stream=TRAIN, num=_LANES, make=make)
    except EnvError as error:
        return [EnvCheck("made", False, error.what)]
    probes: dict[str, Probe] = {
        "contract": _contract,
        "determinism": _determinism,
        "re-drive": _redrive,
        "masks": _masks,
        "speed": _speed,
    }
    checks = [EnvCheck("made", True, f"{type(world).__name__} world"), EnvCheck("spaces", True, _spaces(world))]
    try:
        checks += [_look(name, probe, world) for name, probe in probes.items()]
    finally:
        world.close()
    return checks


def _look(name: str, probe: Probe, world: World) -> EnvCheck:
    try:
        return EnvCheck(name, *probe(world))
    except EnvError as error:
        return EnvCheck(name, False, error.what)


def _spaces(world: World) -> str:
    spec = world.spec
    dimensions = f" ({' x '.join(map(str, spec.actions))})" if len(spec.actions) > 1 else ""
    notes = "".join(f"; {note}" for note in getattr(world, "notes", ()))
    return f"observation {spec.input_shape} {spec.dtype}, {spec.num_actions} actions{dimensions}{notes}"


def _drive(world: World, steps: int = _STEPS) -> list[Step]:
    """The same random but allowed actions each time, from the first reset."""
    rng = np.random.default_rng(0)
    seen = [world.reset()]
    for _ in range(steps):
        world.send(any_allowed(world, seen[-1], rng))
        seen.append(world.receive())
    return seen


def _contract(world: World) -> tuple[bool, str]:
    seen = _drive(world)
    terminated, truncated = (int(sum(getattr(s, key).sum() for s in seen)) for key in ("terminated", "truncated"))
    reward = np.stack([step.reward for step in seen])
    detail = f"{_LANES} x {_STEPS} steps, {terminated} terminated, {truncated} truncated"
    return True, f"{detail}, rewards {reward.min():g} to {reward.max():g}"


def _determinism(world: World) -> tuple[bool, str]:
    first = _drive(world)
    second = _drive(world)
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        if not _same(a, b):
            return False, f"same seed and actions, but step {number} differs: runs cannot be repeated exactly"
    return True, "same seed and actions gave the same observations, rewards and ends"


def _redrive(world: World) -> tuple[bool, str]:
    reached = _drive(world)[-1]
    again = world.load_state_dict(world.state_dict())
    if np.array_equal(reached.obs, again.obs) and np.array_equal(_ended(reached), _ended(again)):
        return True, "a saved episode was reached again exactly: resuming is exact"
    return False, "a saved episode could not be reached again: resuming starts new episodes and is not exact"


def _masks(world: World) -> tuple[bool, str]:
    if not world.spec.masked:
        return True, 'no info["action_mask"]: every action is always allowed'
    allowed = np.mean([step.mask.mean() for step in _drive(world) if step.mask is not None])
    return True, f"action masks given; {allowed:.0%} of the actions are allowed on average"


def _speed(world: World) -> tuple[bool, str]:
    step = world.reset()
    count = 0
    start = time.monotonic()
    rng = np.random.default_rng(0)
    while time.monotonic() - start < _SPEED_SECONDS:
        world.send(any_allowed(world, step, rng))
        step = world.receive()
        count += world.num
    return True, f"{count / (time.monotonic() - start):,.0f} steps per second in one process, {world.num} lanes"


def _ended(step: Step) -> Array:
    return step.terminated | step.truncated


def _same(a: Step, b: Step) -> bool:
    return all(np.array_equal(getattr(a, key), getattr(b, key)) for key in ("obs", "reward", "terminated", "truncated"))
