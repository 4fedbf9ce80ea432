"""Committing, finding, restoring and pruning checkpoints."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qfleet.errors import NoCheckpointError, StorageError
from qfleet.save.checkpoint import Checkpoint, Checkpoints, CheckpointWarning
from qfleet.save.commit import Blob
from qfleet.save.damage import Damaged
from qfleet.save.files import RealFiles


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.commit(step, [("state.json", f"{step}".encode())], {"step": step})


def test_a_committed_checkpoint_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    committed = checkpoints.commit(
        7, [("b.bin", memoryview(b"bb")), ("replay/a.bin", bytearray(b"a")), ("empty", b"")], {"x": 1}
    )
    found = Checkpoints(checkpoints.root).newest()
    assert found == committed
    assert (found.step, found.meta, found.path.name) == (7, {"x": 1}, "step_000000000007")
    assert {name: found.read(name) for name in found.files} == {"b.bin": b"bb", "replay/a.bin": b"a", "empty": b""}
    manifest = json.loads((found.path / "manifest.json").read_bytes())
    assert manifest["format"] == 1
    assert manifest["files"]["b.bin"] == {"bytes": 2, "sha256": hashlib.sha256(b"bb").hexdigest()}


def test_checkpoints_are_sorted_by_step_not_by_time(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1000, 9, 70)
    os.utime(tmp_path / "step_000000000009", (2**33, 2**33))
    assert checkpoints.steps() == [9, 70, 1000]
    assert checkpoints.newest().step == 1000


def test_blobs_are_taken_one_at_a_time(tmp_path: Path) -> None:
    on_disk: list[int] = []

    def lazily() -> Iterator[tuple[str, Blob]]:
        for index in range(3):
            on_disk.append(len(list(tmp_path.glob(".tmp-*/*.bin"))))
            yield f"{index}.bin", b"x"

    Checkpoints(tmp_path).commit(1, lazily(), {})
    assert on_disk == [0, 1, 2]


def test_a_linked_file_is_shared_and_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.commit(1, [("replay/0.zst", b"rows")], {})
    hashed: list[int] = []
    real = hashlib.sha256
    monkeypatch.setattr("qfleet.save.commit.hashlib.sha256", lambda data: hashed.append(len(data)) or real(data))
    second = checkpoints.commit(2, [("replay/0.zst", first.link("replay/0.zst")), ("new", b"seven!!")], {})
    assert 4 not in hashed
    assert 7 in hashed
    assert os.path.samefile(first.path / "replay/0.zst", second.path / "replay/0.zst")
    save(checkpoints, 3, 4)
    checkpoints.prune()
    assert not first.path.exists()
    assert checkpoints.steps() == [3, 4]


def test_a_link_to_a_file_that_changed_its_size_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.commit(1, [("a", b"abc")], {})
    os.truncate(first.path / "a", 2)
    with pytest.raises(StorageError, match="has changed"):
        checkpoints.commit(2, [("a", first.link("a"))], {})
    assert checkpoints.steps() == [1]


def test_pruning_hashes_only_what_it_has_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Checkpoints(tmp_path), 1, 2)
    checkpoints, hashed, real = Checkpoints(tmp_path), list[str](), hashlib.file_digest
    checkpoints.newest()
    monkeypatch.setattr("hashlib.file_digest", lambda file, kind: hashed.append(kind) or real(file, kind))
    save(checkpoints, 3)
    for _ in range(2):
        checkpoints.prune([1])
        assert len(hashed) == 1, "step 1 alone, and once"


def test_restoring_hashes_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpoints(tmp_path).commit(1, [("read", b"r" * 100), ("unread", b"u" * 1000)], {})
    hashed: list[int] = []
    real, real_file = hashlib.sha256, hashlib.file_digest
    monkeypatch.setattr("hashlib.sha256", lambda data: hashed.append(len(data)) or real(data))
    monkeypatch.setattr(
        "hashlib.file_digest",
        lambda file, kind: hashed.append(os.fstat(file.fileno()).st_size) or real_file(file, kind),
    )
    assert Checkpoints(tmp_path).restore(lambda checkpoint: checkpoint.read("read")) == b"r" * 100
    assert (hashed.count(100), hashed.count(1000)) == (1, 1)
    hashed.clear()
    Checkpoints(tmp_path).restore(lambda checkpoint: checkpoint.read("read"), whole=False)
    assert (hashed.count(100), hashed.count(1000)) == (1, 0)


def test_damage_found_while_loading_falls_back_to_the_older_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, 2)

    def load(checkpoint: Checkpoint) -> int:
        if checkpoint.step == 2:
            raise Damaged("state.json", "it does not fit")
        return checkpoint.step

    with pytest.warns(CheckpointWarning, match="it does not fit"):
        assert checkpoints.restore(load) == 1
    assert checkpoints.steps() == [1]


def test_reading_checks_the_hash_again(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path).commit(1, [("a", b"abc")], {})
    (found.path / "a").write_bytes(b"abd")
    with pytest.raises(Damaged, match="a is not what the manifest says"):
        found.read("a")
    with pytest.raises(Damaged, match="it has no file b"):
        found.read("b")


def test_the_same_step_again_replaces_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.commit(1, [("a", b"abc"), ("gone", b"")], {"state": "running"})
    checkpoints.commit(1, [("a", first.link("a")), ("b", b"new")], {"state": "done"})
    found = Checkpoints(tmp_path).newest()
    assert found.meta == {"state": "done"}
    assert {name: found.read(name) for name in found.files} == {"a": b"abc", "b": b"new"}
    assert [place.name for place in tmp_path.iterdir()] == ["step_000000000001"]


class OneUnmovable(RealFiles):
    """A disk on which one folder cannot be renamed."""

    def rename(self, source: Path, path: Path) -> None:
        if source.name == "step_000000000001":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        super().rename(source, path)


def test_a_checkpoint_that_cannot_be_deleted_does_not_stop_the_pruning(tmp_path: Path) -> None:
    events: list[Any] = []
    checkpoints = Checkpoints(
        tmp_path, files=OneUnmovable(), log_event=lambda kind, **fields: events.append((kind, fields))
    )
    save(checkpoints, 1, 2, 3, 4, 5)
    with pytest.raises(StorageError, match="could not be deleted: Operation not permitted"):
        checkpoints.prune()
    assert checkpoints.steps() == [1, 4, 5]
    assert events[-1] == ("checkpoint_pruned", {"steps": [2, 3]})


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    events: list[Any] = []
    checkpoints = Checkpoints(tmp_path, keep=2, log_event=lambda kind, **fields: events.append((kind, fields)))
    save(checkpoints, 1, 2, 3, 4, 5)
    assert checkpoints.prune([2]) == [1, 3]
    assert checkpoints.steps() == [2, 4, 5]
    assert events[-1] == ("checkpoint_pruned", {"steps": [1, 3]})
    assert checkpoints.prune([5]) == [2]
    assert checkpoints.prune() == []
    assert sorted(place.name for place in tmp_path.iterdir()) == ["step_000000000004", "step_000000000005"]


def test_pruning_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 1, 2, 3, 4)
    (tmp_path / "step_000000000004" / "state.json").write_bytes(b"5")
    with pytest.warns(CheckpointWarning, match="step_000000000004"):
        Checkpoints(tmp_path, keep=2).prune()
    assert Checkpoints(tmp_path).steps() == [2, 3]


def test_leftovers_of_dead_writers_are_removed_by_writers_only(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 1)
    (tmp_path / ".tmp-dead" / "replay").mkdir(parents=True)
    (tmp_path / "step_000000000001").rename(tmp_path / ".old-step_000000000001")
    assert Checkpoints(tmp_path, writer=False).steps() == []
    assert (tmp_path / ".tmp-dead").exists()
    assert Checkpoints(tmp_path).newest().step == 1
    assert [place.name for place in tmp_path.iterdir()] == ["step_000000000001"]


def test_a_missing_step_is_not_damage(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(NoCheckpointError, match="Nothing was saved"):
        checkpoints.newest()
    save(checkpoints, 5)
    with pytest.raises(NoCheckpointError, match=r"no checkpoint .*step_000000000006(.|\n)*\[5\]") as caught:
        checkpoints.load(6)
    assert not isinstance(caught.value, Damaged)


@pytest.mark.parametrize(
    "name", ["", "/a", "../a", "a/../b", "a//b", "a/", ".hidden", "manifest.json", "a b", "ä", "a\n"]
)
def test_names_that_could_leave_the_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a file name"):
        Checkpoints(tmp_path).commit(1, [(name, b"x")], {})
    assert not list(tmp_path.iterdir())


def test_invalid_commits_leave_nothing_behind(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="twice"):
        checkpoints.commit(1, [("a", b"x"), ("a", b"y")], {})
    with pytest.raises(ValueError, match="JSON"):
        checkpoints.commit(1, [("a", b"x")], {"loss": float("nan")})
    with pytest.raises(ValueError, match="12 digits"):
        checkpoints.commit(10**12, [("a", b"x")], {})
    with pytest.raises(ValueError, match="at least 2"):
        Checkpoints(tmp_path, keep=1)
    assert not list(tmp_path.iterdir())
