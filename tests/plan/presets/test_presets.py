import subprocess
import sys

import pytest

from qfleet.errors import UsageError
from qfleet.plan import compose, defaults_for, updates_per_step
from qfleet.plan.paths import tag_of
from qfleet.plan.presets.catalog import algorithm_presets, describe, environment_presets
from qfleet.plan.schema import (
    BufferReplay,
    ConstantEpsilon,
    DatasetReplay,
    FreshReplay,
    Plan,
    PrioritizedSampler,
    StepsView,
)

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


EVERYWHERE = [name for name in environment_presets() if name != "pong"]


@pytest.mark.parametrize("preset", [None, *algorithm_presets(), *EVERYWHERE])
@pytest.mark.parametrize("env_id", IDS)
def test_every_preset_is_a_sound_plan_everywhere(env_id: str, preset: str | None) -> None:
    plan = compose(env_id, preset).plan
    assert updates_per_step(plan) <= 4
    if isinstance(plan.replay, FreshReplay):
        assert 1 <= plan.replay.epochs <= 4
    elif isinstance(plan.replay, BufferReplay):
        assert 0.5 <= plan.replay.samples_per_insert <= 256  # how often a step is learned from
    if isinstance(plan.algo.view, StepsView):
        assert updates_per_step(plan) >= 0.01


@pytest.mark.parametrize("env_id", [env_id for env_id, name in IDS.items() if name != "atari"])
def test_a_recipe_for_pictures_of_atari_is_refused_elsewhere(env_id: str) -> None:
    with pytest.raises(UsageError, match="preset pong") as raised:
        compose(env_id, "pong")
    assert "Atari" in raised.value.why


def test_pong_is_a_recipe_and_atari_the_protocol() -> None:
    quick, usual = compose("ALE/Pong-v5", "pong").plan, compose("ALE/Pong-v5").plan
    assert (quick.env.frame_size, quick.env.sticky, usual.env.frame_size, usual.env.sticky) == (42, 0.0, None, None)
    assert quick.eval.test_episodes == 20
    assert usual == compose("ALE/Pong-v5", "atari").plan


TRAITS = {
    "dqn": "max",
    "double": "double",
    "dueling": "double dueling",
    "per": "double prioritized",
    "nstep": "double several-steps",
    "c51": "max categorical",
    "qrdqn": "max quantile",
    "iqn": "max implicit",
    "noisy": "double noisy no-epsilon",
    "munchausen": "munchausen",
    "rainbow": "double dueling prioritized several-steps categorical noisy no-epsilon",
    "apex": "double dueling prioritized actor-priorities several-steps ladder",
    "r2d2": "double dueling prioritized actor-priorities several-steps ladder sequences lstm rescale",
    "pqn": "max fresh layer_norm",
    "gorila": "max",
    "btr": "munchausen implicit dueling noisy spectral_norm prioritized several-steps",
    "decqn": "double decoupled prioritized several-steps",
    "cql": "double dataset cql",
    "bc": "dataset bc",
}
# What a small variant may change: how it is sped up, not what it is.
PACE = {"several-steps", "prioritized", "ladder", "rescale", "no-epsilon"}


def traits(plan: Plan) -> set[str]:
    """The parts of a plan's algorithm, by name."""
    algo, net, fresh = plan.algo, plan.net, isinstance(plan.replay, FreshReplay)
    sampler = plan.replay.sampler if isinstance(plan.replay, BufferReplay) else None
    parts = {tag_of(type(algo.rule)), tag_of(type(net.head)), tag_of(type(net.memory)), tag_of(type(algo.view))}
    parts |= {tag_of(type(algo.offline)), "dataset" if isinstance(plan.replay, DatasetReplay) else "off"}
    parts |= {part for part in ("dueling", "noisy", "layer_norm", "spectral_norm", "decoupled") if getattr(net, part)}
    conditions = {
        "rescale": algo.rescale,
        "several-steps": algo.n_step > 1 and not fresh,
        "fresh": fresh,
        "prioritized": isinstance(sampler, PrioritizedSampler),
        "actor-priorities": isinstance(sampler, PrioritizedSampler) and sampler.initial == "actor",
        "no-epsilon": algo.explore == ConstantEpsilon(epsilon=0.0),
        "ladder": tag_of(type(algo.explore)) == "ladder",
    }
    parts |= {part for part, here in conditions.items() if here}
    without_effect = {tag_of(type(algo.rule)), "several-steps"} if "bc" in parts else set()
    return {part for part in parts if part} - {"scalar", "off", "steps"} - without_effect


def test_algorithm_presets_have_their_parts() -> None:
    for env_id in ("CartPole-v1", "ALE/Pong-v5", "X-v0"):
        plans = {name: compose(env_id, name).plan for name in algorithm_presets()}
        found = {name: traits(plan) for name, plan in plans.items()}
        assert {name: found[name] for name in TRAITS} == {name: set(parts.split()) for name, parts in TRAITS.items()}
        small = {name for name in found if name.endswith("-small")}
        assert found.keys() == TRAITS.keys() | small
        for name in small:
            assert found[name] - PACE == found[name.removesuffix("-small")] - PACE, name


def test_plain_variants_differ_only_in_what_their_name_says() -> None:
    plans = {name: compose("CartPole-v1", name).plan for name in ("dqn", "double", "dueling", "per", "nstep", "noisy")}
    assert len({plan.algo.batch_size for plan in plans.values()}) == 1  # all over the same defaults
    assert len({plan.optim for plan in plans.values()}) == 1
    assert plans["double"].replay == plans["dqn"].replay
    assert plans["double"].net == plans["dqn"].net


@pytest.mark.parametrize("name", ["per", "rainbow", "btr"])
def test_on_atari_beta_reaches_its_end_with_the_default_run(name: str) -> None:
    plan = compose("ALE/Pong-v5", name).plan
    assert isinstance(plan.replay, BufferReplay)
    assert isinstance(plan.replay.sampler, PrioritizedSampler)
    assert plan.until.steps is not None
    updates = (plan.until.steps - plan.algo.learn_start_steps) * updates_per_step(plan)
    assert plan.replay.sampler.beta_end == 1.0
    assert plan.replay.sampler.beta_updates == updates


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "CartPole-v1"])
@pytest.mark.parametrize("name", algorithm_presets())
def test_distributional_presets_set_no_loss(env_id: str, name: str) -> None:
    settings = algorithm_presets()[name](env_id)
    if settings.get("net.head.type", "scalar") != "scalar":
        assert "algo.loss" not in settings


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "CartPole-v1"])
def test_apex_and_r2d2_have_the_documented_update_ratio(env_id: str) -> None:
    apex, r2d2 = (compose(env_id, name).plan for name in ("apex", "r2d2"))
    assert isinstance(apex.replay, BufferReplay)
    assert f"each step is drawn {apex.replay.samples_per_insert} times" in describe("apex").source
    assert f"an update per {float(1 / updates_per_step(r2d2)):,.0f}" in describe("r2d2").advice


def test_an_environments_name_replaces_the_defaults() -> None:
    borrowed, own = compose("X-v0", "cartpole"), compose("CartPole-v1")
    assert borrowed.plan.algo == own.plan.algo
    assert borrowed.origins["algo.n_step"] == "preset cartpole"
    assert compose("CartPole-v1", "general").plan.algo != own.plan.algo


@pytest.mark.parametrize("name", [*algorithm_presets(), *environment_presets()])
def test_every_preset_is_described(name: str) -> None:
    conditions = describe(name)
    assert conditions.title.endswith(".")
    assert conditions.source.endswith(".")
    assert conditions.advice.endswith(".")


def test_unknown_preset() -> None:
    with pytest.raises(UsageError, match="unknown preset pre"):
        compose("CartPole-v1", "pre")


def test_plans_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from qfleet.plan import compose, json_schema, to_toml;"
        "to_toml(compose('CartPole-v1').plan); json_schema();"
        "print([name for name in ('torch', 'numpy', 'gymnasium') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
