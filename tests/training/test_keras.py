"""A Keras model as torso: what it learns is acted by, saved, and found again under other names."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qfleet import Plan, load, resume, train
from qfleet.build.custom_parts import CustomParts
from qfleet.build.make import make_components
from qfleet.build.worlds import make_train_world
from qfleet.nets import match_names, state_arrays
from qfleet.training.inline import InlineLoop

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
OBS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
SHORT = {"until.steps": 60, "algo.learn_start_steps": 32, "algo.batch_size": 8, "replay.capacity": 100}
QUIET = {"eval.episodes": 1, "eval.test_episodes": 1, "until.score": None}


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = importlib.import_module("keras")
    if keras.config.backend() != "torch":
        pytest.skip("keras was imported before with another backend")
    return keras


def torso_of(keras: Any) -> Any:
    keras.utils.set_random_seed(0)
    torch.manual_seed(0)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.1), keras.layers.Dense(8)]
    return keras.Sequential([keras.Input((4,)), *layers])


def plan_of(**more: Any) -> Plan:
    return Plan.of("CartPole-v1", overrides={**SHORT, **QUIET, **more})


@pytest.mark.parametrize("target", [{"type": "copy", "every_updates": 2}, {"type": "average", "tau": 0.5}])
def test_the_policy_acts_with_learned_weights(keras: Any, target: dict[str, Any]) -> None:
    plan = plan_of(**{f"algo.target.{name}": value for name, value in target.items()})
    components = make_components(plan, make_train_world(plan), CustomParts(torso=torso_of(keras)))
    components.actor.start()
    before = components.policy.forward(OBS)[0]
    runtime = InlineLoop(components)
    while components.learner.updates < 4:
        list(runtime.turn())
    acted, _ = components.policy.forward(OBS)
    with torch.no_grad():
        learned = components.learner.net.eval()(torch.from_numpy(OBS)).numpy()
    components.close()
    assert np.array_equal(acted, learned)
    assert not np.allclose(acted, before)


@pytest.mark.parametrize("made_before", range(4))  # so that numbers of 9 and 10 layers meet, which sort the other way
def test_a_run_is_resumed_exactly_and_loaded_under_other_names(keras: Any, tmp_path: Path, made_before: int) -> None:
    keras.utils.clear_session()
    for _ in range(made_before):
        keras.layers.Dense(1)
    whole = train(plan_of(), torso=torso_of(keras), out=tmp_path, name="whole")
    train(plan_of(**{"until.steps": 44}), torso=torso_of(keras), out=tmp_path, name="parts")
    parts = resume("parts", steps=60, torso=torso_of(keras), out=tmp_path)
    found = load("whole", which="latest", torso=torso_of(keras), out=tmp_path)
    assert list(state_arrays(parts.policy.net)) != list(
        state_arrays(found.policy.net)
    )  # Keras numbers what a process makes
    own = state_arrays(parts.policy.net)
    for name, value in match_names(own.keys(), state_arrays(found.policy.net)).items():
        assert np.array_equal(own[name], value)
    assert np.array_equal(parts.policy.forward(OBS)[0], found.policy.forward(OBS)[0])
    best = load("whole", torso=torso_of(keras), out=tmp_path)
    assert np.array_equal(whole.policy.forward(OBS)[0], best.policy.forward(OBS)[0])
