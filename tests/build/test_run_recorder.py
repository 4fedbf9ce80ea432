from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import resume, train
from qfleet.act import recording
from qfleet.build.offline import run_recorder
from qfleet.datasets.format import open_dataset
from qfleet.errors import StorageError, UsageError
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.run_object import Run
from tests.support.traced import TRACED, episodes_of, require_traced

LANES = 4
SETTINGS: dict[str, Any] = {
    "env.num": LANES,
    "algo.learn_start_steps": 100,
    "algo.batch_size": 8,
    "net.torso.type": "mlp",
    "net.torso.sizes": (8,),
    "eval.episodes": 0,
    "eval.test_episodes": 0,
    "log.every_steps": 100,
    "runtime.threads": 1,
    "until.steps": 2_000,
}
PROCESSES = {"runtime.type": "processes", "actors.num": 2}


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files and chunks in a short run."""
    monkeypatch.setattr(run_recorder, "RUN_FILE_BYTES", 20_000)
    monkeypatch.setattr(recording, "CHUNK_ROWS", 7)


def recording_plan(data: Path, env_id: str = TRACED, **settings: object) -> Plan:
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    return make_plan(env_id, overrides={**SETTINGS, "save.dataset": str(data), **dotted})


def stop_at(steps: int) -> Any:
    return lambda row: row["env_steps"] >= steps


def recorded_run(tmp_path: Path, **settings: object) -> Run:
    return train(recording_plan(tmp_path / "data", **settings), out=tmp_path, name="run", progress=False)


def test_every_step_of_the_actors_is_recorded_once(tmp_path: Path) -> None:
    recorded_run(tmp_path)
    dataset = open_dataset(str(tmp_path / "data"))
    assert require_traced(dataset) <= LANES
    assert 2_000 - LANES <= dataset.manifest.num_steps <= 2_000
    assert len(dataset.files()) >= 4
    assert dataset.manifest.settings["env_steps"] >= 2_000
    first = episodes_of(dataset)[0]
    assert first.behaviour == "double-n5" or first.behaviour
    assert first.probability is not None
    assert ((first.probability > 0) & (first.probability <= 1)).all()


def test_recording_changes_nothing_in_the_run(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path)
    plain = train(make_plan(TRACED, overrides=SETTINGS), out=tmp_path, name="plain", progress=False)
    for name, weights in plain.policy.net.state_dict().items():
        np.testing.assert_array_equal(recorded.policy.net.state_dict()[name], weights)


def test_a_resumed_run_records_the_same_data_set(tmp_path: Path) -> None:
    recorded_run(tmp_path / "whole")
    broken = tmp_path / "broken"
    plan = recording_plan(broken / "data")
    train(plan, out=broken, name="run", progress=False, callbacks=[stop_at(500)])
    with pytest.raises(StorageError, match="no data set"):
        open_dataset(str(broken / "data"))
    resume(broken / "run", progress=False, callbacks=[stop_at(1_300)])
    resume(broken / "run", progress=False)
    versions = {open_dataset(str(tmp_path / name / "data")).version for name in ("whole", "broken")}
    assert len(versions) == 1


def test_steps_after_the_last_checkpoint_are_recorded_again(tmp_path: Path) -> None:
    """As if the run had been killed long after its checkpoint: its later files are written anew."""
    plan = recording_plan(tmp_path / "data", save__every_steps=100_000, save__every_seconds=1_000)
    train(plan, out=tmp_path, name="run", progress=False, callbacks=[stop_at(300)])
    files = tmp_path / "data/data"
    files.mkdir(parents=True, exist_ok=True)
    number = len(list(files.iterdir()))
    for more in (0, 1):
        (files / f"all-{number + more:05d}.parquet").write_bytes(b"of steps that are made again")
    resume(tmp_path / "run", progress=False)
    require_traced(open_dataset(str(tmp_path / "data")))


def test_actors_in_other_processes_are_recorded(tmp_path: Path) -> None:
    train(
        recording_plan(tmp_path / "data", **PROCESSES),
        out=tmp_path,
        name="run",
        progress=False,
        callbacks=[stop_at(800)],
    )
    resume(tmp_path / "run", progress=False)
    dataset = open_dataset(str(tmp_path / "data"))
    assert require_traced(dataset) <= 3 * LANES
    assert 2_000 - 3 * LANES <= dataset.manifest.num_steps <= 2_000
    assert {id.split("-")[1] for id in (row.id for row in dataset.index)} == {"0000", "0001", "0002", "0003"}


def test_probabilities_of_a_noisy_network_are_unknown(tmp_path: Path) -> None:
    recorded_run(tmp_path, net__noisy=True, until__steps=300)
    assert all(episode.probability is None for episode in episodes_of(open_dataset(str(tmp_path / "data"))))


@pytest.mark.parametrize("env_id", ["toys/Masked-v0", "toys/DictObs-v0"])
def test_masks_and_adapted_observations(tmp_path: Path, env_id: str) -> None:
    recorded_run(tmp_path, env_id=env_id, until__steps=300)
    dataset = open_dataset(str(tmp_path / "data"))
    for episode in episodes_of(dataset):
        if env_id == "toys/Masked-v0":
            assert episode.mask is not None
            steps = np.arange(episode.num_steps + 1)
            assert not episode.mask[steps, steps % 4].any()
            assert episode.mask.sum(1).tolist() == [3] * len(steps)
            assert episode.mask[np.arange(episode.num_steps), episode.action].all()
        else:
            assert episode.observations["obs"].shape[1:] == (4,)
    assert dataset.manifest.env_spaces() is not None


def test_a_complete_data_set_is_not_recorded_on(tmp_path: Path) -> None:
    recorded_run(tmp_path, until__steps=300)
    before = open_dataset(str(tmp_path / "data")).version
    resume(tmp_path / "run", progress=False)  # at its end already
    with pytest.raises(UsageError, match="is complete"):
        resume(tmp_path / "run", steps=500, progress=False)
    assert open_dataset(str(tmp_path / "data")).version == before
    with pytest.raises(UsageError, match="holds a data set already"):
        train(recording_plan(tmp_path / "data"), out=tmp_path, progress=False)


def test_what_another_run_recorded_is_not_overwritten(tmp_path: Path) -> None:
    plan = recording_plan(tmp_path / "data")
    train(plan, out=tmp_path, name="run", progress=False, callbacks=[stop_at(1_500)])
    with pytest.raises(UsageError, match="without a manifest"):
        train(plan, out=tmp_path, name="other", progress=False)
    assert not (tmp_path / "other").exists()


def test_a_changed_file_is_noticed_at_the_end(tmp_path: Path) -> None:
    plan = recording_plan(tmp_path / "data")
    train(plan, out=tmp_path, name="run", progress=False, callbacks=[stop_at(1_500)])
    (tmp_path / "data/data/all-00000.parquet").write_bytes(b"something else")
    with pytest.raises(StorageError, match="its bytes are not those"):
        resume(tmp_path / "run", progress=False)
    assert not (tmp_path / "data/manifest.json").exists()


@pytest.mark.parametrize("damage", ["columns", "rows", "actors"])
def test_a_malformed_state_is_refused(tmp_path: Path, damage: str) -> None:
    recorder = make_recorder(tmp_path)
    state = recorder.state_dict()
    state["actors"] = {
        "columns": [{**state["actors"][0], "begun": {"shape": [1]}}],
        "rows": [{**state["actors"][0], "lengths": np.array([1, 0, 0, 0])}],
        "actors": [],
    }[damage]
    with pytest.raises(ValueError, match=r"missing|shape|actors"):
        recorder.load_state_dict(state)


def make_recorder(tmp_path: Path) -> run_recorder.RunRecorder:
    from contextlib import closing

    from qfleet.build.worlds import make_train_world
    from qfleet.datasets.format import Description, spec_columns
    from qfleet.datasets.storage import open_place

    plan = recording_plan(tmp_path / "data")
    with closing(make_train_world(plan)) as world:
        description = Description(plan.env.id, world.spec, spec_columns(world.spec))
    return run_recorder.RunRecorder(plan, open_place(str(tmp_path / "data")), description)
