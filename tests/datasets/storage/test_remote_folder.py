"""Requests to a store that is slow, faulty or gone: a store in memory stands for it."""

import os
import random
import subprocess
import sys
import time
from typing import Any

import pytest

from qfleet.datasets.storage import RemoteFolder, remote_folder
from qfleet.errors import StorageError, UsageError


class MemoryStore:
    """What RemoteFolder uses of a file system; `fail` is called before every request."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []

    def fail(self, request: str) -> None:
        self.requests.append(request)

    def info(self, path: str) -> dict[str, Any]:
        self.fail("info")
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"type": "file", "size": len(self.objects[path])}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self.fail("cat")
        return self.objects[path][start:end]

    def find(self, path: str) -> list[str]:
        self.fail("find")
        return [name for name in self.objects if name.startswith(path)]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        self.fail("pipe")
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = value

    def invalidate_cache(self) -> None:
        self.fail("forget")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "FIRST_WAIT_SECONDS", 0.0)


def test_a_large_file_is_read_in_pieces_and_a_cut_piece_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cutting(MemoryStore):
        def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
            data = super().cat_file(path, start, end)
            return data[:-1] if len(self.requests) % 3 == 0 else data

    monkeypatch.setattr(remote_folder, "PIECE_BYTES", 1000)
    store = Cutting()
    place = RemoteFolder("s3://bucket/set", "bucket/set", lambda: store)
    data = random.Random(1).randbytes(10_500)
    store.objects["bucket/set/a"] = data
    assert place.read("a", len(data)) == data
    assert place.read_range("a", 990, 3_010) == data[990:3_010]
    assert place.read_range("a", 10_400, 99_999) == data[10_400:]
    assert place.read_range("a", 20_000, 30_000) == b""
    assert store.requests.count("cat") > 14  # 11 pieces, 3 pieces, 1 piece, and the cut ones again


def test_a_lost_answer_of_a_new_file_is_no_other_writer() -> None:
    class LosesAnswers(MemoryStore):
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
            super().pipe_file(path, value, mode)
            if self.requests.count("pipe") == 1:
                raise ConnectionResetError("connection lost")

    store = LosesAnswers()
    place = RemoteFolder("s3://bucket/set", "bucket/set", lambda: store)
    assert place.write_new("manifest.json", b"one")
    assert not place.write_new("manifest.json", b"one")
    assert not place.write_new("manifest.json", b"two")
    assert place.read("manifest.json", 10) == b"one"


def test_a_missing_package_is_no_fault_of_the_store() -> None:
    def connect() -> MemoryStore:
        raise UsageError("a package is missing")

    with pytest.raises(UsageError, match="a package is missing"):
        RemoteFolder("s3://bucket/set", "bucket/set", connect).exists("a")


def test_faults_that_last_are_not_repeated() -> None:
    class Forbidden(MemoryStore):
        def info(self, path: str) -> dict[str, Any]:
            self.fail("info")
            raise PermissionError("Permission denied: user=eve")

    store = Forbidden()
    with pytest.raises(StorageError, match="Permission denied") as caught:
        RemoteFolder("s3://bucket/set", "bucket/set", lambda: store).size("a")
    assert store.requests == ["info"]
    assert "attempt 1 of 6" in str(caught.value)


def test_many_bytes_have_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(MemoryStore):
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
            time.sleep(0.3)
            super().pipe_file(path, value, mode)

    store = Slow()
    place = RemoteFolder("s3://bucket/set", "bucket/set", lambda: store)
    monkeypatch.setattr(remote_folder, "REQUEST_SECONDS", 0.05)
    monkeypatch.setattr(remote_folder, "TOTAL_SECONDS", 0.5)
    monkeypatch.setattr(remote_folder, "SLOWEST_BYTES", 1_000)
    place.write("large", bytes(1_000))
    with pytest.raises(StorageError, match="no answer within"):
        place.write("small", bytes(10))


def test_the_end_of_the_process_does_not_wait_for_a_hanging_request() -> None:
    code = (
        "import time\n"
        "from qfleet.datasets.storage.remote_folder import in_time\n"
        "try:\n"
        "    in_time(lambda: time.sleep(60), 0.1)\n"
        "except TimeoutError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "no answer within" in done.stdout


def test_a_fork_connects_anew() -> None:
    connected: list[int] = []

    def connect() -> MemoryStore:
        connected.append(os.getpid())
        return MemoryStore()

    place = RemoteFolder("s3://bucket/set", "bucket/set", connect)
    assert not place.exists("a")
    assert not place.exists("a")
    assert connected == [os.getpid()]
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        place.exists("a")
        os.write(writer, str(len(connected)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"2"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\0", "a\nb", "a?b", "a#b", "a:b", "a\\b"]
)
def test_names_that_leave_the_folder_are_refused_before_a_request(name: str) -> None:
    store = MemoryStore()
    with pytest.raises(StorageError, match="does not stay inside"):
        RemoteFolder("s3://bucket/set", "bucket/set", lambda: store).read(name, 10)
    assert store.requests == []
