"""Environments as objects: `train(id, env=gymnasium.make(...))` makes more like it, or says what to write."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from qfleet import Plan, load, resume, train
from qfleet.build.custom_parts import as_env_maker
from qfleet.errors import UsageError
from qfleet.testing.toys import Random
from tests.support.runs import LOCAL, SMALL, Settings

SHORT: Settings = {**SMALL, "until.steps": 100}
PROCESSES: Settings = {"runtime.type": "processes", "actors.num": 2, **LOCAL}


class Bonus(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Adds to every reward; it records how it was called."""

    def __init__(self, env: gym.Env[Any, Any], more: float = 1.0) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, more=more)
        gym.Wrapper.__init__(self, env)
        self.more = more

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward) + self.more, terminated, truncated, info


class Forgetful(gym.Wrapper[Any, Any, Any, Any]):
    """Does not record how it was called."""


def made_again(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    make = as_env_maker("env", env)
    assert make is not None
    return make()


def test_an_id_with_a_preset_and_overrides(tmp_path: Path) -> None:
    run = train("CartPole-v1", preset="dqn", overrides=SHORT, out=tmp_path)
    assert run.plan.algo.rule == Plan.of("CartPole-v1", "dqn").algo.rule
    assert run.path.name.startswith("cartpole-dqn")


def test_a_preset_beside_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="preset= and overrides= do not go with a plan"):
        train(Plan.of("CartPole-v1"), preset="dqn", out=tmp_path)


@pytest.mark.parametrize("more", [{}, {"env.workers": 2}, PROCESSES], ids=["inline", "workers", "processes"])
def test_an_object_of_gymnasium_make_with_wrappers(more: Settings, tmp_path: Path) -> None:
    env = Bonus(gym.make("CartPole-v1", max_episode_steps=5), more=10.0)
    run = train("CartPole-v1", overrides={**SHORT, "eval.test_episodes": 2, **more}, env=env, out=tmp_path)
    assert run.result() is not None
    assert run.result()["mean"] == 55.0  # type: ignore[index]  # five steps of 1 + 10
    assert "CartPole-v1" in str(run.plan.custom.env)
    assert "Bonus(more)" in str(run.plan.custom.env)


def test_what_was_given_as_an_object_can_be_resumed_and_loaded(tmp_path: Path) -> None:
    run = train("CartPole-v1", overrides=SHORT, env=Bonus(gym.make("CartPole-v1")), out=tmp_path)
    ended = resume(run.path, steps=130, env=Bonus(gym.make("CartPole-v1")))
    assert ended.status["exact"] is True
    assert load(run.path, env=Bonus(gym.make("CartPole-v1"))).evaluate(1)["episodes"] == 1


def test_every_wrapper_and_argument_is_made_again() -> None:
    env = Bonus(gym.wrappers.TransformReward(gym.make("CartPole-v1", render_mode="rgb_array"), lambda r: 2 * r), 3.0)
    again = made_again(env)
    assert str(again) == str(env)
    assert again.render_mode == "rgb_array"
    again.reset(seed=1)
    assert again.step(0)[1] == 5.0


def test_no_window_is_opened_for_each_environment() -> None:
    env = gym.make("CartPole-v1", render_mode="human")
    try:
        assert made_again(env).render_mode is None
    finally:
        env.close()


def test_an_environment_registered_from_main(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys.modules["__main__"], "OfMain", Random, raising=False)
    gym.register("OfMain-v0", entry_point="__main__:OfMain")
    try:
        make: Any = as_env_maker("env", gym.make("OfMain-v0"))
        assert make.spec.entry_point is Random  # another process has another __main__
    finally:
        del gym.registry["OfMain-v0"]


def test_a_wrapper_that_cannot_be_made_again_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="inside the wrapper Forgetful") as caught:
        train("CartPole-v1", env=Forgetful(gym.make("CartPole-v1")), out=tmp_path)
    assert caught.value.fix == "Give a function instead: env=lambda: Forgetful(gymnasium.make('CartPole-v1'), ...)"


def test_an_object_without_a_recipe_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="env= was given a Random object") as caught:
        train("Mine", env=Random(), out=tmp_path)
    assert caught.value.fix == "Write env=lambda: Random(...) or env=Random."
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "env_id"), [(gym.make("Acrobot-v1"), "Acrobot-v1"), (3, "CartPole-v1")])
def test_an_environment_in_place_of_a_plan_says_what_to_write(given: Any, env_id: str) -> None:
    with pytest.raises(UsageError, match="train was given a") as caught:
        train(given)
    assert caught.value.fix == f'Write train("{env_id}") or train("{env_id}", env=your_env).'
