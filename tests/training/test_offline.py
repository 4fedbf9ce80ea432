"""Runs that learn from a data set."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import Policy, Run, load, resume, train
from qfleet.datasets.format import open_dataset
from qfleet.datasets.prepare import PreparePlan, prepare_dataset
from qfleet.errors import StorageError, UsageError
from qfleet.plan import make_plan, read_plan
from qfleet.save import Checkpoints
from qfleet.workflow import collect, parse_behaviour
from tests.support.recorded import SPEC, make_dataset
from tests.support.runs import events

SMALL: dict[str, Any] = {
    "net.torso.type": "mlp",
    "net.torso.sizes": [16],
    "algo.batch_size": 32,
    "algo.n_step": 2,
    "log.every_steps": 500,
}
SMALL |= {"eval.every_steps": 1_000, "eval.episodes": 5, "eval.test_episodes": 5, "save.every_steps": 500}


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """CartPole at random, prepared: files are small, so that an epoch has many shards."""
    behaviour = parse_behaviour("random", None, Path)
    collect(make_plan("CartPole-v1", overrides={"seed": 3}), str(tmp_path / "raw"), behaviour, episodes=60)
    prepare_dataset(open_dataset(str(tmp_path / "raw")), str(tmp_path / "ready"), PreparePlan(file_bytes=8_000))
    return tmp_path / "ready"


def settings_for(folder: Path, **more: Any) -> dict[str, Any]:
    return {**SMALL, "replay.type": "dataset", "replay.path": str(folder), **more}


def learn(folder: Path, out: Path, name: str, **more: Any) -> Run:
    plan = make_plan("CartPole-v1", overrides=settings_for(folder, **more))
    return train(plan, out=out, name=name, progress=False)


def files_of(run: Run) -> dict[str, bytes]:
    newest = Checkpoints(run.path / "checkpoints", writer=False).newest()
    return {name: newest.read(name) for name in ("model.safetensors", "optim.safetensors")}


def test_epochs_are_counted_and_rows_are_as_in_any_run(prepared: Path, tmp_path: Path) -> None:
    run = learn(prepared, tmp_path, "run", **{"until.epochs": 2})
    num_steps = sum(file.steps for file in open_dataset(str(prepared)).files("train"))
    assert run.plan.until.steps == 2 * num_steps
    assert run.plan.replay.version == open_dataset(str(prepared)).version  # type: ignore[union-attr]
    progress = [row for row in run.metrics if row["kind"] == "progress"]
    assert all(row["epoch"] == pytest.approx(row["env_steps"] / num_steps) for row in progress)
    assert run.status["updates"] == -(-2 * num_steps // 32)
    result = run.result()
    assert result is not None
    assert (result["split"], result["episodes"]) == ("test", 5)
    assert result["mean"] > 0


def test_a_run_that_was_stopped_in_mid_epoch_goes_on_exactly(prepared: Path, tmp_path: Path) -> None:
    whole = learn(prepared, tmp_path, "whole", **{"until.epochs": 3})

    def stop(row: dict[str, Any]) -> bool:
        return row["kind"] == "progress" and row["env_steps"] >= 1_500

    plan = make_plan("CartPole-v1", overrides=settings_for(prepared, **{"until.epochs": 3}))
    stopped = train(plan, out=tmp_path, name="stopped", progress=False, callbacks=[stop])
    assert stopped.status["state"] == "stopped"
    assert 0 < stopped.status["env_steps"] < whole.status["env_steps"]
    resumed = resume(stopped.path, progress=False)
    assert resumed.status["state"] == "done"
    assert resumed.status["exact"]
    assert files_of(resumed) == files_of(whole)


def test_the_same_seed_makes_the_same_weights(prepared: Path, tmp_path: Path) -> None:
    runs = [
        learn(prepared, tmp_path, f"run{seed}-{at}", **{"until.epochs": 1, "seed": seed})
        for at, seed in enumerate((0, 0, 1))
    ]
    assert files_of(runs[0]) == files_of(runs[1]) != files_of(runs[2])


def test_a_moved_data_set_is_the_same_and_a_changed_one_is_refused(prepared: Path, tmp_path: Path) -> None:
    run = learn(prepared, tmp_path, "run", **{"until.epochs": 1})
    prepared.rename(tmp_path / "moved")
    with pytest.raises(StorageError, match="there is no data set"):
        resume(run.path, steps=5_000, progress=False)
    text = (run.path / "run.toml").read_text()
    (run.path / "run.toml").write_text(text.replace(str(prepared), str(tmp_path / "moved")))
    assert resume(run.path, steps=5_000, progress=False).status["env_steps"] >= 5_000
    make_dataset(prepared, [4, 4], env_id="CartPole-v1")
    (run.path / "run.toml").write_text(text)
    with pytest.raises(StorageError, match="holds another data set than before"):
        resume(run.path, steps=6_000, progress=False)


def test_without_its_environment_a_run_is_judged_on_recorded_episodes(tmp_path: Path) -> None:
    make_dataset(tmp_path / "raw", [20] * 60)
    prepare_dataset(open_dataset(str(tmp_path / "raw")), str(tmp_path / "ready"), PreparePlan())
    plan = make_plan("Logs-v0", overrides=settings_for(tmp_path / "ready", **{"until.epochs": 2}))
    run = train(plan, out=tmp_path, name="run", progress=False)
    assert run.plan.eval.on == "data"
    rows = [row for row in run.metrics if row["kind"] == "eval"]
    assert {row["split"] for row in rows} == {"validation", "test"}
    assert all(row["measure"] == "td_error" and row["td_error"] == -row["mean"] > 0 for row in rows)
    assert load(run.path).policy.spec == SPEC


def test_held_out_errors_are_those_computed_by_hand(tmp_path: Path) -> None:
    """With all weights zero every value is zero, and so the error of a step is its reward."""
    from qfleet.build.make import make_components
    from qfleet.build.offline.plan_dataset import make_recorded_world, resolve_offline
    from qfleet.build.resolve import resolve
    from qfleet.training.evaluation.held_out import HeldOutEvaluator

    make_dataset(tmp_path / "raw", [3] * 60)
    prepare_dataset(open_dataset(str(tmp_path / "raw")), str(tmp_path / "ready"), PreparePlan())
    plan = make_plan("Logs-v0", overrides=settings_for(tmp_path / "ready", **{"algo.n_step": 1}))
    world = make_recorded_world(plan)
    plan, _ = resolve_offline(resolve(plan, world.spec))
    components = make_components(plan, world)
    for tensor in components.policy.net.state_dict().values():
        tensor.zero_()
    row = HeldOutEvaluator(components).validate(components.policy)
    assert row is not None
    dataset = open_dataset(str(tmp_path / "ready"))
    episodes = [episode for file in dataset.files("validation") for episode in dataset.episodes(file)][:5]
    assert row["td_error"] == pytest.approx(np.mean([np.abs(episode.reward).mean() for episode in episodes]))


def test_a_policy_of_recorded_spaces_acts_without_its_environment(prepared: Path, tmp_path: Path) -> None:
    run = learn(prepared, tmp_path, "run", **{"until.epochs": 1, "eval.on": "data"})
    action, _ = Policy.load(run.path).predict(np.zeros(4, np.float32))
    assert action in (0, 1)


def test_the_environment_must_be_that_of_the_data(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not the environment of"):
        train(make_plan("Acrobot-v1", overrides=settings_for(prepared)), out=tmp_path, progress=False)
    make_dataset(tmp_path / "three", [4] * 4, env_id="CartPole-v1")
    more = {"replay.split": "all"}
    with pytest.raises(UsageError, match="has other spaces here than in the data set"):
        learn(tmp_path / "three", tmp_path, "run", **more)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("population.num", 2),
        ("algo.bonus.type", "count"),
        ("algo.anneal.type", "exponential"),
    ],
)
def test_what_does_not_go_with_a_data_set_is_refused(path: str, value: object) -> None:
    with pytest.raises(UsageError, match="does not go with"):
        make_plan("CartPole-v1", overrides=settings_for(Path("data"), **{path: value}))


@pytest.mark.parametrize("settings", [{"until.epochs": 3}, {"eval.on": "data"}])
def test_what_goes_with_a_data_set_only_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="does not go with"):
        make_plan("CartPole-v1", overrides=settings)


def test_a_data_set_needs_a_path() -> None:
    with pytest.raises(UsageError, match=r"needs replay\.path"):
        make_plan("CartPole-v1", overrides={"replay.type": "dataset"})


def test_the_plan_of_a_run_is_read_again(prepared: Path, tmp_path: Path) -> None:
    run = learn(prepared, tmp_path, "run", **{"until.epochs": 1})
    assert read_plan(run.path / "run.toml") == run.plan


def test_a_cloned_policy_is_judged_by_its_cross_entropy(prepared: Path, tmp_path: Path) -> None:
    settings = settings_for(prepared, **{"until.epochs": 1, "algo.offline.type": "bc", "eval.on": "data"})
    del settings["algo.n_step"]  # without effect
    run = train(make_plan("CartPole-v1", overrides=settings), out=tmp_path, name="run", progress=False)
    row = run.result()
    assert row is not None
    assert row["measure"] == "cross_entropy"
    assert 0 < row["cross_entropy"] == -row["mean"] < 1  # of two actions chosen at random it is ln 2


def test_two_learners_make_a_run(prepared: Path, tmp_path: Path) -> None:
    more = {"until.epochs": 1, "learners.num": 2, "runtime.threads": 1, "algo.offline.type": "cql", "eval.on": "data"}
    run = learn(prepared, tmp_path, "run", **more)
    num_steps = sum(file.steps for file in open_dataset(str(prepared)).files("train"))
    assert run.status["updates"] == -(-num_steps // 32)
    assert not events(run.path, "learner_lost")
