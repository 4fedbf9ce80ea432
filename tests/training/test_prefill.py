"""Runs that act, with a data set in their replay from the start."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import Run, resume, train
from qfleet.build.make import make_components
from qfleet.build.worlds import make_train_world, resolve_data
from qfleet.datasets.format import Dataset, open_dataset
from qfleet.datasets.prepare import PreparePlan, prepare_dataset
from qfleet.distributed.local_run import begin_with_data
from qfleet.errors import StorageError, UsageError
from qfleet.learn import ReplaySource
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.save import Checkpoints
from qfleet.workflow import collect, parse_behaviour
from tests.support.recorded import make_dataset

SMALL: dict[str, Any] = {"net.torso.type": "mlp", "net.torso.sizes": [16], "algo.batch_size": 16, "env.num": 4}
SMALL |= {"runtime.threads": 1, "until.steps": 800, "algo.learn_start_steps": 40, "log.every_steps": 200}
SMALL |= {"eval.every_steps": 400, "eval.episodes": 2, "eval.test_episodes": 2, "save.every_steps": 200}
SMALL |= {"replay.capacity": 4_000}
SHARE: dict[str, Any] = {"replay.prefill_share": 0.5}
PER: dict[str, Any] = {"replay.sampler.type": "prioritized", "replay.sampler.beta_updates": 100}
WINDOWS: dict[str, Any] = {"net.memory.type": "gru", "net.memory.size": 8, "algo.view.type": "sequences"}
WINDOWS |= {"algo.view.burn_in": 4, "algo.view.length": 6, "algo.view.stride": 3, "algo.batch_size": 8}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CartPole at random, split."""
    folder = tmp_path_factory.mktemp("data")
    behaviour = parse_behaviour("random", None, Path)
    collect(make_plan("CartPole-v1", overrides={"seed": 3}), str(folder / "raw"), behaviour, episodes=60)
    prepare_dataset(open_dataset(str(folder / "raw")), str(folder / "ready"), PreparePlan(file_bytes=8_000))
    return folder / "ready"


def plan_for(folder: Path, **more: Any) -> Plan:
    return make_plan("CartPole-v1", overrides={**SMALL, "replay.prefill": str(folder), **more})


def learn(folder: Path, out: Path, name: str, callbacks: Any = (), **more: Any) -> Run:
    return train(plan_for(folder, **more), out=out, name=name, progress=False, callbacks=callbacks)


def files_of(run: Run) -> dict[str, bytes]:
    newest = Checkpoints(run.path / "checkpoints", writer=False).newest()
    return {name: newest.read(name) for name in ("model.safetensors", "optim.safetensors")}


def train_steps(dataset: Dataset) -> int:
    return sum(file.steps for file in dataset.files("train"))


def stop_late(row: dict[str, Any]) -> bool:
    return row["kind"] == "progress" and row["env_steps"] >= 400


VARIANTS: dict[str, dict[str, Any]] = {
    "first": {},
    "share": SHARE,
    "first, prioritised": {**PER, "algo.n_step": 3},
    "share, prioritised": {**SHARE, **PER, "algo.n_step": 3},
    "share, sequences": {**SHARE, **WINDOWS},
    "first, sequences": WINDOWS,
    "share, compressed": {**SHARE, "replay.compress": True},
    "share, annealed": {**SHARE, "algo.anneal.type": "exponential", "algo.anneal.updates": 100, "algo.n_step": 2},
    "share, growing": {**SHARE, "steer.batch.type": "grow", "steer.batch.patience": 1, "eval.every_steps": 100},
}


QUICK = ("first", "share, prioritised")


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in VARIANTS]
)
def test_a_run_that_was_stopped_goes_on_exactly(prepared: Path, tmp_path: Path, variant: str) -> None:
    whole = learn(prepared, tmp_path, "whole", **VARIANTS[variant])
    stopped = learn(prepared, tmp_path, "stopped", [stop_late], **VARIANTS[variant])
    assert stopped.status["state"] == "stopped"
    assert stopped.status["env_steps"] < 800 <= whole.status["env_steps"]
    resumed = resume(stopped.path, progress=False)
    assert (resumed.status["state"], resumed.status["exact"]) == ("done", True)
    assert files_of(resumed) == files_of(whole)


def test_recorded_steps_are_not_steps_of_the_run(prepared: Path, tmp_path: Path) -> None:
    dataset = open_dataset(str(prepared))
    run = learn(prepared, tmp_path, "run", **SHARE)
    assert run.plan.replay.prefill_version == dataset.version  # type: ignore[union-attr]
    rows = [row for row in run.metrics if row["kind"] == "progress"]
    assert rows[0]["env_steps"] == 200
    assert rows[-1]["replay_size"] <= 800
    shares = [row["replay_recorded"] for row in rows if row["replay_recorded"] is not None]
    assert shares
    assert all(share == 0.5 for share in shares)
    assert all(0 <= row["replay_age"] <= 800 for row in rows if row["replay_age"] is not None)


def test_the_first_steps_of_the_replay_are_those_of_the_data(prepared: Path, tmp_path: Path) -> None:
    dataset = open_dataset(str(prepared))
    run = learn(prepared, tmp_path, "run", [stop_late], **{"algo.learn_start_steps": 0})
    rows = [row for row in run.metrics if row["kind"] == "progress"]
    complete = train_steps(dataset) + rows[0]["env_steps"] - 4 * run.plan.algo.n_step  # but for the newest of each lane
    assert complete <= rows[0]["replay_size"] <= complete + 4 * run.plan.algo.n_step
    assert rows[0]["replay_recorded"] > rows[-1]["replay_recorded"] > 0.5
    assert all(0 <= row["replay_age"] <= 400 for row in rows)


def loaded_components(plan: Plan) -> Any:
    world = make_train_world(plan)
    plan, notes = resolve_data(plan, world.spec, None)
    assert notes
    components = make_components(plan, world)
    begin_with_data(components)
    return components


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("share", [None, 0.5])
def test_recorded_items_are_those_of_the_episodes(prepared: Path, n_step: int, share: float | None) -> None:
    """Every step of the train split, each with the n-step reward and next observation of its own episode."""
    more = {} if share is None else {"replay.prefill_share": share}
    components = loaded_components(plan_for(prepared, **more, **{"algo.n_step": n_step, "algo.discount": 0.9}))
    source = components.batch_source
    assert isinstance(source, ReplaySource)
    replay = source.replay if source.recorded is None else source.recorded.replay
    dataset = open_dataset(str(prepared))
    assert len(replay) == train_steps(dataset)
    assert source.steps == 0
    batch = replay.read_batch(np.arange(len(replay)), np.ones(len(replay), np.float32))
    found = {obs.tobytes(): at for at, obs in enumerate(batch.obs)}
    for file in dataset.files("train"):
        for episode in dataset.episodes(file):
            obs = episode.observations["obs"]
            for t in range(episode.num_steps):
                end = min(t + n_step, episode.num_steps)
                at = found.pop(obs[t].tobytes())
                assert batch.reward[at] == pytest.approx(sum(0.9**k for k in range(end - t)))
                ends = episode.terminated and end == episode.num_steps
                assert batch.discount[at] == pytest.approx(0.0 if ends else 0.9 ** (end - t))
                np.testing.assert_array_equal(batch.next_obs[at], obs[end])
                assert batch.action[at] == episode.action[t]
    assert not found
    components.close()


@pytest.mark.parametrize(
    "variant", ["share, prioritised", *(pytest.param(each, marks=pytest.mark.slow) for each in ("share", "first"))]
)
def test_actors_in_processes(prepared: Path, tmp_path: Path, variant: str) -> None:
    more = {**VARIANTS[variant], "runtime.type": "processes", "actors.num": 2, "env.num": 4}
    run = learn(prepared, tmp_path, "run", **more)
    assert run.status["state"] == "done"
    assert run.status["env_steps"] >= 800
    shares = [row["replay_recorded"] for row in run.metrics if row["kind"] == "progress" and row["replay_recorded"]]
    assert shares
    assert variant == "first" or set(shares) == {0.5}


@pytest.mark.slow
def test_a_replay_process_and_several_learners(prepared: Path, tmp_path: Path) -> None:
    process = {**SHARE, "runtime.type": "processes", "runtime.replay_process": True}
    assert learn(prepared, tmp_path, "process", **process).status["state"] == "done"
    several = {**SHARE, **PER, "learners.num": 2}
    assert learn(prepared, tmp_path, "several", **several).status["state"] == "done"


@pytest.mark.slow
def test_members_of_a_population_share_the_data(prepared: Path, tmp_path: Path) -> None:
    run = learn(prepared, tmp_path, "run", **SHARE, **{"population.num": 2})
    assert run.status["state"] == "done"


def test_a_changed_data_set_is_refused(prepared: Path, tmp_path: Path) -> None:
    prepare_dataset(open_dataset(str(prepared)), str(tmp_path / "copy"), PreparePlan(file_bytes=20_000))
    run = learn(tmp_path / "copy", tmp_path, "run", [stop_late], **SHARE)
    text = (run.path / "run.toml").read_text()
    (run.path / "run.toml").write_text(text.replace(str(tmp_path / "copy"), str(prepared)))
    with pytest.raises(StorageError, match="holds another data set than before"):
        resume(run.path, progress=False)
    (tmp_path / "copy").rename(tmp_path / "moved")
    (run.path / "run.toml").write_text(text.replace(str(tmp_path / "copy"), str(tmp_path / "moved")))
    assert resume(run.path, progress=False).status["state"] == "done"


def test_what_does_not_fit_is_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"replay\.capacity=500 cannot hold"):
        learn(prepared, tmp_path, "run", **{"replay.capacity": 500})
    plan = make_plan("Acrobot-v1", overrides={**SMALL, "replay.prefill": str(prepared)})
    with pytest.raises(UsageError, match="does not fit Acrobot-v1"):
        train(plan, out=tmp_path, progress=False)
    make_dataset(tmp_path / "other", [4] * 4, env_id="CartPole-v1")
    with pytest.raises(UsageError, match="does not fit CartPole-v1"):
        learn(tmp_path / "other", tmp_path, "run", **SHARE)
    assert not list(tmp_path.glob("run*"))
