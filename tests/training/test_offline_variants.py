"""Runs on data sets: sequences, draws by priority, normalisation, and settings that scores change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import Run, load, resume, train
from qfleet.datasets.format import open_dataset
from qfleet.datasets.prepare import PreparePlan, prepare_dataset
from qfleet.plan import make_plan
from qfleet.save import Checkpoints
from qfleet.workflow import collect, parse_behaviour
from tests.support.recorded import make_dataset
from tests.support.runs import events

SMALL: dict[str, Any] = {"net.torso.type": "mlp", "net.torso.sizes": [16], "algo.batch_size": 32, "runtime.threads": 1}
SMALL |= {"log.every_steps": 500, "eval.every_steps": 500, "eval.episodes": 5, "eval.test_episodes": 5}
SMALL |= {"save.every_steps": 500, "replay.type": "dataset", "eval.on": "data", "until.epochs": 2}
WINDOWS: dict[str, Any] = {"net.memory.type": "gru", "net.memory.size": 8, "algo.view.type": "sequences"}
WINDOWS |= {"algo.view.burn_in": 4, "algo.view.length": 6, "algo.view.stride": 3, "algo.batch_size": 8}
PRIORITIES: dict[str, Any] = {"replay.order.type": "prioritized", "replay.order.beta_updates": 50}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CartPole at random, prepared: files are small, so that an epoch has many shards."""
    folder = tmp_path_factory.mktemp("data")
    behaviour = parse_behaviour("random", None, Path)
    collect(make_plan("CartPole-v1", overrides={"seed": 3}), str(folder / "raw"), behaviour, episodes=60)
    prepare_dataset(open_dataset(str(folder / "raw")), str(folder / "ready"), PreparePlan(file_bytes=8_000))
    return folder / "ready"


def learn(folder: Path, out: Path, name: str, callbacks: Any = (), **more: Any) -> Run:
    plan = make_plan("CartPole-v1", overrides={**SMALL, "replay.path": str(folder), **more})
    return train(plan, out=out, name=name, progress=False, callbacks=callbacks)


def files_of(run: Run) -> dict[str, bytes]:
    newest = Checkpoints(run.path / "checkpoints", writer=False).newest()
    return {name: newest.read(name) for name in ("model.safetensors", "optim.safetensors")}


def num_train_steps(folder: Path) -> int:
    return sum(file.steps for file in open_dataset(str(folder)).files("train"))


def stop_late(row: dict[str, Any]) -> bool:
    return row["kind"] == "progress" and row["env_steps"] >= 1_000


VARIANTS: dict[str, dict[str, Any]] = {
    "windows": WINDOWS,
    "prioritized": PRIORITIES,
    "uniform": {"replay.order.type": "uniform"},
    "prioritized windows": {**WINDOWS, **PRIORITIES},
    "growing": {"steer.batch.type": "grow", "steer.batch.patience": 1, "steer.batch.largest": 128},
    "normalised": {"env.normalize": "both"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_was_stopped_goes_on_exactly(prepared: Path, tmp_path: Path, variant: str) -> None:
    whole = learn(prepared, tmp_path, "whole", **VARIANTS[variant])
    stopped = learn(prepared, tmp_path, "stopped", [stop_late], **VARIANTS[variant])
    assert stopped.status["state"] == "stopped"
    assert 0 < stopped.status["env_steps"] < whole.status["env_steps"]
    resumed = resume(stopped.path, progress=False)
    assert (resumed.status["state"], resumed.status["exact"]) == ("done", True)
    assert files_of(resumed) == files_of(whole)


def test_an_epoch_of_overlapping_windows_counts_steps_as_often_as_they_are_learned_from(
    prepared: Path, tmp_path: Path
) -> None:
    run = learn(prepared, tmp_path, "run", **WINDOWS, **{"until.epochs": 1})
    dataset = open_dataset(str(prepared))
    per_epoch = 0
    for row in dataset.index:
        starts = [0, *(at for at in range(3, row.length, 3) if at + 3 < row.length)] if row.split == "train" else []
        per_epoch += sum(min(6, row.length - at) for at in starts)
    assert run.plan.until.steps == per_epoch > num_train_steps(prepared)
    last = [row for row in run.metrics if row["kind"] == "progress"][-1]
    assert last["epoch"] <= 1.1
    assert {row["measure"] for row in run.metrics if row["kind"] == "eval"} == {"td_error"}


@pytest.mark.parametrize("variant", ["windows", "prioritized", "growing"])
def test_two_learners_make_a_run(prepared: Path, tmp_path: Path, variant: str) -> None:
    more = {**VARIANTS[variant], "learners.num": 2, "until.epochs": 1}
    run = learn(prepared, tmp_path, "run", **more)
    assert run.status["state"] == "done"
    assert not events(run.path, "learner_lost")


def test_a_checkpoint_holds_no_rows_of_the_data_set(prepared: Path, tmp_path: Path) -> None:
    run = learn(prepared, tmp_path, "run", **PRIORITIES, **{"until.epochs": 1})
    newest = Checkpoints(run.path / "checkpoints", writer=False).newest()
    assert not any(name.startswith("replay/") for name in newest.files)


# Normalisation


def normalisation_of(run: Run) -> dict[str, Any]:
    net = load(run.path).policy.net
    found: dict[str, Any] = {}
    if net.normalize is not None:
        found |= {"mean": net.normalize.mean.numpy(), "var": net.normalize.var.numpy()}
    if net.rewards is not None:
        found |= {"reward_var": net.rewards.var.numpy()}
    return found


def test_observations_are_normalised_by_the_statistics_of_the_train_split(prepared: Path, tmp_path: Path) -> None:
    run = learn(prepared, tmp_path, "run", **{"env.normalize": "both"})
    dataset = open_dataset(str(prepared))
    episodes = [episode for file in dataset.files("train") for episode in dataset.episodes(file)]
    seen = np.concatenate([episode.observations["obs"] for episode in episodes]).astype(np.float64)
    found = normalisation_of(run)
    np.testing.assert_allclose(found["mean"], seen.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found["var"], seen.var(0), rtol=1e-9)
    returns = []
    for episode in episodes:
        total = 0.0
        for reward in episode.reward:
            total = run.plan.algo.discount * total + reward
            returns.append(total)
    np.testing.assert_allclose(found["reward_var"], np.var(returns), rtol=1e-9)


def test_one_learner_and_two_normalise_alike(prepared: Path, tmp_path: Path) -> None:
    runs = [
        learn(prepared, tmp_path, f"run{num}", **{"env.normalize": "both", "learners.num": num, "until.epochs": 1})
        for num in (1, 2)
    ]
    one, two = map(normalisation_of, runs)
    assert all(np.array_equal(one[name], two[name]) for name in one)
    weights = [np.concatenate([v.ravel() for v in load(run.path).policy.net.state_dict().values()]) for run in runs]
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-3, atol=1e-4)


def test_held_out_errors_are_of_scaled_rewards(tmp_path: Path) -> None:
    """With all weights zero every value is zero, so the error of a step is its reward as it is learned from."""
    from qfleet.build.make import make_components
    from qfleet.build.offline.plan_dataset import make_recorded_world, resolve_offline
    from qfleet.build.resolve import resolve
    from qfleet.distributed.local_run import begin_with_data
    from qfleet.training.evaluation.held_out import HeldOutEvaluator

    make_dataset(tmp_path / "raw", [3] * 60)
    prepare_dataset(open_dataset(str(tmp_path / "raw")), str(tmp_path / "ready"), PreparePlan())
    settings = {**SMALL, "replay.path": str(tmp_path / "ready"), "algo.n_step": 1, "env.normalize": "reward"}
    plan = make_plan("Logs-v0", overrides=settings)
    world = make_recorded_world(plan)
    plan, _ = resolve_offline(resolve(plan, world.spec))
    components = make_components(plan, world)
    begin_with_data(components)
    assert components.learner.net.rewards is not None  # type: ignore[union-attr]
    scale = components.learner.net.rewards.scale()  # type: ignore[union-attr]
    for name, tensor in components.policy.net.state_dict().items():
        if not name.startswith("rewards."):
            tensor.zero_()
    row = HeldOutEvaluator(components).validate(components.policy)
    dataset = open_dataset(str(tmp_path / "ready"))
    episodes = [episode for file in dataset.files("validation") for episode in dataset.episodes(file)][:5]
    expected = np.mean([np.minimum(np.abs(episode.reward) * scale, 10.0).mean() for episode in episodes])
    assert row is not None
    assert row["td_error"] == pytest.approx(expected, rel=1e-5)


# What scores change


def test_scores_on_recorded_episodes_lower_the_rate_grow_the_batch_and_end_the_run(
    prepared: Path, tmp_path: Path
) -> None:
    """A learning rate that is far too high: held-out errors grow, and patience runs out."""
    more = {"optim.learning_rate": 0.3, "eval.every_steps": 200, "until.epochs": 20, "optim.clip_norm": None}
    more |= {"steer.batch.type": "grow", "steer.batch.patience": 2, "steer.batch.largest": 100}
    more |= {"steer.learning_rate.type": "plateau", "steer.learning_rate.patience": 1, "steer.stop_patience": 6}
    run = learn(prepared, tmp_path, "run", **more)
    assert run.status["state"] == "done"
    assert "stop_patience" in run.status["reason"]
    assert run.status["env_steps"] < run.plan.until.steps
    changes = [row for row in run.metrics if row["kind"] == "steer"]
    batches = [(row["before"], row["after"]) for row in changes if row["setting"] == "algo.batch_size"]
    assert batches[:2] == [(32, 64), (64, 100)]
    assert any(row["setting"] == "optim.learning_rate" for row in changes)
    progress = [row for row in run.metrics if row["kind"] == "progress"]
    grown = [row["env_steps"] for row in changes if row["setting"] == "algo.batch_size"]
    for row in progress:
        assert row["batch_size"] == [32, 64, 100][sum(steps < row["env_steps"] for steps in grown)]
    assert progress[-1]["batch_size"] > 32


def test_a_batch_that_grew_leaves_no_step_out(prepared: Path, tmp_path: Path) -> None:
    """Positions count on through the change: an epoch's steps are each used once."""
    from qfleet.learn.offline.dataset_source import make_dataset_source
    from qfleet.replay import make_replay

    settings = {**SMALL, "replay.path": str(prepared), "algo.n_step": 1}
    plan = make_plan("CartPole-v1", overrides=settings)
    spec = open_dataset(str(prepared)).manifest.spec.spec()
    source = make_dataset_source(plan, make_replay(plan, spec, 1, np.random.default_rng(0)))
    ids = []
    for size in (32, 64, 100, 7):
        source.batch_size = size
        again = make_dataset_source(plan, make_replay(plan, spec, 1, np.random.default_rng(0)))
        again.load_state_dict(source.state_dict())
        batch = again.next_batch(0)
        assert batch is not None
        assert batch.ids.tolist() == source.next_batch(0).ids.tolist()
        ids += batch.ids.tolist()
    assert sorted(ids) == list(range(32 + 64 + 100 + 7))
    assert source.steps == source.position == len(ids)
