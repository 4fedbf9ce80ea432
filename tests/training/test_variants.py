"""A policy in other worlds: variants of its own environment, other environments, and those that do not fit."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from qfleet import Run, load
from qfleet.data import Spec
from qfleet.errors import UsageError
from qfleet.plan.draft import Assignment
from qfleet.testing import toys
from qfleet.training.evaluation.variants import (
    TRAINING,
    Variant,
    on_top_of,
    other_world,
    read_variants,
    refuse_named_code,
    require_same_spaces,
)
from tests.support.runs import small, trained

LIMIT = "gymnasium.wrappers:TimeLimit(max_episode_steps=5)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(small({"until.steps": 120}), tmp_path_factory.mktemp("runs"))


def typed(*settings: str) -> tuple[Assignment, ...]:
    pairs = (setting.split("=", 1) for setting in settings)
    return tuple(Assignment(path, value, "command line", text=True, explicit=True) for path, value in pairs)


def test_options_make_another_variant_of_the_same_environment(run: Run) -> None:
    row = run.evaluate(4, options={"max_episode_steps": 3})
    assert row["returns"] == [3.0] * 4
    assert (row["env"], row["options"]) == ("CartPole-v1", {"max_episode_steps": 3})
    assert run.evaluate(4)["mean"] > 3
    assert run.plan.env.options == {}


def test_another_environment_with_the_same_spaces(run: Run) -> None:
    row = run.evaluate(2, env="CartPole-v0", seed=5)
    assert (row["env"], row["options"], row["seed"]) == ("CartPole-v0", {}, 5)
    own = run.evaluate(2, env=lambda: gym.make("CartPole-v1", max_episode_steps=2))
    assert own["returns"] == [2.0, 2.0]


def test_wrappers_make_a_variant(run: Run) -> None:
    row = run.evaluate(3, wrappers=[LIMIT])
    assert row["returns"] == [5.0] * 3
    assert row["wrappers"] == [LIMIT]


def test_an_evaluation_at_home_is_as_before(run: Run) -> None:
    row = run.evaluate(5, seed=3)
    assert row == run.evaluate(5, seed=3)
    assert not {"env", "options", "name"} & set(row)
    assert {**row, "seed": 0} != run.evaluate(5)


def test_other_spaces_are_refused_by_name(run: Run) -> None:
    with pytest.raises(UsageError, match="Acrobot-v1 has other spaces") as caught:
        run.evaluate(2, env="Acrobot-v1")
    assert "observations of shape: (6,), and the policy's are (4,)" in caught.value.why
    assert "actions: 3, and the policy's are 2" in caught.value.why


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Spec((4,), "uint8", (2,)), "observations of type: uint8"),
        (Spec((3,), "float32", (2,)), "observations of shape: (3,)"),
        (Spec((4,), "float32", (2, 1)), "actions: 2 x 1"),
        (Spec((4,), "float32", (2,), stack=4), "observations of shape: (4, 4)"),
    ],
)
def test_only_the_difference_is_named(other: Spec, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        require_same_spaces(other, Spec((4,), "float32", (2,)), "Other-v0")
    assert caught.value.why.startswith(named)
    assert ";" not in caught.value.why


def test_masks_do_not_make_spaces_different() -> None:
    require_same_spaces(Spec((4,), "float32", (2,), masked=True), Spec((4,), "float32", (2,)), "Other-v0")


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("algo.n_step=3", "cannot be changed for an evaluation"),
        ("env.id=Acrobot-v1", "cannot be changed for an evaluation"),
        ("env.num=3", "has no effect on an evaluation"),
        ("env.clip_reward=true", "has no effect on an evaluation"),
        ("env.optoins.x=1", "is not a setting"),
        ("env.bins=no", "is not valid"),
        ("env.sticky=0.1", "has no effect on CartPole-v1"),
    ],
)
def test_settings_that_make_no_variant_are_refused(setting: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        other_world(small(), None, Variant("", None, typed(setting)))


def test_another_environment_begins_with_its_own_options_and_keeps_the_wrappers() -> None:
    plan = small({"env.options.max_episode_steps": 9, "env.wrappers": LIMIT})
    same = other_world(plan, None, Variant("", None, typed("env.options.sutton_barto_reward=true"))).plan.env
    assert same.options == {"max_episode_steps": 9, "sutton_barto_reward": True}
    other = other_world(plan, None, Variant("", "LunarLander-v3", typed("env.options.gravity=-5"))).plan.env
    assert (other.id, other.options, other.wrappers) == ("LunarLander-v3", {"gravity": -5}, (LIMIT,))
    assert not other.check_bounds  # as this environment has it by default
    assert other_world(plan, None, Variant("", None, typed("env.wrappers=[]"))).plan.env.wrappers == ()


def test_settings_of_atari_stay_with_atari() -> None:
    plan = small({"env.sticky": 0.0, "net.torso.type": None, "net.torso.sizes": None}, "ALE/Pong-v5")
    assert other_world(plan, None, Variant("", "ALE/Breakout-v5")).plan.env.sticky == 0.0
    assert other_world(plan, None, Variant("", None, typed("env.sticky=0.5"))).plan.env.sticky == 0.5
    assert other_world(plan, None, Variant("", "Acrobot-v1")).plan.env.sticky is None


def test_a_table_has_a_row_for_each_variant_and_for_the_training_environment(run: Run) -> None:
    variants: dict[str, dict[str, Any]] = {
        "short": {"options": {"max_episode_steps": 3}},
        "wrong": {"env": "Acrobot-v1"},
        "own": {"env": lambda: gym.make("CartPole-v1", max_episode_steps=2)},
        "wrapped": {"env": "CartPole-v0", "wrappers": [LIMIT]},
    }
    rows = run.evaluate_variants(variants, episodes=4)
    assert [row["name"] for row in rows] == [TRAINING, *variants]
    assert [row.get("mean") for row in rows[1:]] == [3.0, None, 2.0, 5.0]
    assert rows[1]["difference"] == pytest.approx(3.0 - rows[0]["mean"])
    assert rows[1]["difference_low"] <= rows[1]["difference"] <= rows[1]["difference_high"]
    assert "difference" not in rows[0]
    assert "Acrobot-v1 has other spaces" in rows[2]["error"]
    assert rows[2]["exit_code"] == 2
    assert rows[0]["returns"] == run.evaluate(4)["returns"]


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"a": 3},
        {"training": {}},
        {"": {}},
        {"a\nb": {}},
        {"x" * 101: {}},
        {"a": {"options": 3}},
        {str(n): {} for n in range(201)},
    ],
)
def test_tables_that_hold_no_variants_are_refused(tables: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="variant"):
        read_variants(tables, "variants.toml")


@pytest.mark.parametrize("table", [{"env": "evil:Id-v0"}, {"env": "evil.py:Evil"}, {"wrappers": ["evil:W"]}])
def test_code_that_a_file_names_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the variant a names code to run") as caught:
        refuse_named_code(read_variants({"good": {"env": "CartPole-v0"}, "a": table}, "v.toml"), "v.toml")
    assert "--trust-variants" in caught.value.fix


def test_variants_differ_from_what_the_command_line_says() -> None:
    base = Variant("", "CartPole-v0", typed("env.options.a=1", "env.options.b=2"))
    kept = on_top_of(base, Variant("x", None, typed("env.options.b=3")))
    assert (kept.name, kept.env) == ("x", "CartPole-v0")
    assert [str(entry) for entry in kept.settings] == ["env.options.a=1", "env.options.b=3"]
    other = Variant("y", "Acrobot-v1")
    assert on_top_of(base, other) == other


def test_secrets_typed_as_options_are_not_shown(run: Run) -> None:
    world = other_world(run.plan, None, Variant("", None, typed("env.options.api_key=abc")))
    assert world.row()["options"] == {"api_key": "(hidden)"}


def test_a_run_in_an_environment_of_ones_own_goes_elsewhere_too(tmp_path: Path) -> None:
    plan = small({"until.steps": 120}, "Constant")
    run = trained(plan, tmp_path, env=toys.Constant)
    assert run.evaluate(2)["mean"] == 10.0
    assert run.evaluate(2, env=lambda: toys.Constant(limit=4))["mean"] == 4.0
    with pytest.raises(UsageError, match=r"env\.options=.* has no effect"):
        run.evaluate(2, options={"limit": 4})
    loaded = load(run.path, env=toys.Constant, which="latest")
    assert loaded.evaluate(2, env=lambda: toys.Constant(limit=4))["step"] >= 120
