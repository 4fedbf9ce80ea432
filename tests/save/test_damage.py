"""Any change of a checkpoint is noticed, and the older one is used with a warning that names both."""

import hashlib
import json
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.errors import NoCheckpointError, StorageError
from qfleet.save.checkpoint import Checkpoint, Checkpoints, CheckpointWarning
from qfleet.save.damage import Damaged, NewerFormat
from qfleet.save.segments import compress, decompress
from qfleet.save.state import pack_state, pack_tensors, unpack_state, unpack_tensors
from qfleet.save.verify import verify, verify_run

META = {"versions": {"qfleet": "0.1.0", "python": "3.11.7"}, "plan": "ab" * 8, "score": 1.5, "words": ["ä", None, True]}


def blobs(seed: int, rows: int = 60) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    weights = {"q.weight": rng.random((8, rows), np.float32), "q.bias": rng.random(8, np.float32)}
    state = {"steps": seed, "rng": np.random.Philox(seed).state, "lanes": [{"seed": 2**63 + seed}]}
    replay = {f"replay/{part}.zst": compress(rng.integers(0, 9, 20 * rows, np.uint8).tobytes()) for part in range(2)}
    return {"model.safetensors": pack_tensors(weights), **pack_state(state), **replay}


def load_all(checkpoint: Checkpoint) -> dict[str, Any]:
    state = {name: checkpoint.read(name) for name in ("state.json", "state.safetensors")}
    segments = [name for name in checkpoint.files if name.startswith("replay/")]
    return {
        "state": unpack_state(state),
        "model": unpack_tensors(checkpoint.read("model.safetensors")),
        "replay": [decompress(checkpoint.read(name), 10_000) for name in segments],
    }


@pytest.fixture
def run(tmp_path: Path) -> Checkpoints:
    """Two steps, 10 and 20, of which 20 is the newest."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20):
        checkpoints.commit(step, blobs(step).items(), META)
    return checkpoints


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_every_single_byte_counts(run: Checkpoints) -> None:
    path = run.load(20).path
    total = 0
    for file in files_of(path):
        number = os.open(file, os.O_RDWR)
        for index, byte in enumerate(file.read_bytes()):
            for bent in (byte ^ 0xFF, byte ^ 0x01):
                os.pwrite(number, bytes([bent]), index)
                assert verify(path), f"byte {index} of {file.name} changed from {byte} to {bent}"
            os.pwrite(number, bytes([byte]), index)
            total += 1
        os.close(number)
    assert verify(path) == []
    assert 4_000 < total < 64_000


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_link(path: Path) -> None:
    path.rename(path.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent / "elsewhere")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARM: dict[str, Callable[[Path], Any]] = {
    "flip": flip,
    "delete": Path.unlink,
    "truncate": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "extend": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "link": replace_by_link,
    "pipe": replace_by_pipe,
    "folder": replace_by_folder,
    "swap": lambda path: shutil.copy(str(path).replace("0020", "0010"), path),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("name", [*blobs(0), "manifest.json"])
def test_damage_to_any_file_falls_back_to_the_older_checkpoint_with_a_warning(
    run: Checkpoints, name: str, harm: str
) -> None:
    events: list[dict[str, Any]] = []
    HARM[harm](run.root / "step_000000000020" / name)
    before = sorted(run.root.iterdir())
    reader = Checkpoints(run.root, writer=False)
    with pytest.raises(NoCheckpointError, match="step_000000000020"):
        reader.newest(strict=True)
    with pytest.warns(CheckpointWarning):
        assert reader.newest().step == 10
    assert sorted(run.root.iterdir()) == before, "readers change nothing"

    again = Checkpoints(run.root, log_event=lambda kind, **fields: events.append({"kind": kind, **fields}))
    with pytest.warns(
        CheckpointWarning, match=r"step_0+20 is damaged \(.*\), kept as step_0+20.corrupt; .* step_0+10\."
    ):
        state = again.restore(load_all)["state"]
    assert state["steps"] == 10
    assert [(e["kind"], e["bad"], e["aside"], e["used"]) for e in events] == [
        ("checkpoint_corrupt", "step_000000000020", "step_000000000020.corrupt", "step_000000000010")
    ]
    assert again.steps() == [10]
    assert (run.root / "step_000000000020.corrupt").is_dir()


def test_damage_is_reported_to_the_given_warn_function(run: Checkpoints) -> None:
    warned: list[str] = []
    flip(run.root / "step_000000000020" / "state.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Checkpoints(run.root, warn=warned.append).newest().step == 10
    (text,) = warned
    assert text.startswith("The checkpoint step_000000000020 is damaged (state.json ")
    assert text.endswith("kept as step_000000000020.corrupt; going on from step_000000000010.")


def test_added_files_and_folders_are_noticed(run: Checkpoints) -> None:
    path = run.load(20).path
    for name in ("extra.py", "replay/2.zst", ".hidden"):
        (path / name).write_bytes(b"")
        assert verify(path) == [f"{name} is not in the manifest"]
        (path / name).unlink()
    (path / "deep").mkdir()
    assert verify(path) == ["deep is not in the manifest"]
    with pytest.warns(CheckpointWarning, match="deep is not in the manifest"):
        assert run.newest().step == 10


@pytest.mark.parametrize("harm", ["link", "pipe", "folder"])
def test_only_regular_files_are_accepted(run: Checkpoints, harm: str) -> None:
    HARM[harm](run.root / "step_000000000020" / "state.json")
    assert verify(run.root / "step_000000000020") == ["state.json is not a plain file"]


def test_a_checkpoint_under_another_name_is_noticed(run: Checkpoints) -> None:
    shutil.copytree(run.root / "step_000000000010", run.root / "step_000000000030")
    assert verify(run.root / "step_000000000030") == ["manifest.json is that of step 10"]
    with pytest.warns(CheckpointWarning):
        assert run.newest().step == 20


def test_without_a_whole_checkpoint_nothing_starts_from_scratch(run: Checkpoints) -> None:
    for step in (10, 20):
        flip(run.root / f"step_{step:012d}" / "state.json")
    with pytest.warns(CheckpointWarning), pytest.raises(NoCheckpointError) as caught:
        run.newest()
    assert caught.value.exit_code == 6
    assert "step_000000000010: state.json" in caught.value.why
    assert "step_000000000020: state.json" in caught.value.why
    with pytest.raises(NoCheckpointError, match="Nothing was saved"):
        run.newest()


def test_damaged_checkpoints_are_renamed_to_the_next_free_name(run: Checkpoints) -> None:
    for _ in range(3):
        flip(run.root / "step_000000000020" / "state.json")
        with pytest.warns(CheckpointWarning):
            assert run.newest().step == 10
        run.commit(20, blobs(20).items(), META)
    names = sorted(place.name for place in run.root.glob("*.corrupt*"))
    assert names == [f"step_000000000020.corrupt{suffix}" for suffix in ("", ".1", ".2")]


def test_no_permission_is_not_damage(run: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("qfleet.save.verify.os.open", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        run.newest()
    monkeypatch.undo()
    assert run.newest().step == 20


def resealed(path: Path, **changes: Any) -> None:
    """Rewrite a manifest with a valid hash, as an attacker or another version would."""
    body = json.loads(path.read_bytes()) | changes
    del body["sha256"]

    def canonical(tree: dict[str, Any]) -> bytes:
        return json.dumps(tree, indent=1, sort_keys=True).encode() + b"\n"

    path.write_bytes(canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()}))


def test_a_newer_format_is_refused_with_the_version_to_install(run: Checkpoints) -> None:
    manifest = run.root / "step_000000000020" / "manifest.json"
    resealed(manifest, format=2, meta={"versions": {"qfleet": "9.1.0"}}, files="in another way")
    for strict in (False, True):
        with pytest.raises(NewerFormat, match=r"written by a newer qfleet(.|\n)*Install version 9\.1\.0"):
            run.newest(strict=strict)
    assert "newer qfleet" in verify(manifest.parent)[0]
    run.prune()
    assert run.steps() == [10, 20], "neither set aside nor deleted"
    flip(manifest)
    with pytest.warns(CheckpointWarning):
        assert run.newest().step == 10


@pytest.mark.parametrize("name", ["/etc/hostname", "../step_000000000010/state.json", "a//b", "a\n", "manifest.json"])
def test_a_manifest_cannot_name_files_elsewhere(run: Checkpoints, name: str) -> None:
    resealed(run.root / "step_000000000020" / "manifest.json", files={name: {"bytes": 1, "sha256": "0" * 64}})
    with pytest.raises(Damaged, match="is not allowed"):
        run.load(20)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 0},
        {"format": True},
        {"format": "1"},
        {"step": 20.0},
        {"files": []},
        {"meta": None},
        {"files": {"state.json": {"bytes": -1, "sha256": "0" * 64}}},
        {"files": {"state.json": {"bytes": 1, "sha256": "0"}}},
        {"files": {"state.json": 7}},
    ],
)
def test_a_forged_manifest_is_damage(run: Checkpoints, changes: dict[str, Any]) -> None:
    resealed(run.root / "step_000000000020" / "manifest.json", **changes)
    with pytest.raises(Damaged):
        run.load(20)


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"sha256":1}', b"\xff", b'{"a":NaN}'])
def test_other_bytes_in_place_of_a_manifest_are_damage(run: Checkpoints, raw: bytes) -> None:
    (run.root / "step_000000000020" / "manifest.json").write_bytes(raw)
    with pytest.raises(Damaged):
        run.load(20)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /dev/null",)


SEEN: list[str] = []
WATCHING: list[bool] = []
RUNS_CODE = ("exec", "import", "compile", "subprocess", "os.system", "os.exec", "os.posix_spawn", "pickle", "marshal")


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHING and event.startswith(RUNS_CODE):
        SEEN.append(event)


def test_a_pickle_in_place_of_any_file_runs_nothing(run: Checkpoints) -> None:
    path, payload = run.load(20).path, pickle.dumps(Evil())
    run.restore(load_all)
    outcomes = []
    sys.addaudithook(watch)
    for name in [*run.load(20).files, "manifest.json"]:
        kept = (path / name).read_bytes()
        manifest = (path / "manifest.json").read_bytes()
        for forged in (False, True):
            (path / name).write_bytes(payload)
            if forged and name != "manifest.json":
                files = json.loads(manifest)["files"]
                files[name] = {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
                resealed(path / "manifest.json", files=files)
            WATCHING.append(True)
            try:
                load_all(run.load(20))
                outcomes.append("loaded")
            except NoCheckpointError:
                outcomes.append("refused")
            finally:
                WATCHING.clear()
            (path / "manifest.json").write_bytes(manifest)
            (path / name).write_bytes(kept)
    assert set(outcomes) == {"refused"}
    assert SEEN == []
    WATCHING.append(True)
    pickle.loads(payload)  # noqa: S301
    WATCHING.clear()
    assert "os.system" in SEEN, "the hook does see what it must"


def test_verify_run_checks_every_checkpoint_and_changes_nothing(run: Checkpoints) -> None:
    flip(run.root / "step_000000000010" / "state.json")
    (run.root / ".tmp-x").mkdir()
    before = sorted(run.root.rglob("*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for place in (run.root.parent, run.root):
            bad, good = verify_run(place)
            assert bad == ("step_000000000010", False, "state.json does not have the hash the manifest gives")
            assert good[:2] == ("step_000000000020", True)
            assert good.detail.startswith("5 files, ")
    assert [verdict.ok for verdict in verify_run(run.root / "step_000000000020")] == [True]
    assert sorted(run.root.rglob("*")) == before
    with pytest.raises(NoCheckpointError, match="There is no checkpoint"):
        verify_run(run.root / ".tmp-x")
