"""Names of runs follow from the plan itself, not from how it was made."""

from typing import Any

import pytest

from qfleet import Plan
from qfleet.plan.naming import algorithm_description, algorithm_name
from qfleet.plan.presets.catalog import algorithm_presets

PLAIN = {"algo.rule.type": "max", "algo.n_step": 1}


def plan_of(preset: str | None = None, **changes: Any) -> Plan:
    return Plan.of("CartPole-v1", preset, changes)


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({}, "double-n5", "Double DQN, 5-step returns"),
        (PLAIN, "dqn", "DQN"),
        ({"algo.n_step": 1}, "double", "Double DQN"),
        ({**PLAIN, "net.head.type": "quantile"}, "qrdqn", "QR-DQN"),
        ({"net.dueling": True, "replay.sampler.type": "prioritized"}, "double-dueling-per-n5", "Double DQN, dueling, "),
    ],
)
def test_the_name_lists_the_parts_of_the_algorithm(changes: dict[str, Any], name: str, text: str) -> None:
    assert algorithm_name(plan_of(**changes)) == name
    assert algorithm_description(plan_of(**changes)).startswith(text)


@pytest.mark.parametrize("preset", list(algorithm_presets()))
def test_a_named_preset_is_the_name_while_its_algorithm_fits(preset: str) -> None:
    assert algorithm_name(plan_of(preset), preset) == preset
    assert algorithm_name(plan_of(preset, seed=7), preset) == preset


def test_a_changed_algorithm_loses_the_name_of_its_preset() -> None:
    assert algorithm_name(plan_of("dqn", **{"algo.rule.type": "double"}), "dqn") == "double"
    assert algorithm_name(plan_of("per", **{"algo.n_step": 3}), "per") == "double-per-n3"
    assert algorithm_name(plan_of("rainbow", **{"optim.learning_rate": 1e-3}), "rainbow") == "rainbow"


@pytest.mark.parametrize(
    "preset", ["rainbow", "rainbow-small", "apex", "gorila", "r2d2-small", "pqn", "btr", "decqn-small"]
)
def test_the_preset_of_a_plan_from_python_is_recognised(preset: str) -> None:
    assert algorithm_name(plan_of(preset, **{"until.steps": 1_234_567})) == preset


@pytest.mark.parametrize("preset", list(algorithm_presets()))
def test_no_plan_has_the_name_of_another_algorithm(preset: str) -> None:
    plan = plan_of(preset)
    name = algorithm_name(plan)
    if name in algorithm_presets():
        assert algorithm_description(plan_of(name)) == algorithm_description(plan)
    else:
        assert name in ("double-dueling", "double-n3")
