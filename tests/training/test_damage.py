"""Damaged checkpoints: the older one is used, with a word about both; the run still ends as it would have."""

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qfleet import Run, load, resume
from qfleet.cli import main
from qfleet.errors import NoCheckpointError
from qfleet.save import CheckpointWarning
from tests.support.run_fixtures import Reference
from tests.support.runs import checkpoints, events, same, small, status, train_arguments, trained, until

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("every_save")]

FILES = ["model.safetensors", "optim.safetensors", "state.json", "state.safetensors", "replay/*", "manifest.json"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


HARMS: dict[str, Callable[[Path], object]] = {"flipped": flip, "cut": cut, "missing": Path.unlink}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended early with two checkpoints; tests work on copies."""
    return trained(until(small(), 170), tmp_path_factory.mktemp("stopped")).path


def copied(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def resumed_with_warning(run: Path, **more: Any) -> Run:
    bad, good = (path.name for path in reversed(checkpoints(run)))
    with pytest.warns(CheckpointWarning, match=rf"{bad} is damaged .*going on from {good}"):
        return resume(run, steps=300, **more)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", FILES)
def test_harm_to_any_file_is_noticed_and_the_run_still_ends_the_same(
    name: str, harm: str, stopped: Path, tmp_path: Path, reference: Reference
) -> None:
    run = copied(stopped, tmp_path)
    newest = checkpoints(run)[-1]
    HARMS[harm](next(newest.glob(name)))
    if (name, harm) == ("manifest.json", "missing"):
        # Without a manifest it is not listed by `checkpoints`, yet it must be noticed.
        with pytest.warns(CheckpointWarning, match=newest.name):
            ended = resume(run, steps=300)
    else:
        ended = resumed_with_warning(run)
    assert same(ended.path, reference().path)
    (event,) = events(run, "checkpoint_corrupt")
    assert event["bad"] == newest.name
    assert event["used"] < newest.name
    assert (run / "checkpoints" / event["aside"]).is_dir()


class Seen:
    """A watcher that keeps the warnings it was shown."""

    def __init__(self) -> None:
        self.warnings: set[str] = set()

    def start(self, info: Any) -> None: ...

    def row(self, row: Any) -> None: ...

    def live(self, snapshot: Any) -> None:
        self.warnings |= set(snapshot["warnings"])

    def stop(self, status: Any) -> None: ...


def test_damage_is_shown_by_a_watcher_instead_of_a_python_warning(stopped: Path, tmp_path: Path) -> None:
    run, watcher = copied(stopped, tmp_path), Seen()
    good, bad = (path.name for path in checkpoints(run))
    flip(checkpoints(run)[-1] / "optim.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resume(run, steps=300, watcher=watcher)
    (text,) = watcher.warnings
    assert text.startswith(f"The checkpoint {bad} is damaged (optim.safetensors ")
    assert text.endswith(f"going on from {good}.")
    assert [event["text"] for event in events(run, "warning")] == [text]


def with_a_damaged_best(run: Path) -> str:
    """The best checkpoint does not hold; says what is to be told of it."""
    best = checkpoints(run)[0]
    (run / "best.json").write_text(f'{{"step": {int(best.name.removeprefix("step_"))}}}')
    flip(best / "model.safetensors")
    return f"{best.name} is damaged: model.safetensors is not what the manifest says."


@pytest.mark.parametrize("verb", ["eval", "resume"])
def test_the_command_line_reports_damage_in_one_line(
    verb: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = copied(stopped, tmp_path)
    commands = {
        "eval": ["eval", str(run), "--episodes", "1", "--which", "any"],
        "resume": ["resume", str(run), "--steps", "300"],
    }
    if verb == "resume":
        told = f"The checkpoint {checkpoints(run)[-1].name} is damaged (optim.safetensors "
        flip(checkpoints(run)[-1] / "optim.safetensors")
    else:
        told = f"{with_a_damaged_best(run)} The latest checkpoint is used instead."
    assert main(commands[verb]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in (out + err).splitlines() if "damaged" in line]
    assert line.startswith(f"warning: {told}")
    assert ".py:" not in out + err
    assert "warnings.warn" not in out + err


def test_swapped_files_are_noticed(stopped: Path, tmp_path: Path, reference: Reference) -> None:
    run = copied(stopped, tmp_path)
    older, newer = checkpoints(run)
    shutil.copy(older / "model.safetensors", newer / "model.safetensors")
    assert same(resumed_with_warning(run).path, reference().path)


def test_strict_refuses_an_older_checkpoint(stopped: Path, tmp_path: Path) -> None:
    run = copied(stopped, tmp_path)
    flip(checkpoints(run)[-1] / "model.safetensors")
    with pytest.raises(NoCheckpointError, match=r"model\.safetensors"):
        resume(run, steps=300, strict=True)
    assert status(run)["exit_code"] == 6


def test_without_a_valid_checkpoint_resume_is_an_error(stopped: Path, tmp_path: Path) -> None:
    run = copied(stopped, tmp_path)
    rows = (run / "metrics.jsonl").read_bytes()
    for checkpoint in checkpoints(run):
        flip(checkpoint / "optim.safetensors")
    with pytest.warns(CheckpointWarning), pytest.raises(NoCheckpointError, match="no usable checkpoint"):
        resume(run, steps=300)
    assert (status(run)["state"], status(run)["exit_code"]) == ("failed", 6)
    assert checkpoints(run) == []
    assert (run / "metrics.jsonl").read_bytes() == rows


def test_damage_while_it_runs_does_not_end_the_run(tmp_path: Path, reference: Reference) -> None:
    whole = reference()
    done: list[dict[str, Any]] = []

    def harm(row: dict[str, Any]) -> None:
        run = next(tmp_path.iterdir())
        if row["env_steps"] > 150 and not done:
            done.append(row)
            flip(next(checkpoints(run)[-1].glob("replay/*")))
            flip(checkpoints(run)[-1] / "model.safetensors")

    run = trained(small(), tmp_path, callbacks=[harm])
    assert done
    assert same(run.path, whole.path)


def test_a_damaged_best_checkpoint_means_the_latest_if_that_is_asked_for(stopped: Path, tmp_path: Path) -> None:
    run = copied(stopped, tmp_path)
    (best, latest), told = checkpoints(run), with_a_damaged_best(run)
    with pytest.warns(CheckpointWarning, match=re.escape(f"{told} The latest checkpoint is used instead.")):
        loaded = load(run, which="any")
    assert loaded.weights is not None
    assert (loaded.weights.which, loaded.weights.checkpoint.path) == ("latest", latest)
    assert best.is_dir()  # readers change nothing


@pytest.mark.parametrize("verb", ["eval", "record", "train"])
def test_a_damaged_best_checkpoint_is_not_replaced_silently(
    verb: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(stopped, tmp_path)
    told, folders = with_a_damaged_best(run), sorted(tmp_path.iterdir())
    commands = {
        "eval": ["eval", str(run), "--episodes", "1"],
        "record": ["record", str(run), "--episodes", "1"],
        "train": [*train_arguments(tmp_path), "--from", str(run)],
    }
    assert main(commands[verb]) == 6
    out, err = capsys.readouterr()
    assert err.startswith(f"error: the best checkpoint of run cannot be used: {told}")
    assert out == ""
    assert sorted(tmp_path.iterdir()) == folders  # no run, no video
