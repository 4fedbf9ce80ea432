"""Making the world of a plan."""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym

from qfleet import heartbeat
from qfleet.data import World
from qfleet.envs.atari import Atari, atari_game, register
from qfleet.envs.cartpole import OPTIONS, CartPole
from qfleet.envs.env_id import env_maker, unknown_id_error, user_env_maker
from qfleet.envs.episodes import TRAIN
from qfleet.envs.options import checked_options, secret_variables
from qfleet.envs.single_env import declared_render_modes, make_checked_env
from qfleet.envs.sync_vector import AnyEnv, SyncVectorEnv
from qfleet.envs.workers.main import EnvWorkerTask
from qfleet.envs.workers.process import measure_step_seconds
from qfleet.envs.workers.vector import ProcessVectorEnv
from qfleet.errors import UsageError
from qfleet.heartbeat import CLOSE, env_call
from qfleet.plan.schema import Env
from qfleet.system.sent_objects import pack_object

_ATARI_ID = re.compile(r"ALE/\w+-v5|\w+NoFrameskip-v4")  # of the standard Atari task
_CARTPOLE_STEPS = {"CartPole-v0": 200, "CartPole-v1": 500}
# In training a new Atari seed costs time; in evaluation every episode has a seed of its own.
_RESEED_STEPS = 1_000
_GIB = 2**30


def make_world(
    env: Env,
    *,
    seed: int,
    stream: int,
    num: int | None = None,
    make: Callable[[], AnyEnv] | None = None,
    threads: int = 1,
    render_mode: str | None = None,
    logs: Path | None = None,
    info: tuple[str, ...] = (),
) -> World:
    """The plan's world with `num` lanes; `make`, if given, is used instead of the id. `stream` separates seeds.

    `info` names numbers in the info of a step, which native worlds do not have.
    Output of environments in worker processes goes to files in the folder `logs`, or beside it if `logs` is a file;
    without `logs` it is discarded. A world with a render mode stays in this process.
    """
    num = num or env.num
    heartbeat.update_run_info(env=env.id, step_seconds=env.step_timeout_seconds)
    if make is None and _ATARI_ID.fullmatch(env.id):
        _refuse_settings_of_single_envs(env, info)
        return _atari(env, num, seed, stream, threads)
    _refuse_atari_settings(env)
    if is_native(env, make) and render_mode is None:
        _refuse_settings_of_single_envs(env, info)
        given = checked_options(env.options, OPTIONS, env.id) if env.options else {}
        options = {"max_episode_steps": _CARTPOLE_STEPS[env.id], **given}
        return CartPole(num, seed=seed, stream=stream, **options)  # type: ignore[arg-type]
    if env.workers and render_mode is None:
        return _process_vector(env, num, seed, stream, make, logs, info)
    maker = user_env_maker(env, make, render_mode) if make is not None else env_maker(env, render_mode)
    world = SyncVectorEnv(
        maker, num, seed=seed, stream=stream, name=env.id, bins=env.bins, check_bounds=env.check_bounds, info=info
    )
    if env.wrappers and make is None and env.id in _CARTPOLE_STEPS:
        world.notes = (*world.notes, f"{env.id}: with env.wrappers its copies are stepped one by one, which is slower")
    return world


def time_env(env: Env, make: Callable[[], AnyEnv] | None = None) -> float:
    """Seconds per step of one environment, timed in a process of its own because it may hang or crash."""
    return measure_step_seconds(_task(env, make), env.step_timeout_seconds)


def is_native(env: Env, make: Callable[[], AnyEnv] | None = None) -> bool:
    """Are all copies of the environment stepped together in native code?"""
    if env.wrappers and env.id in _CARTPOLE_STEPS:
        return False  # a wrapper wraps one environment
    if make is not None or env.id not in _CARTPOLE_STEPS:
        return make is None and _ATARI_ID.fullmatch(env.id) is not None
    return not env.options or checked_options(env.options, OPTIONS, env.id).keys() <= OPTIONS.keys()


def render_modes(env: Env, make: Callable[[], AnyEnv] | None = None) -> tuple[str, ...]:
    """The render modes that an environment declares; one with a render() and no declaration is taken for pictures."""
    if make is None and _ATARI_ID.fullmatch(env.id):
        return ("rgb_array",)
    one = make_checked_env(user_env_maker(env, make) if make is not None else env_maker(env), env.id)
    try:
        return declared_render_modes(one)
    finally:
        with env_call(CLOSE), contextlib.suppress(Exception):
            one.close()


def _atari(env: Env, num: int, seed: int, stream: int, threads: int) -> Atari:
    register()
    if env.id not in gym.registry:
        raise unknown_id_error(env.id)
    game, sticky = atari_game(env.id)
    return Atari(
        game,
        num,
        seed=seed,
        stream=stream,
        sticky=sticky if env.sticky is None else env.sticky,
        frame_size=env.frame_size,
        threads=threads,
        reseed_steps=_RESEED_STEPS if stream == TRAIN else 0,
        options=env.options,
    )


def _process_vector(
    env: Env,
    num: int,
    seed: int,
    stream: int,
    make: Callable[[], AnyEnv] | None,
    logs: Path | None,
    info: tuple[str, ...],
) -> ProcessVectorEnv:
    return ProcessVectorEnv(
        replace(_task(env, make), info=info),
        num,
        seed=seed,
        stream=stream,
        workers=env.workers,
        step_seconds=env.step_timeout_seconds,
        rebuilds=env.rebuilds,
        memory_bytes=None if env.worker_memory_gib is None else env.worker_memory_gib * _GIB,
        logs=logs,
    )


def _task(env: Env, make: Callable[[], AnyEnv] | None) -> EnvWorkerTask:
    if make is None:
        entry = gym.registry.get(env.id)
        text = f"the function that {env.id!r} was registered with"
        registered = None if entry is None else _pickled(env, entry, text)
        return EnvWorkerTask(env, None, registered, os.getcwd(), secret_variables(env))
    user_env_maker(env, make)  # refuses options and secrets, which a function does not take
    pickled = _pickled(env, make, f"your function {getattr(make, '__qualname__', make)}")
    return EnvWorkerTask(env, pickled, None, os.getcwd())


def _pickled(env: Env, value: Any, name: str) -> bytes:
    try:
        return pack_object(value)
    except Exception as error:
        raise UsageError(
            f"env.workers={env.workers}: {name} cannot be sent to another process.",
            f"Python's error: {error}.",
            "Let it hold no open files, locks or generators, or remove env.workers.",
        ) from error


def _refuse_settings_of_single_envs(env: Env, info: tuple[str, ...]) -> None:
    if info:
        raise UsageError(
            f"log.info={','.join(info)} has no effect on {env.id}.",
            "It is stepped in native code, whose steps have no info.",
            "Remove log.info.",
        )
    if env.workers:
        why = "All its copies are stepped together in native code, faster than one process can answer another."
        raise _no_effect("workers", env.workers, env.id, why)
    if not env.check_bounds:
        raise _no_effect("check_bounds", "false", env.id, "It is stepped in native code, whose answers need no check.")
    if env.secrets:
        raise _no_effect("secrets", env.secrets, env.id, "It takes no secrets.")
    if env.bins is not None:
        raise _no_effect("bins", env.bins, env.id, "Its actions are discrete already.")
    if env.wrappers:
        raise UsageError(
            f"env.wrappers={list(env.wrappers)} cannot be applied to {env.id}.",
            "All its copies are stepped together in native code, and a wrapper wraps a single environment.",
            "Write a function that makes and wraps one (gymnasium.make, AtariPreprocessing, your wrapper), "
            "and name it: path/to/file.py:function; it is slower.",
        )


def _refuse_atari_settings(env: Env) -> None:
    why = "Only Atari ids (ALE/Pong-v5, PongNoFrameskip-v4, ...) know it."
    if env.frame_size is not None:
        raise _no_effect("frame_size", env.frame_size, env.id, why)
    if env.sticky is not None:
        raise _no_effect("sticky", env.sticky, env.id, why)


def _no_effect(key: str, value: object, name: str, why: str) -> UsageError:
    return UsageError(f"env.{key}={value} has no effect on {name}.", why, f"Remove env.{key}.")
