"""Checkpoints whose hashes are right and whose contents are not: exit code 6 with what is malformed, never a bug."""

import hashlib
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qfleet import resume
from qfleet.cli import main
from qfleet.errors import NoCheckpointError
from qfleet.save.manifest import _with_hash
from qfleet.training.log.run_log import RunLog
from tests.support.runs import JUDGED, checkpoints, small, status, trained, until

STRANGE: tuple[Any, ...] = (
    None,
    "x",
    "",
    -1,
    -(10**30),
    10**30,
    1e308,
    0.5,
    True,
    [],
    {},
    [[]],
    {"x": 1},
    ["x"],
    10**400,
)
ODD_SHAPES = ((), (0,), (1,), (2, 3), (1, 1, 1))
ODD_TYPES = ("bool", "uint8", "int16", "int64", "float16", "float64")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint; tests work on copies."""
    run = trained(until(small(JUDGED), 170), tmp_path_factory.mktemp("stopped")).path
    for old in checkpoints(run)[:-1]:
        shutil.rmtree(old)
    return run


def copied(stopped: Path, tmp_path: Path, number: int = 0) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / f"run{number}"))


def reseal(checkpoint: Path, meta: dict[str, Any] | None = None) -> None:
    """A manifest with the hashes that the files have now."""
    path = checkpoint / "manifest.json"
    body = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    for name in body["files"]:
        data = (checkpoint / name).read_bytes()
        body["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_bytes(_with_hash(body if meta is None else {**body, "meta": meta}))


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree but its root."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in ((*at, key), *places(value, (*at, key)))]


def change(tree: Any, place: tuple[Any, ...], value: Any) -> None:
    """Put a value there; `...` takes what is there away."""
    for key in place[:-1]:
        tree = tree[key]
    if value is ...:
        del tree[place[-1]]
    else:
        tree[place[-1]] = value


def change_json(path: Path, rng: random.Random) -> str:
    """One value of a JSON file becomes a strange one."""
    tree = json.loads(path.read_text())
    place, value = rng.choice(places(tree)), rng.choice((*STRANGE, ...))
    change(tree, place, value)
    path.write_text(json.dumps(tree))
    return f"{path.name} {place} = {value!r}"


def change_meta(checkpoint: Path, rng: random.Random) -> str:
    """One value of what a checkpoint says of itself becomes a strange one."""
    meta = json.loads((checkpoint / "manifest.json").read_text())["meta"]
    place, value = rng.choice(places(meta)), rng.choice((*STRANGE, ...))
    change(meta, place, value)
    reseal(checkpoint, meta)
    return f"meta {place} = {value!r}"


def change_tensors(path: Path, rng: random.Random) -> str:
    """One array of a file gets another shape, another type, or numbers that make no sense."""
    arrays = load_file(path)
    name = rng.choice(sorted(arrays))
    how = rng.choice(("shape", "type", "gone", "huge", "negative", "more"))
    array = arrays[name]
    if how == "shape":
        arrays[name] = np.zeros(rng.choice(ODD_SHAPES), array.dtype)
    elif how == "type":
        arrays[name] = array.astype(rng.choice(ODD_TYPES))
    elif how == "gone":
        del arrays[name]
    elif how == "more":
        arrays["more"] = array
    elif array.dtype.kind == "f":
        arrays[name] = np.full_like(array, np.inf if how == "huge" else np.nan)
    else:
        limits = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
        value = 1 if limits is None else limits.max if how == "huge" else limits.min
        arrays[name] = np.full_like(array, value)
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, path)
    return f"{path.name} {name} {how}"


def mutate(checkpoint: Path, rng: random.Random) -> str:
    """One change, under a seal that fits."""
    files = ("model.safetensors", "optim.safetensors", "state.safetensors")
    if (draw := rng.random()) < 0.2:
        return change_meta(checkpoint, rng)
    path = checkpoint / ("state.json" if draw < 0.7 else rng.choice(files))
    what = change_json(path, rng) if path.name == "state.json" else change_tensors(path, rng)
    reseal(checkpoint)
    return what


def try_changes(stopped: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], seeds: range) -> dict[int, int]:
    """How often each exit code came; a bug in qfleet is one too many."""
    codes: dict[int, int] = {}
    for seed in seeds:
        run = copied(stopped, tmp_path, seed)
        what = mutate(checkpoints(run)[-1], random.Random(seed))
        code = main(["resume", str(run), "--steps", "180", "--quiet"])
        said = capfd.readouterr().err
        assert code in (0, 2, 4, 6), f"seed {seed}: {what}: exit code {code}: {said}"
        assert "bug in qfleet" not in said
        codes[code] = codes.get(code, 0) + 1
        shutil.rmtree(run)
    return codes


def test_changed_state_with_valid_hashes_is_never_reported_as_a_bug(
    stopped: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = try_changes(stopped, tmp_path, capfd, range(12))
    assert codes.get(6, 0) > 3


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("line", "updates"), "many", "updates: expected an integer"),
        (("line", "feed", "gate", "updates"), 0.5, "updates: expected an integer"),
        (("book", "best"), {"mean": 1.0}, "env_steps is missing"),
        (("book", "episodes"), -1, "episodes: expected an integer"),
        (("book", "recent"), "x", "Expected `array`"),
    ],
)
def test_the_malformed_value_is_named(
    place: tuple[str, ...], value: Any, named: str, stopped: Path, tmp_path: Path
) -> None:
    run = copied(stopped, tmp_path)
    newest = checkpoints(run)[-1]
    tree = json.loads((newest / "state.json").read_text())
    change(tree, place, value)
    (newest / "state.json").write_text(json.dumps(tree))
    reseal(newest)
    with pytest.raises(NoCheckpointError, match=re.escape(named)) as caught:
        resume(run, steps=180)
    assert caught.value.what.startswith(f"{newest.name} is malformed: ")
    assert checkpoints(run) == [newest]  # its hashes are right, so it stays in place


def test_weights_that_are_not_finite_or_too_short_are_malformed(stopped: Path, tmp_path: Path) -> None:
    for number, change_one in enumerate((lambda array: array * np.nan, lambda array: array[:1])):
        run = copied(stopped, tmp_path, number)
        newest = checkpoints(run)[-1]
        arrays = load_file(newest / "optim.safetensors")
        name = next(name for name in arrays if name.startswith("exp_avg."))
        save_file({**arrays, name: change_one(arrays[name])}, newest / "optim.safetensors")
        reseal(newest)
        with pytest.raises(NoCheckpointError, match=re.escape(name)):
            resume(run, steps=180)


def test_a_log_that_cannot_be_opened_does_not_hide_the_error(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(stopped, tmp_path)

    def refused(file: Path) -> int:
        raise PermissionError("the second error")

    monkeypatch.setattr("qfleet.training.log.error_log.open_log", refused)

    def failing(row: dict[str, Any]) -> None:
        raise ZeroDivisionError("the first error")

    with pytest.raises(ZeroDivisionError, match="the first error"):
        resume(run, steps=400, callbacks=[failing])
    assert status(run)["reason"] == "ZeroDivisionError: the first error"


def test_a_status_that_cannot_be_written_does_not_hide_the_error(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(row: dict[str, Any]) -> None:
        def refused(*args: Any, **how: Any) -> None:
            raise OSError("the second error")

        monkeypatch.setattr(RunLog, "write_failure", refused)
        raise ZeroDivisionError("the first error")

    with pytest.raises(ZeroDivisionError, match="the first error") as caught:
        resume(copied(stopped, tmp_path), steps=400, callbacks=[failing])
    assert caught.value.__notes__ == ["The status could not be written either: OSError: the second error"]


@pytest.mark.slow
def test_many_changes_with_valid_hashes_are_never_reported_as_a_bug(
    stopped: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = try_changes(stopped, tmp_path, capfd, range(1000, 1200))
    assert codes.get(6, 0) > 100
