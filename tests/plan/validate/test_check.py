from collections.abc import Mapping
from typing import Any

import pytest

from qfleet.errors import UsageError
from qfleet.plan import check, compose, make_plan, total_updates, updates_per_step
from qfleet.plan.schema import Algo, BufferReplay, Env, LinearEpsilon, Plan, Until
from qfleet.plan.validate.case import COMMAND_LINE
from qfleet.plan.validate.rules import RULES


def broken(settings: Mapping[str, Any], env_id: str = "X-v0") -> str:
    with pytest.raises(UsageError) as caught:
        make_plan(env_id, overrides=settings)
    return caught.value.why


PER = {"replay.sampler.type": "prioritized"}
ACTORS = {"runtime.type": "processes", "env.num": 8}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"algo.batch_size": 200, "replay.capacity": 199}, "A batch is drawn"),
        ({"env.num": 30, "algo.n_step": 9, "replay.capacity": 299}, "Every environment needs room"),
        ({"algo.learn_start_steps": 5000, "until.steps": 5000}, "Learning would start"),
        ({"replay.samples_per_insert": 1e-9}, "Updates per step"),
        ({"algo.explore.start": 0.01}, "Exploration is meant to fall"),
        ({"algo.explore.start": 0.5, "algo.explore.end": 0.5, "algo.explore.steps": 9}, "Epsilon starts where"),
        ({**PER, "replay.sampler.beta_end": 0.1}, "The correction"),
        ({**PER, "replay.sampler.alpha": 0}, "With alpha 0"),
        ({"algo.discount": 0, "algo.n_step": 2}, "With discount 0"),
        ({"until.score": 5, "until.steps": 4000, "eval.every_steps": 4001}, "The score is measured"),
        ({"until.score": 5, "eval.episodes": 0}, "The score is measured by evaluations, and there are none"),
        ({"algo.target.every_updates": 10_000_000}, "The target network would keep"),
        ({"env.sticky": 0.0}, "Sticky actions"),
        ({"env.frame_size": 64}, "Only Atari pictures"),
        ({"runtime.device": "tpu"}, "The devices are"),
        ({"env.options": {"not a name": 1}}, "Options are passed"),
        ({"actors.num": 2}, "A single thread runs one actor"),
        ({**ACTORS, "actors.num": 3}, "All actors have the same number"),
        ({**ACTORS, "actors.num": 2, "actors.envs": 5}, "env.num counts the environments of all"),
        ({**ACTORS, "actors.num": 4, "population.num": 8}, "All members of a population"),
        ({**ACTORS, "actors.num": 2, "env.workers": 5}, "Each worker steps at least one"),
        ({**ACTORS, "env.workers": 2, "env.step_timeout_seconds": 60}, "An actor waiting for its environments"),
        (
            {**ACTORS, "actors.num": 2, "runtime.inference": "central", "env.step_timeout_seconds": 60},
            "An actor waiting for its environments",
        ),
        ({**ACTORS, "runtime.inference_device": "gpu"}, "The devices are"),
    ],
)
def test_each_rule_catches_its_mistake(settings: dict[str, Any], reason: str) -> None:
    assert broken(settings).startswith(reason)


@pytest.mark.parametrize(
    "settings",
    [
        {"algo.batch_size": 200, "replay.capacity": 200, "env.num": 1},
        {"env.num": 30, "algo.n_step": 9, "replay.capacity": 300},
        {"algo.learn_start_steps": 4999, "until.steps": 5000, "replay.samples_per_insert": 64},
        {"algo.explore.start": 0.05, "algo.explore.end": 0.05},
        {"until.score": 5, "until.steps": 4000, "eval.every_steps": 4000},
        {"until.score": 5, "eval.episodes": 1},
        {"eval.episodes": 0},
        {"runtime.device": "cuda:12"},
        {"algo.discount": 0, "algo.n_step": 1},
        {**ACTORS, "actors.num": 8},
        {**ACTORS, "actors.num": 2, "actors.envs": 4},
        {**ACTORS, "actors.num": 4, "population.num": 2},
        {**ACTORS, "actors.num": 2, "env.workers": 4},
    ],
)
def test_the_edge_of_a_rule_is_allowed(settings: dict[str, Any]) -> None:
    make_plan("X-v0", overrides=settings)


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_atari_settings_belong_to_atari(env_id: str) -> None:
    plan = make_plan(env_id, overrides={"env.sticky": 0.1, "env.frame_size": 42})
    assert (plan.env.sticky, plan.env.frame_size) == (0.1, 42)


@pytest.mark.parametrize("env_id", ["", "two words", "bell\x07", "x" * 501])
def test_an_environment_id_has_no_spaces(env_id: str) -> None:
    with pytest.raises(UsageError):
        check(Plan(env=Env(id=env_id)))


def test_a_short_run_may_keep_default_periods() -> None:
    made = compose("CartPole-v1", overrides=[("until.steps", "900", COMMAND_LINE)])
    assert made.plan.eval.every_steps > made.plan.until.steps


def test_notes_name_valid_but_surprising_settings() -> None:
    settings = {"save.replay": "none", "until.steps": "5000", "algo.explore.steps": "10000"}
    made = compose("X-v0", overrides=[(path, text, COMMAND_LINE) for path, text in settings.items()])
    assert [note.partition(":")[0] for note in made.notes] == [
        "save.replay=none",
        "epsilon will still be 0.53 at the end",
    ]
    assert compose("CartPole-v1").notes == []


def test_a_target_that_is_never_copied_is_noted() -> None:
    def notes(steps: int) -> list[str]:
        settings = {"algo.learn_start_steps": 100, "algo.explore.steps": 10, "until.steps": steps}
        asked = [(path, str(value), COMMAND_LINE) for path, value in settings.items()]
        return compose("X-v0", overrides=asked).notes

    # 16 samples per insert, 64 in a batch: an update every 4 steps, a copy every 250 updates.
    assert notes(100 + 4 * 249) == [
        "the target network keeps its first weights: algo.target.every_updates=250, the run makes 249 updates"
    ]
    assert notes(100 + 4 * 250) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"population.num": 4, "population.spread": 99.9},
        {"population.num": 1, "optim.learning_rate": 5.0},
        {"replay.type": "fresh", "replay.rows": 4, "replay.minibatches": 32, "env.num": 8},
        {"net.spectral_norm": True, "net.torso.type": "mlp", "net.torso.sizes": (8, 8)},
        {"net.torso.type": "mlp", "net.torso.sizes": (8,)},
    ],
)
def test_unusual_but_valid_plans_are_allowed(settings: dict[str, Any]) -> None:
    make_plan("X-v0", overrides=settings)


def test_updates_are_rounded_down_over_the_whole_run() -> None:
    plan = Plan(
        env=Env(id="X"),
        algo=Algo(batch_size=64, learn_start_steps=1_000, explore=LinearEpsilon()),
        replay=BufferReplay(samples_per_insert=24.0),
        until=Until(steps=1_013),
    )
    assert updates_per_step(plan) == 0.375
    assert total_updates(plan) == 4  # 13 * 0.375 = 4.875


def test_every_rule_has_a_reason() -> None:
    assert all(reason.endswith(".") for _, reason in RULES)
