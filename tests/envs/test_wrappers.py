"""Wrappers that a plan names: found, applied in order, everywhere, and refused with their names."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.envs import TRAIN, absolute_env, check_env, is_native, make_world, render_modes
from qfleet.envs.atari import Atari
from qfleet.envs.cartpole import CartPole
from qfleet.errors import EnvError, UsageError
from qfleet.plan.schema import Env
from qfleet.testing import toys
from tests.envs.steps import drive

LIMIT = "gymnasium.wrappers:TimeLimit(max_episode_steps=3)"
OWN = """
import gymnasium as gym
import numpy as np

runs = globals().get("runs", 0) + 1
open(__file__ + ".runs", "a").write("x")


class Env(gym.Env):
    observation_space = gym.spaces.Box(-1000, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, True, False, {}


class Change(gym.ObservationWrapper):
    def __init__(self, env, factor=1.0, plus=0.0):
        super().__init__(env)
        self.factor, self.plus = factor, plus

    def observation(self, observation):
        return np.float32(observation * self.factor + self.plus)


class Kind(gym.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        if not isinstance(env.unwrapped, Env):
            raise ZeroDivisionError("another Env")


def plus_one(env):
    return Change(env, plus=1.0)


def nothing(env):
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_wrappers.py"
    path.write_text(OWN)
    return path


def world(env_id: str, *wrappers: str, **settings: Any) -> Any:
    return make_world(Env(id=env_id, num=2, wrappers=wrappers, **settings), seed=0, stream=TRAIN)


def refused(env_id: str, *wrappers: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        world(env_id, *wrappers)
    return caught.value


def test_the_first_wrapper_is_the_innermost(own: Path) -> None:
    plus = f"{own}:Change(plus=1.0)"
    times = f"{own}:Change(factor=10.0)"
    assert world(f"{own}:Env", plus, times).reset().obs.tolist() == [[10.0], [10.0]]
    assert world(f"{own}:Env", times, plus).reset().obs.tolist() == [[1.0], [1.0]]
    assert world(f"{own}:Env", f"{own}:plus_one").reset().obs.tolist() == [[1.0], [1.0]]


def test_a_file_with_environment_and_wrapper_is_run_once(own: Path) -> None:
    world(f"{own}:Env", f"{own}:Kind", f"{own}:plus_one")
    assert Path(f"{own}.runs").read_text() == "x"


def test_wrappers_are_applied_in_worker_processes(own: Path) -> None:
    made = world(f"{own}:Env", f"{own}:plus_one", workers=1)
    try:
        assert made.reset().obs.tolist() == [[1.0], [1.0]]
    finally:
        made.close()


def test_wrappers_are_put_around_the_users_own_function() -> None:
    made = make_world(Env(id="x", num=1, wrappers=(LIMIT,)), seed=0, stream=TRAIN, make=toys.Constant)
    made.reset()
    assert [bool(step.truncated[0]) for step in drive(made, np.zeros((3, 1), int))] == [False, False, True]


def test_a_wrapper_makes_cartpole_a_plain_environment_that_says_so() -> None:
    plain = world("CartPole-v1", LIMIT)
    assert not isinstance(plain, CartPole)
    assert "slower" in plain.notes[0]
    assert not is_native(Env(id="CartPole-v1", wrappers=(LIMIT,)))
    plain.reset()
    assert [bool(step.truncated.all()) for step in drive(plain, np.zeros((3, 2), int))] == [False, False, True]
    assert isinstance(world("CartPole-v1"), CartPole)


def test_atari_refuses_wrappers_and_says_what_to_write() -> None:
    pytest.importorskip("ale_py")
    error = refused("ALE/Pong-v5", LIMIT)
    assert "cannot be applied to ALE/Pong-v5" in error.what
    assert "path/to/file.py:function" in error.fix
    assert isinstance(world("ALE/Pong-v5"), Atari)


def test_a_wrapper_without_its_settings_is_told_how_to_give_them() -> None:
    error = refused("Acrobot-v1", "gymnasium.wrappers:TimeLimit")
    assert "missing a required argument: 'max_episode_steps'" in error.what
    assert error.why == "It takes max_episode_steps."
    assert "gymnasium.wrappers:TimeLimit(name=value)" in error.fix
    assert "file.py:function" in error.fix
    wrong = refused("Acrobot-v1", "gymnasium.wrappers:TimeLimit(max_episode_steps=3, steps=3)")
    assert "unexpected keyword argument 'steps'" in wrong.what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("gymnasium.wrappers:TimeLimits(a=1)", "has no class or function 'TimeLimits'"),
        ("no_such_module_here:W", "could not be imported"),
        ("no_such_file.py:W", "there is no file no_such_file.py"),
        ("gymnasium.wrappers:TimeLimit(max_episode_steps=-1)", "cannot wrap this environment"),
        ("gymnasium.wrappers:ResizeObservation(shape=(8, 8))", "cannot wrap this environment"),
        ("builtins:repr", "made a str, which is not a Gymnasium environment"),
    ],
)
def test_a_wrong_wrapper_is_named(text: str, what: str) -> None:
    error = refused("Acrobot-v1", text)
    assert error.what.startswith("env.wrappers=")
    assert what in error.what


def test_the_nearest_wrapper_of_a_package_is_named() -> None:
    assert "TimeLimit" in refused("Acrobot-v1", "gymnasium.wrappers:TimeLimits").why


def test_a_wrapper_that_fails_is_an_environments_error(own: Path) -> None:
    with pytest.raises(EnvError, match=r"the wrapper raised ZeroDivisionError: another Env"):
        world("Acrobot-v1", f"{own}:Kind")
    assert "lacks observation_space" in refused(f"{own}:Env", f"{own}:nothing").why.lower()


def test_the_check_applies_the_wrappers(own: Path) -> None:
    found = {check.name: check for check in check_env(Env(id="Acrobot-v1", wrappers=(LIMIT,)))}
    assert all(check.ok for check in found.values())
    assert " 0 terminated, 100 truncated" in found["contract"].detail


def test_paths_are_recorded_absolutely(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    env = absolute_env(Env(id="own_wrappers.py:Env", wrappers=("own_wrappers.py:Change(plus=1.0)", LIMIT)))
    assert env.wrappers == (f"{own.resolve()}:Change(plus=1.0)", LIMIT)
    monkeypatch.chdir("/")
    assert make_world(env, seed=0, stream=TRAIN).reset().obs[0].tolist() == [1.0]


def test_a_world_that_ends_its_file_is_not_left_in_the_modules(tmp_path: Path) -> None:
    (tmp_path / "broken_wrapper.py").write_text("raise RuntimeError('no')\n")
    with pytest.raises(EnvError, match=r"broken_wrapper\.py raised RuntimeError: no"):
        world("Acrobot-v1", f"{tmp_path / 'broken_wrapper.py'}:W")
    assert "qfleet_own_broken_wrapper" not in sys.modules


def test_render_modes_are_those_that_are_declared(own: Path) -> None:
    assert render_modes(Env(id="CartPole-v1")) == ("human", "rgb_array")
    assert "ansi" in render_modes(Env(id="FrozenLake-v1"))
    assert render_modes(Env(id=f"{own}:Env")) == ()
    assert render_modes(Env(id="x"), toys.Constant) == ()

    class Drawn(toys.Constant):
        def render(self) -> Any:
            return np.zeros((4, 4, 3), np.uint8)

    assert render_modes(Env(id="x"), Drawn) == ("rgb_array",)
