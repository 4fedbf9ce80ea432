"""Checks of what environments return: rewards, flags, info, and observations outside their bounds."""

from fractions import Fraction
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from qfleet.data import Array
from qfleet.envs import TRAIN, check_env, make_world
from qfleet.envs.bounds import OutsideSpace
from qfleet.envs.spaces import adapt_obs
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.errors import EnvError, UsageError
from qfleet.plan.schema import Env


class ScriptedEnv(gym.Env[Any, Any]):
    """Returns the given values in its second step."""

    def __init__(self, space: spaces.Space[Any] | None = None, **values: Any) -> None:
        self.observation_space = space or spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.valid = {"obs": self.observation_space.sample(), "reward": 1.0, "terminated": False, "truncated": False}
        self.values = values
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return self.valid["obs"], {}

    def step(self, action: Any) -> Any:
        self.count += 1
        returned = {**self.valid, "info": {}, **(self.values if self.count == 2 else {})}
        return tuple(returned[name] for name in ("obs", "reward", "terminated", "truncated", "info"))


def second_step(env: ScriptedEnv, **settings: Any) -> Any:
    world = SyncVectorEnv(lambda: env, 1, seed=0, stream=TRAIN, name="toy", **settings)
    world.reset()
    for _ in range(2):
        world.send(np.zeros(1, np.int64))
        step = world.receive()
    return step


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"terminated": "no"}, "terminated: expected True or False, got 'no' of type str"),
        ({"terminated": None}, "terminated: expected True or False, got None"),
        ({"terminated": 0.5}, "terminated: expected True or False, got 0.5"),
        ({"truncated": 2}, "truncated: expected True or False, got 2"),
        ({"truncated": np.array([False, True])}, "truncated: expected True or False"),
        ({"reward": "1.0"}, "reward: expected a number, got '1.0' of type str"),
        ({"reward": None}, "reward: expected a number, got None"),
        ({"reward": np.ones(2)}, "reward: expected a number, got array([1., 1.])"),
        ({"reward": 1j}, "reward: expected a number, got 1j"),
        ({"info": None}, "info: expected a dict, got None"),
        ({"obs": np.array([0.0, 1.5], np.float32)}, "observation[1]: expected a value from -1 to 1, got 1.5"),
        ({"obs": np.array([-3.0, 0.0], np.float32)}, "observation[0]: expected a value from -1 to 1, got -3"),
    ],
)
def test_a_returned_value_of_wrong_type_or_size_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError) as caught:
        second_step(ScriptedEnv(**values))
    assert f"toy, lane 0: {message}" in caught.value.what


@pytest.mark.parametrize("reward", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), np.array([2.0]), Fraction(2)])
def test_any_real_number_is_accepted_as_reward(reward: Any) -> None:
    assert second_step(ScriptedEnv(reward=reward)).reward.tolist() == [2.0]


@pytest.mark.parametrize("flag", [True, np.True_, 1, np.int8(1), np.array(True), np.array([True])])
def test_any_boolean_value_is_accepted_as_end_flag(flag: Any) -> None:
    assert second_step(ScriptedEnv(terminated=flag)).terminated.tolist() == [True]


def test_bounds_tolerate_rounding_and_can_be_switched_off() -> None:
    second_step(ScriptedEnv(obs=np.array([1.000001, -1.0000001])))
    outside = np.array([0.0, 7.0], np.float32)
    assert second_step(ScriptedEnv(obs=outside), check_bounds=False).obs.tolist() == [[0.0, 7.0]]
    with pytest.raises(EnvError) as caught:
        second_step(ScriptedEnv(obs=outside))
    assert "env.check_bounds=false" in caught.value.fix


def test_one_sided_bounds_are_checked_and_full_range_bytes_have_none() -> None:
    low = spaces.Box(np.array([0.0, -np.inf], np.float32), np.array([np.inf, np.inf], np.float32))
    second_step(ScriptedEnv(low, obs=np.array([5.0, -9.0], np.float32)))
    with pytest.raises(EnvError, match=r"observation\[0\]"):
        second_step(ScriptedEnv(low, obs=np.array([-5.0, 0.0], np.float32)))
    assert adapt_obs(spaces.Box(0, 255, (2, 2), np.uint8), "x").bounds is None
    assert adapt_obs(spaces.Box(0, 9, (2, 2), np.uint8), "x").bounds is not None


def test_a_part_of_a_composite_observation_is_named_by_its_key() -> None:
    space = spaces.Dict({"a": spaces.Box(0, 9, (2,)), "b": spaces.Box(0, 1, (3,)), "c": spaces.Discrete(2)})
    wrong = {"a": np.ones(2, np.float32), "b": np.array([0, 0, 4], np.float32), "c": 1}
    with pytest.raises(EnvError, match=r"observation\['b'\]\[2\]: expected a value from 0 to 1, got 4"):
        second_step(ScriptedEnv(space, obs=wrong))


@pytest.mark.parametrize("value", [2, -1])
def test_a_number_out_of_range_in_a_composite_observation_is_refused(value: int) -> None:
    encode = adapt_obs(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (2,))}), "x").encode
    with pytest.raises(OutsideSpace, match=r"observation\['a'\]"):
        encode({"a": value, "b": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    "values", [{"terminated": "no"}, {"reward": "1.0"}, {"obs": np.array([0.0, 1.5], np.float32)}], ids=str
)
def test_env_check_reports_invalid_values(values: dict[str, Any]) -> None:
    found = {check.name: check for check in check_env(Env(id="ScriptedEnv"), make=lambda: ScriptedEnv(**values))}
    assert not found["contract"].ok
    assert next(iter(values)) in found["contract"].detail.replace("observation", "obs")


class Mission(spaces.Space[str]):
    """A space that Gymnasium does not know, such as the text of MiniGrid's missions."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "get to the green goal square"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


def grid() -> spaces.Dict:
    return spaces.Dict(
        {"image": spaces.Box(0, 255, (2, 2, 3), np.uint8), "direction": spaces.Discrete(4), "mission": Mission()}
    )


def test_a_part_that_cannot_be_encoded_is_left_out_and_named() -> None:
    adapter = adapt_obs(grid(), "MiniGrid")
    image: Array = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    encoded = adapter.encode({"image": image, "direction": 2, "mission": "go"})
    assert encoded.tolist() == [0, 0, 1, 0, *range(12)]
    assert "observation['mission'] is of type Mission" in adapter.notes[0]
    assert "it is left out" in adapter.notes[0]
    found = {check.name: check for check in check_env(Env(id="Grid"), make=lambda: ScriptedEnv(grid()))}
    assert found["spaces"].ok
    assert "['mission']" in found["spaces"].detail


@pytest.mark.parametrize("space", [Mission(), spaces.Dict({"mission": Mission()}), spaces.Tuple((Mission(),))])
def test_a_space_without_numbers_is_refused_with_its_type(space: spaces.Space[Any]) -> None:
    with pytest.raises(UsageError, match="Mission") as caught:
        adapt_obs(space, "x")
    assert "ObservationWrapper" in caught.value.fix


@pytest.mark.parametrize("name", ["Acrobot-v1", "MountainCar-v0", "Pendulum-v1", "MinAtar/Breakout-v1"])
def test_known_environments_stay_within_their_own_bounds(name: str) -> None:
    world = make_world(Env(id=name, num=2), seed=0, stream=TRAIN)
    rng = np.random.default_rng(0)
    world.reset()
    for _ in range(300):
        world.send(rng.integers(0, world.spec.num_actions, 2))
        world.receive()
    world.close()
