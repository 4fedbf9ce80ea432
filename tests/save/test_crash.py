"""A crash between any two file operations leaves the previous checkpoint usable, and never half of a new one."""

import errno
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from qfleet.errors import NoCheckpointError, StorageError
from qfleet.save.checkpoint import Checkpoint, Checkpoints
from qfleet.save.commit import Blob
from qfleet.save.files import RealFiles
from qfleet.save.verify import verify
from tests.save.disk import FaultyDisk, LossyDisk, NoLinks, PowerCut, SmallDisk

Commits = list[tuple[int, str]]  # (step, tag) of each commit that returned
SAVES = [(10, "a"), (20, "b"), (30, "c"), (30, "d"), (40, "e")]


def blobs(tag: str, previous: Checkpoint | None = None) -> Iterator[tuple[str, Blob]]:
    yield "model.safetensors", tag.encode() * 50
    yield "replay/0.zst", previous.link("replay/0.zst") if previous else b"old rows" * 30
    yield "replay/1.zst", f"rows of {tag}".encode() * 20


def save_and_prune(root: Path, files: RealFiles, commits: Commits) -> None:
    """Commit `SAVES`, one step twice, with pruning; `commits` grows with each commit that returns."""
    checkpoints = Checkpoints(root, files=files)
    last = None
    for step, tag in SAVES:
        last = checkpoints.commit(step, blobs(tag, last), {"tag": tag})
        commits.append((step, tag))
        checkpoints.prune([20])


def check(root: Path, commits: Commits, pending: tuple[int, str] | None) -> None:
    """The last commit that returned is there, or the pending one, with the right bytes and without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints = Checkpoints(root)
        assert not list(root.glob(".*")), "leftovers are cleared at start"
        if not commits and not checkpoints.steps():
            return
        newest = checkpoints.newest()
    tag = newest.meta["tag"]
    assert (newest.step, tag) in {commits[-1] if commits else None, pending}
    assert newest.read("model.safetensors") == tag.encode() * 50
    assert newest.read("replay/0.zst") == b"old rows" * 30
    assert newest.read("replay/1.zst") == f"rows of {tag}".encode() * 20
    assert all(not verify(root / f"step_{step:012d}") for step in checkpoints.steps())
    assert checkpoints.commit(50, blobs("z", newest), {"tag": "z"}).step == 50


def cut_everywhere(tmp_path: Path, disk: Callable[[Path, int | None], LossyDisk], aftermaths: int) -> int:
    """Run `save_and_prune` once per operation, cutting the power there; returns the number of operations."""
    for cut_at in itertools.count(1):
        base, commits, whole = tmp_path / f"live{cut_at}", Commits(), False
        base.mkdir()
        files = disk(base, cut_at)
        try:
            save_and_prune(base / "checkpoints", files, commits)
            whole = True
        except PowerCut:
            pass
        pending = SAVES[len(commits)] if len(commits) < len(SAVES) else None
        for seed in range(aftermaths):
            target = tmp_path / f"after{cut_at}_{seed}"
            files.after_power_cut(target, Random(seed))
            check(target / "checkpoints", commits, pending)
            shutil.rmtree(target)
        check(base / "checkpoints", commits, pending)  # a killed process, whose machine lives on
        shutil.rmtree(base)
        if whole:
            return cut_at - 1
    raise AssertionError


@pytest.fixture(autouse=True)
def no_real_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


def test_power_cut_at_every_operation(tmp_path: Path) -> None:
    assert cut_everywhere(tmp_path, LossyDisk, aftermaths=4) > 60


@pytest.mark.parametrize("skipped", ["fsync", "fsync_dir"])
def test_the_simulated_disk_notices_a_missing_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: str
) -> None:
    monkeypatch.setattr(LossyDisk, skipped, lambda self, path: None)
    with pytest.raises((AssertionError, UserWarning, NoCheckpointError)):
        cut_everywhere(tmp_path, LossyDisk, aftermaths=12)


def failure_of(commit: Callable[[], object]) -> StorageError | None:
    try:
        commit()
    except StorageError as error:
        return error
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_an_error_of_any_operation_keeps_the_previous_checkpoint(tmp_path: Path, code: int) -> None:
    failures = 0
    for fail_at in range(1, 24):
        root, events = tmp_path / f"{fail_at}", list[str]()
        first = Checkpoints(root).commit(10, blobs("a"), {"tag": "a"})
        checkpoints = Checkpoints(
            root, files=FaultyDisk(fail_at, code), log_event=lambda kind, events=events, **fields: events.append(kind)
        )
        error = failure_of(lambda: checkpoints.commit(20, blobs("b", first), {"tag": "b"}))  # noqa: B023
        if error:
            failures += 1
            assert error.exit_code == 5
            assert "step_000000000020" in error.what
            assert "step_000000000010" in error.why
            assert events == ["checkpoint_failed"]
            assert not list(root.glob(".tmp-*"))
        assert checkpoints.load(10) == first
        check(root, [(10, "a")] if error else [(20, "b")], (20, "b"))
    assert failures == 13


def test_an_error_while_replacing_a_step_keeps_one_of_the_two(tmp_path: Path) -> None:
    for fail_at in range(1, 24):
        root = tmp_path / f"{fail_at}"
        Checkpoints(root).commit(10, blobs("a"), {"tag": "a"})
        disk = FaultyDisk(fail_at, errno.EIO)
        checkpoints = Checkpoints(root, files=disk)
        if failure_of(lambda: checkpoints.commit(10, blobs("b"), {"tag": "b"})):  # noqa: B023
            assert Checkpoints(root, writer=False).newest().meta["tag"] in "ab", "at once, without a new start"
        else:
            assert Checkpoints(root, writer=False).newest().meta["tag"] == "b"
        disk.fail_at = 0
        checkpoints.commit(10, blobs("c"), {"tag": "c"})
        check(root, [(10, "c")], None)


def test_a_full_disk_is_noticed_before_and_while_saving(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, 8_000)
    checkpoints = Checkpoints(tmp_path / "c", files=disk)
    checkpoints.commit(1, [("model.safetensors", bytes(4_000))], {})
    with pytest.raises(StorageError, match=r"There are \d+ bytes free .* and \d{4} are needed"):
        checkpoints.commit(2, [("model.safetensors", bytes(4_000))], {})
    disk.blind = True
    with pytest.raises(StorageError, match="No space left on device"):
        checkpoints.commit(2, [("model.safetensors", bytes(4_000))], {})
    assert checkpoints.newest().read("model.safetensors") == bytes(4_000)
    assert [place.name for place in checkpoints.root.iterdir()] == ["step_000000000001"]


def test_the_space_for_the_first_save_can_be_required(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a" / "b", files=SmallDisk(tmp_path, 1_000))
    checkpoints.require_space(769)
    with pytest.raises(StorageError, match="1001 are needed"):
        checkpoints.require_space(770)
    assert not list(tmp_path.iterdir())


def test_a_save_with_linked_files_needs_space_for_new_files_only(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", files=SmallDisk(tmp_path, 8_000))
    last = checkpoints.commit(1, [("replay/0.zst", bytes(5_000))], {})
    checkpoints._last_bytes = 100
    for step in range(2, 5):
        last = checkpoints.commit(step, [("replay/0.zst", last.link("replay/0.zst"))], {})
    assert last.read("replay/0.zst") == bytes(5_000)


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, Blob]]:
        yield "a.bin", b"a"
        raise KeyboardInterrupt

    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.commit(1, interrupted(), {})
    assert not list(tmp_path.iterdir())


def test_without_hard_links_files_are_copied_and_checked(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, files=NoLinks())
    first = checkpoints.commit(1, [("a.bin", b"abc")], {})
    second = checkpoints.commit(2, [("a.bin", first.link("a.bin"))], {})
    assert second.read("a.bin") == b"abc"
    assert (second.path / "a.bin").stat().st_nlink == 1
    (second.path / "a.bin").write_bytes(b"abd")
    with pytest.raises(StorageError, match="has changed"):
        checkpoints.commit(3, [("a.bin", second.link("a.bin"))], {})
    assert checkpoints.steps() == [1, 2]
