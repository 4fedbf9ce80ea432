import subprocess
import sys

import pytest

from qfleet.errors import UsageError
from qfleet.plan import algorithm_presets, compose, defaults_for, describe, environment_presets, updates_per_step
from qfleet.plan.schema import DoubleRule, MaxRule, PrioritizedSampler, UniformSampler

IDS = {
    "CartPole-v1": "cartpole",
    "CartPole-v0": "cartpole",
    "Acrobot-v1": "acrobot",
    "MountainCar-v0": "mountaincar",
    "LunarLander-v3": "lunarlander",
    "MinAtar/Breakout-v1": "minatar",
    "ALE/Pong-v5": "atari",
    "PongNoFrameskip-v4": "atari",
    "MountainCarContinuous-v0": "general",
    "my_env.py:CartPole-v1x": "general",
    "FrozenLake-v1": "general",
}


@pytest.mark.parametrize(("env_id", "name"), IDS.items())
def test_environments_get_their_defaults(env_id: str, name: str) -> None:
    assert defaults_for(env_id)[0] == name


@pytest.mark.parametrize("preset", [None, *algorithm_presets(), *environment_presets()])
@pytest.mark.parametrize("env_id", IDS)
def test_every_preset_is_a_sound_plan_everywhere(env_id: str, preset: str | None) -> None:
    plan = compose(env_id, preset).plan
    assert 0.01 <= updates_per_step(plan) <= 4


def test_algorithms_are_what_they_say() -> None:
    plans = {name: compose("CartPole-v1", name).plan for name in algorithm_presets()}
    assert {name for name, plan in plans.items() if plan.algo.rule == MaxRule()} == {"dqn"}
    assert {name for name, plan in plans.items() if plan.net.dueling} == {"dueling"}
    assert {name for name, plan in plans.items() if plan.algo.n_step > 1} == {"nstep"}
    assert {name for name, plan in plans.items() if plan.replay.sampler == PrioritizedSampler()} == {"per"}
    assert plans["double"].algo.rule == DoubleRule()
    assert plans["double"].replay.sampler == UniformSampler()
    assert len({plan.algo.batch_size for plan in plans.values()}) == 1  # all over the same defaults


def test_an_environments_name_replaces_the_defaults() -> None:
    borrowed, own = compose("X-v0", "cartpole"), compose("CartPole-v1")
    assert borrowed.plan.algo == own.plan.algo
    assert borrowed.origins["algo.n_step"] == "preset cartpole"
    assert compose("CartPole-v1", "general").plan.algo != own.plan.algo


@pytest.mark.parametrize("name", [*algorithm_presets(), *environment_presets()])
def test_presets_say_what_they_are(name: str) -> None:
    said = describe(name)
    assert said.title.endswith(".")
    assert said.source.endswith(".")
    assert said.advice.endswith(".")


def test_unknown_preset() -> None:
    with pytest.raises(UsageError, match="unknown preset pre"):
        compose("CartPole-v1", "pre")


def test_plans_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from qfleet.plan import compose, schema, to_toml; to_toml(compose('CartPole-v1').plan); schema();"
        "print([name for name in ('torch', 'numpy', 'gymnasium') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
