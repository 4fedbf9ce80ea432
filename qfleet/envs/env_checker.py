"""Checking an environment before training on it: `qfleet env check ID`."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qfleet.data import Array, Step, World
from qfleet.envs.episodes import TRAIN
from qfleet.envs.make import make_world
from qfleet.envs.step_timer import random_allowed_actions, time_steps
from qfleet.envs.sync_vector import AnyEnv
from qfleet.errors import EnvError
from qfleet.plan.schema import Env

_LANES = 2
_STEPS = 200


Probe = Callable[[World], tuple[bool, str]]


class EnvCheck(NamedTuple):
    """The result of one check: its name, whether it passed, and details."""

    name: str
    ok: bool
    detail: str


def check_env(env: Env, make: Callable[[], AnyEnv] | None = None) -> list[EnvCheck]:
    """Run all checks of an environment; an invalid plan raises `UsageError` as in training."""
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
        checks += [_run_probe(name, probe, world) for name, probe in probes.items()]
    finally:
        world.close()
    return checks


def _run_probe(name: str, probe: Probe, world: World) -> EnvCheck:
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
    """Reset the world and step it with allowed random actions, the same in every call."""
    rng = np.random.default_rng(0)
    history = [world.reset()]
    for _ in range(steps):
        world.send(random_allowed_actions(world, history[-1], rng))
        history.append(world.receive())
    return history


def _contract(world: World) -> tuple[bool, str]:
    history = _drive(world)
    terminated = sum(int(step.terminated.sum()) for step in history)
    truncated = sum(int(step.truncated.sum()) for step in history)
    reward = np.stack([step.reward for step in history])
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
    saved = _drive(world)[-1]
    restored = world.load_state_dict(world.state_dict())
    if np.array_equal(saved.obs, restored.obs) and np.array_equal(_ended(saved), _ended(restored)):
        return True, "a saved episode was reached again exactly: resuming is exact"
    return False, "a saved episode could not be reached again: resuming starts new episodes and is not exact"


def _masks(world: World) -> tuple[bool, str]:
    if not world.spec.masked:
        return True, 'no info["action_mask"]: every action is always allowed'
    allowed = np.mean([step.mask.mean() for step in _drive(world) if step.mask is not None])
    return True, f"action masks given; {allowed:.0%} of the actions are allowed on average"


def _speed(world: World) -> tuple[bool, str]:
    return True, f"{1 / time_steps(world):,.0f} steps per second in one process, {world.num} lanes"


def _ended(step: Step) -> Array:
    return step.terminated | step.truncated


def _same(a: Step, b: Step) -> bool:
    return all(np.array_equal(getattr(a, key), getattr(b, key)) for key in ("obs", "reward", "terminated", "truncated"))
