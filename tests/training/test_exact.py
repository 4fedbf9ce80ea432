"""The seed decides everything, and a run that was cut in two ends bit-equal to one that was not."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.run_fixtures import Reference
from tests.support.runs import JUDGED, PONG, Settings, checkpoints, hashes, resumed, rows, same, small, trained, until

PER: Settings = {"replay.sampler.type": "prioritized", "replay.sampler.beta_updates": 50}
CELLS: dict[str, Settings] = {
    "uniform-1": {"algo.n_step": 1},
    "uniform-3": {"algo.n_step": 3},
    "prioritized-1": {**PER, "algo.n_step": 1},
    "prioritized-3": {**PER, "algo.n_step": 3},
    "normalised": {"env.normalize": "both"},
    "averaged-target": {"algo.target.type": "average", "algo.target.tau": 0.05, "algo.target.every_updates": None},
    "rmsprop": {"optim.type": "rmsprop", "net.dueling": True},
    # An update only every 40 steps: rows are written long after the last one.
    "seldom": {"replay.samples_per_insert": 0.4, "algo.target.every_updates": 2},
    "judged": JUDGED,
}


@pytest.mark.usefixtures("every_save")
def test_one_seed_gives_equal_runs_and_another_does_not(tmp_path: Path) -> None:
    one, again = trained(small(JUDGED), tmp_path), trained(small(JUDGED), tmp_path)
    assert same(again.path, one.path)
    for mine, yours in zip(checkpoints(again.path), checkpoints(one.path), strict=True):
        assert mine.name == yours.name
        assert hashes(mine) == hashes(yours)
    other = trained(small({**JUDGED, "seed": 1}), tmp_path)
    assert rows(other.path) != rows(one.path)
    ours, theirs = hashes(checkpoints(other.path)[-1]), hashes(checkpoints(one.path)[-1])
    assert all(ours[name] != theirs[name] for name in ("model.safetensors", "optim.safetensors", "state.safetensors"))


@pytest.mark.parametrize("cell", CELLS)
def test_training_on_after_the_end_equals_never_having_stopped(cell: str, tmp_path: Path) -> None:
    whole = trained(small(CELLS[cell]), tmp_path / "whole")
    for steps in (35, 117, 238):
        run = trained(until(small(CELLS[cell]), steps), tmp_path / str(steps))
        assert run.exit_code == 0
        assert same(resumed(run, steps=300).path, whole.path)


def test_many_stops_equal_none(tmp_path: Path, reference: Reference) -> None:
    run = trained(until(small(), 20), tmp_path)
    for steps in range(40, 301, 20):
        run = resumed(run, steps=steps)
    assert same(run.path, reference().path)


def test_a_stop_without_a_new_step_changes_nothing(tmp_path: Path, reference: Reference) -> None:
    run = trained(small(), tmp_path)
    assert same(resumed(run).path, reference().path)


def test_single_environments_are_driven_again(tmp_path: Path, reference: Reference) -> None:
    run = trained(small({"until.steps": 170}, "Acrobot-v1"), tmp_path)
    assert same(resumed(run, steps=300).path, reference(None, "Acrobot-v1").path)


def test_masks_and_many_short_episodes_come_back(tmp_path: Path, reference: Reference) -> None:
    run = trained(small({"until.steps": 170}, "toys/Masked-v0"), tmp_path)
    assert same(resumed(run, steps=300).path, reference(None, "toys/Masked-v0").path)


@pytest.mark.atari
def test_pong_is_driven_again(tmp_path: Path, reference: Reference) -> None:
    pytest.importorskip("ale_py")
    run = trained(small({**PONG, "until.steps": 90}, "ALE/Pong-v5"), tmp_path)
    assert same(resumed(run, steps=150).path, reference(PONG, "ALE/Pong-v5").path)


def test_saving_less_often_changes_nothing_but_the_checkpoints(tmp_path: Path, reference: Reference) -> None:
    run = trained(small({"save.every_steps": 100_000}), tmp_path)
    assert same(run.path, reference().path)


@pytest.mark.usefixtures("every_save")
@pytest.mark.parametrize("ratio", [0.4, 5, 37])
def test_updates_keep_the_ratio_at_every_checkpoint(ratio: float, tmp_path: Path) -> None:
    plan = small({"replay.samples_per_insert": ratio, "save.keep": 100, "algo.target.every_updates": 2})
    run = trained(plan, tmp_path)
    counts = []
    for checkpoint in checkpoints(run.path):
        state = json.loads((checkpoint / "state.json").read_text())["line"]
        steps = state["actor"]["steps"]
        counts.append(state["updates"])
        assert state["updates"] == state["feed"]["gate"]["updates"]
        assert counts[-1] == int(Fraction(str(ratio)) / 16 * max(0, steps - 40))
    assert len(counts) >= 6
    assert counts[-1] == run.status["updates"] > 0
