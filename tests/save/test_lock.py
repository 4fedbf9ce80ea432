"""One writer per run."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from qfleet.errors import StorageError
from qfleet.files import open_inside
from qfleet.save.lock import hold_run

HOLD = """
import sys, time
from pathlib import Path
from qfleet.save.lock import hold_run
with hold_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(run: Path) -> "subprocess.Popen[str]":
    """Another process that holds the run."""
    here = os.pathsep.join(sys.path)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": here}
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_second_writer_learns_who_the_first_is(tmp_path: Path) -> None:
    child = holder(tmp_path)
    try:
        with pytest.raises(StorageError, match=rf"written by process {child.pid} on \S+ since 20\d\d-") as caught:
            hold_run(tmp_path).__enter__()
        assert caught.value.exit_code == 5
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    assert (tmp_path / "run.lock").exists(), "what a killed process leaves"
    with hold_run(tmp_path):
        pass


def test_the_lock_file_is_private_and_removed_afterwards(tmp_path: Path) -> None:
    with hold_run(tmp_path):
        lock = tmp_path / "run.lock"
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        with pytest.raises(StorageError, match=f"process {os.getpid()} "), hold_run(tmp_path):
            pass
        assert lock.exists(), "a refused writer takes nothing away"
    assert not list(tmp_path.iterdir())
    with hold_run(tmp_path):
        pass


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"pid":1}', b'{"pid":99999999,"host":"x","since":"y"}', b"\xff" * 9000]
)
def test_stale_content_is_overwritten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.lock").write_bytes(content)
    with hold_run(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_bytes())["pid"] == os.getpid()


def test_a_lock_file_removed_while_waiting_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def open_then_lose_it(folder: Path, name: str, *arguments: int) -> int:
        file = open_inside(folder, name, *arguments)
        if not opened:
            (folder / name).unlink()
        opened.append(file)
        return file

    monkeypatch.setattr("qfleet.save.lock.open_inside", open_then_lose_it)
    with hold_run(tmp_path):
        assert os.path.samestat(os.fstat(opened[-1]), (tmp_path / "run.lock").stat())
    assert len(opened) == 2


def test_a_lock_released_while_it_is_opened_is_acquired_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [0]
    real = os.fstat

    def released(file: int) -> os.stat_result:
        looks[0] += 1
        if looks[0] == 1:
            (tmp_path / "run.lock").unlink()
        return real(file)

    monkeypatch.setattr("qfleet.files.os.fstat", released)
    with hold_run(tmp_path):
        assert (tmp_path / "run.lock").exists()
    assert looks[0] > 1


def test_links_and_missing_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "run.lock").symlink_to(tmp_path / "victim")
    for run in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StorageError, match="cannot be taken"), hold_run(run):
            pass
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_the_lock_is_released_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold_run(tmp_path):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
