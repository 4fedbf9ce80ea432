"""A trained policy in a program of one's own: it acts as in the run's evaluation, and needs no environment."""

import copy
import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from qfleet import Plan, Policy, Run, load, resume, train
from qfleet.act import evaluate_policy
from qfleet.data import Array, World
from qfleet.envs import TEST, make_world
from qfleet.errors import NoCheckpointError, UsageError
from qfleet.nets import state_arrays
from qfleet.qlearn import Scalar
from qfleet.qlearn.losses import LossInputs
from qfleet.testing.toys import Random
from tests.support.run_fixtures import Reference
from tests.support.runs import JUDGED, LSTM, settings, small, trained

ROOT = Path(__file__).parents[2]
# Every kind of space, masks, memory, normalisation, decoupled actions, a population, other heads.
WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "CartPole": ("CartPole-v1", {}),
    "FrozenLake": ("FrozenLake-v1", {}),
    "Blackjack": ("Blackjack-v1", {}),
    "Dict": ("toys/DictObs-v0", {}),
    "Pendulum, in bins": ("Pendulum-v1", {"env.bins": 3}),
    "MountainCarContinuous, normalised": ("MountainCarContinuous-v0", {"env.normalize": "both"}),
    "two dimensions": ("toys/BoxAction-v0", {"env.bins": 3}),
    "decoupled": ("toys/BoxAction-v0", {"env.bins": 4, "net.decoupled": True}),
    "masked": ("toys/Masked-v0", {}),
    "recurrent": ("toys/Random-v0", LSTM),
    "recurrent, masked": ("toys/Masked-v0", LSTM),
    "population": ("toys/Random-v0", {"population.num": 2, "population.every_steps": 100}),
    "noisy": ("toys/Random-v0", {"net.noisy": True}),
    "implicit quantiles": ("toys/Random-v0", {"net.head.type": "implicit"}),
}
EVALUATED = {**JUDGED, "eval.max_steps": 60}


class Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Records (obs, info, first of an episode, reward before) and the action of every step."""

    def __init__(self, env: gym.Env[Any, Any], log: list[tuple[Any, Any]]) -> None:
        super().__init__(env)
        self.log = log
        self.now: tuple[Any, ...] = ()

    def reset(self, **given: Any) -> Any:
        obs, info = self.env.reset(**given)
        self.now = copy.deepcopy((obs, info, True, 0.0))
        return obs, info

    def step(self, action: Any) -> Any:
        self.log.append((self.now, copy.deepcopy(action)))
        result = self.env.step(action)
        self.now = copy.deepcopy((result[0], result[4], False, result[1]))
        return result


def played(run: Run) -> list[tuple[Any, Any]]:
    """What the run's own greedy evaluation saw and did in two episodes."""
    log: list[tuple[Any, Any]] = []
    world = make_world(run.plan.env, seed=3, stream=TEST, num=1, make=lambda: Recorder(gym.make(run.plan.env.id), log))
    with closing(world):
        evaluate_policy(run.policy, world, 2, max_steps=60)
    return log


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and np.array_equal(one, other)


@pytest.mark.parametrize("name", WORLDS)
def test_predict_does_what_the_evaluation_did(name: str, reference: Reference) -> None:
    env_id, changes = WORLDS[name]
    run = reference({**EVALUATED, **changes}, env_id)
    log = played(run)
    assert len(log) > 5 or name in ("FrozenLake", "Blackjack")  # whose episodes may be short
    for policy in (run.policy, load(run.path).policy, Policy.load(run.path)):
        state = None
        for (obs, info, first, reward), action in log:
            mask = info.get("action_mask")
            chosen, state = policy.predict(obs, None if first else state, mask, reward=reward)
            assert same(chosen, action), f"{policy}: {chosen} instead of {action}"


@pytest.mark.parametrize("name", ["recurrent", "recurrent, masked"])
def test_the_memory_decides_actions(name: str, reference: Reference) -> None:
    """Otherwise the test above would pass for a policy that forgets."""
    env_id, changes = WORLDS[name]
    run = reference({**EVALUATED, **changes}, env_id)
    log = played(run)
    state = None
    differ = 0.0
    for (obs, info, first, reward), _ in log:
        carried = run.policy.values(obs, None if first else state, reward=reward)
        differ = max(differ, float(np.abs(carried - run.policy.values(obs)).max()))
        _, state = run.policy.predict(obs, None if first else state, info.get("action_mask"), reward=reward)
    assert differ > 1e-4


def test_lanes_of_a_native_world_are_a_batch(reference: Reference) -> None:
    run = reference(EVALUATED)
    policy = Policy.load(run.path)
    with closing(make_world(run.plan.env, seed=1, stream=TEST, num=5)) as world:
        step = world.reset()
        for _ in range(20):
            expected, _, values = run.policy.act(step.obs)
            assert policy.predict(step.obs)[0].tolist() == expected.tolist()
            assert policy.values(step.obs).tolist() == values.tolist()
            world.send(expected)
            step = world.receive()


def worlds_spaces(world: World) -> tuple[Any, Any, bool]:
    kept = world.spaces
    assert kept is not None
    return kept.observation, kept.action, kept.masked


def test_every_world_knows_its_own_spaces() -> None:
    for env_id in ("CartPole-v1", "Blackjack-v1", "toys/Masked-v0", "toys/DictObs-v0"):
        env = gym.make(env_id)
        expected = (env.observation_space, env.action_space, "Masked" in env_id)
        plan = small(env_id=env_id)
        with closing(make_world(plan.env, seed=1, stream=TEST, num=2)) as world:
            assert worlds_spaces(world) == expected
        if env_id != "CartPole-v1":
            workers = small({"env.workers": 1}, env_id)
            with closing(make_world(workers.env, seed=1, stream=TEST, num=2)) as world:
                assert worlds_spaces(world) == expected


@pytest.mark.atari
def test_the_spaces_of_atari_are_stacks_of_frames() -> None:
    pytest.importorskip("ale_py")
    plan = Plan.of("ALE/Pong-v5")
    with closing(make_world(plan.env, seed=1, stream=TEST, num=2)) as world:
        kept = world.spaces
        assert kept is not None
        assert kept.observation == spaces.Box(0, 255, (4, 84, 84), np.uint8)
        assert kept.action == spaces.Discrete(6)
        assert kept.stack == world.spec.stack == 4
        assert kept.observation.contains(world.reset().obs[0])


# Without the environment


class Walk(Random):
    """An environment of the user's own, with other spaces than its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"place": self.observation_space, "step": spaces.Discrete(60)})
        self.action_space = spaces.Discrete(3, start=5)

    def _show(self) -> Any:
        return {"place": self._place.copy(), "step": self._step}


WITHOUT = """
import sys
import numpy as np
from qfleet import Policy
policy = Policy.load(sys.argv[1], device="cpu")
action, state = policy.predict({"place": np.zeros(2), "step": 3})
assert action in (5, 6, 7) and state is None
print(policy.values({"place": np.zeros((4, 2)), "step": [1, 2, 3, 4]}).tolist())
print([name for name in sys.modules if name.startswith(("tests", "qfleet.testing"))])
"""


def test_an_own_environment_is_not_needed(tmp_path: Path) -> None:
    run = train(small({"eval.episodes": 1}, "Walk-v0"), out=tmp_path, env=Walk)
    with pytest.raises(UsageError, match="was trained in an environment of its own"):
        load(run.path)
    command = [sys.executable, "-P", "-c", WITHOUT, str(run.path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    values, modules = done.stdout.splitlines()
    batch = {"place": np.zeros((4, 2)), "step": [1, 2, 3, 4]}
    assert json.loads(values) == Policy.load(run.path).values(batch).tolist() == run.policy.values(batch).tolist()
    assert modules == "[]"


def test_a_run_that_names_foreign_code_needs_no_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(small(), tmp_path)
    text = (run.path / "run.toml").read_text()
    (run.path / "run.toml").write_text(text.replace('id = "CartPole-v1"', 'id = "evil_module:Evil-v0"'))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(UsageError, match="names code to run"):
        load(run.path)
    assert Policy.load(run.path).predict(np.zeros(4))[0] in (0, 1)
    assert "evil_module" not in sys.modules


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(small(), tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    for name in (run.path.name, "latest", run.path, str(run.path)):
        assert Policy.load(name).predict(np.zeros(4)) == run.policy.predict(np.zeros(4))
    shutil.move(run.path, tmp_path / "moved")
    assert Policy.load("moved").predict(np.zeros(4)) == run.policy.predict(np.zeros(4))
    with pytest.raises(UsageError, match="there is no run 'gone'"):
        Policy.load("gone")


def test_which_checkpoint_can_be_chosen(tmp_path: Path) -> None:
    for seed in range(20):
        run = trained(small({**JUDGED, "seed": seed}, "toys/Random-v0"), tmp_path)
        if run.status["best"]["env_steps"] != run.status["env_steps"]:
            break
    found = {which: state_arrays(Policy.load(run.path, which=which).net) for which in ("best", "latest", "any")}
    assert any(not np.array_equal(found["best"][name], found["latest"][name]) for name in found["best"])
    assert all(np.array_equal(found["best"][name], found["any"][name]) for name in found["best"])
    with pytest.raises(UsageError, match="is not a checkpoint"):
        Policy.load(run.path, which="newest")


def test_the_device_can_be_chosen(reference: Reference) -> None:
    run = reference(EVALUATED)
    assert Policy.load(run.path, device="cpu").device == torch.device("cpu")
    with pytest.raises(UsageError, match="device=nonsense cannot be used"):
        Policy.load(run.path, device="nonsense")


# Runs without spaces.json


def test_an_old_run_says_what_to_do_and_resuming_writes_the_file(tmp_path: Path) -> None:
    run = trained(small({"until.steps": 100}), tmp_path)
    before = (run.path / "spaces.json").read_bytes()
    (run.path / "spaces.json").unlink()
    with pytest.raises(UsageError, match=r"has no spaces\.json") as caught:
        Policy.load(run.path)
    assert "Resume the run once" in caught.value.fix
    assert "load(" in caught.value.fix
    assert load(run.path).policy.predict(np.zeros(4)) == run.policy.predict(np.zeros(4))
    longer = resume(run.path, steps=140)
    assert (run.path / "spaces.json").read_bytes() == before
    assert Policy.load(run.path, which="latest").predict(np.zeros(4)) == longer.policy.predict(np.zeros(4))


class Labelled(Random):
    """Its observations have a key that cannot be written as text."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict([((1, 2), self.observation_space)])  # type: ignore[list-item]

    def _show(self) -> Any:
        return {(1, 2): self._place.copy()}


@pytest.mark.parametrize("workers", [0, 1])
def test_spaces_that_cannot_be_kept_do_not_end_the_run(tmp_path: Path, workers: int) -> None:
    run = train(small({"env.workers": workers}, "Labelled-v0"), out=tmp_path, env=Labelled)
    with pytest.raises(UsageError, match="were not kept"):
        Policy.load(run.path)
    if not workers:
        assert run.policy.predict({(1, 2): np.zeros(2)})[0] in range(4)
        with pytest.raises(UsageError, match="cannot be saved"):
            run.policy.save(tmp_path / "saved")
    else:
        with pytest.raises(UsageError, match="does not know the spaces"):
            run.policy.predict({(1, 2): np.zeros(2)})


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1}', '{"format": 9}', "\x00", "[" * 10_000])
def test_a_broken_file_is_named(tmp_path: Path, reference: Reference, text: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference(EVALUATED).path, folder)
    (folder / "spaces.json").write_text(text)
    with pytest.raises(UsageError, match=r"spaces\.json of run cannot be used"):
        Policy.load(folder)


BIG = {"type": "Box", "shape": [2_000_000], "dtype": "float32", "low": "-inf", "high": "inf"}
MANY = {"type": "Discrete", "n": 1_000_000, "start": 0}
BOX = {"type": "Box", "shape": [4], "dtype": "float32", "low": "-inf", "high": "inf"}
TWO = {"type": "Discrete", "n": 2, "start": 0}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"observation": BIG}, NoCheckpointError, "bytes of weights for a network of"),
        ({"observation": MANY}, NoCheckpointError, "bytes of weights for a network of"),
        ({"observation": {**BOX, "shape": [3]}}, NoCheckpointError, "malformed"),
        ({"action": MANY}, UsageError, "joint actions"),
        ({"action": BIG}, UsageError, "dimensions"),
        ({"action": BOX}, UsageError, "without finite bounds"),
        ({"action": {"type": "Tuple", "parts": [TWO]}}, UsageError, "actions of type Tuple"),
        ({"observation": {"type": "Other", "name": "Graph"}}, UsageError, "observations of type"),
        ({"observation": {"type": "Dict", "parts": []}}, UsageError, "observations of type"),
        ({"stack": 4}, UsageError, "no stack of 4 frames"),
    ],
)
def test_spaces_of_another_environment_are_refused(
    tmp_path: Path, reference: Reference, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference(EVALUATED).path, folder)
    before = json.loads((folder / "spaces.json").read_text())
    (folder / "spaces.json").write_text(json.dumps({**before, **changes}))
    with pytest.raises((error, NoCheckpointError)) as caught:
        Policy.load(folder)
    assert text in str(caught.value), str(caught.value)


def test_a_link_is_not_followed(tmp_path: Path, reference: Reference) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference(EVALUATED).path, folder)
    (folder / "spaces.json").rename(tmp_path / "elsewhere.json")
    (folder / "spaces.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UsageError, match=r"has no spaces\.json"):
        Policy.load(folder)


# Parts of the user's own


class Torso(nn.Module):
    """A torso of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, obs: Tensor) -> Tensor:  # [N, 4] -> [N, 12]
        return torch.tanh(self.layer(obs))


def test_an_own_torso_is_passed_again(tmp_path: Path) -> None:
    run = train(small({"net.torso.type": None, "net.torso.sizes": None}), out=tmp_path, torso=Torso())
    with pytest.raises(UsageError, match="torso"):
        Policy.load(run.path)
    obs = np.full((3, 4), 0.1)
    assert Policy.load(run.path, torso=Torso()).values(obs).tolist() == run.policy.values(obs).tolist()


class PredictsReward:
    """A loss with layers of its own, which the policy does not need."""

    def make_layers(self, features: int, actions: int) -> nn.Module:
        return nn.Linear(features, actions)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        loss, priority = inputs.td_loss()
        assert inputs.layers is not None
        return loss + 0.1 * inputs.layers(inputs.features).square().mean(1), priority


class WideHead:
    """A head of the user's own with one layer more."""

    def make_layers(self, features: int, hidden: int, actions: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 7), nn.ReLU(), nn.Linear(7, actions))

    def values(self, out: Tensor) -> Tensor:
        return Scalar().values(out)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        return Scalar().target(next_out, probs, reward, discount)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return Scalar().loss(out, action, target)


def test_the_layers_of_an_own_loss_are_left_out(tmp_path: Path) -> None:
    run = train(small(), out=tmp_path, loss=PredictsReward())
    obs = np.full((3, 4), 0.1)
    policy = Policy.load(run.path)
    assert policy.net.loss_layers is None
    assert policy.values(obs).tolist() == run.policy.values(obs).tolist()
    run.policy.save(tmp_path / "saved")
    assert Policy.load(tmp_path / "saved").values(obs).tolist() == run.policy.values(obs).tolist()


def test_an_own_head_is_passed_again(tmp_path: Path) -> None:
    run = train(small(), out=tmp_path, head=WideHead())
    with pytest.raises(UsageError, match="head"):
        Policy.load(run.path)
    obs = np.full((3, 4), 0.1)
    assert Policy.load(run.path, head=WideHead()).values(obs).tolist() == run.policy.values(obs).tolist()


# Saving


@pytest.mark.parametrize("name", ["CartPole", "Dict", "recurrent", "population"])
def test_a_saved_policy_is_small_and_the_same(name: str, reference: Reference, tmp_path: Path) -> None:
    env_id, changes = WORLDS[name]
    run = reference({**EVALUATED, **changes}, env_id)
    assert run.policy.save(tmp_path / "policy") == tmp_path / "policy"
    files = sorted(str(file.relative_to(tmp_path / "policy")) for file in (tmp_path / "policy").rglob("*.*"))
    step = "checkpoints/step_000000000000"
    assert files == [f"{step}/manifest.json", f"{step}/model.safetensors", "run.toml", "spaces.json"]
    policy = Policy.load(tmp_path / "policy")
    for (obs, info, _, _), _ in played(run)[:5]:
        assert policy.values(obs).tolist() == run.policy.values(obs).tolist()
        assert same(
            policy.predict(obs, mask=info.get("action_mask"))[0],
            run.policy.predict(obs, mask=info.get("action_mask"))[0],
        )
    for taken in (tmp_path / "policy", tmp_path / "missing" / "policy", run.path):
        with pytest.raises(UsageError, match="cannot be saved as"):
            policy.save(taken)


def test_a_saved_policy_holds_no_secret(tmp_path: Path) -> None:
    overrides = settings({"env.options.api_key": "hunter22-hunter22", "env.options.num_actions": 3})
    gym.register("Keyed-v0", entry_point=lambda api_key, num_actions: Random(num_actions))
    try:
        run = trained(Plan.of("Keyed-v0", overrides=overrides), tmp_path)
    finally:
        gym.registry.pop("Keyed-v0")
    run.policy.save(tmp_path / "policy")
    for file in (tmp_path / "policy").rglob("*.*"):
        if file.is_file():
            assert b"hunter22" not in file.read_bytes()
    assert Policy.load(tmp_path / "policy").predict(np.zeros(2))[0] in range(3)


@pytest.mark.parametrize("changes", [{"runtime.type": "processes", "runtime.inference": "local"}])
def test_policies_of_other_runtimes_predict_too(changes: dict[str, Any], tmp_path: Path) -> None:
    run = trained(small({**changes, "runtime.inference_device": "cpu"}), tmp_path)
    obs: Array = np.full((2, 4), 0.1)
    assert run.policy.values(obs).tolist() == Policy.load(run.path, which="latest").values(obs).tolist()


def test_a_saved_policy_is_no_run(tmp_path: Path) -> None:
    run = trained(small(), tmp_path / "runs")
    folder = run.policy.save(tmp_path / "alone")
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(UsageError, match="is a policy that was saved, not a run"):
        resume(folder)
    assert sorted(path.name for path in folder.rglob("*")) == before
    loaded = load(folder, which="latest")
    assert loaded.weights is not None
    assert loaded.weights.text(loaded.plan) == "weights of a saved policy"
