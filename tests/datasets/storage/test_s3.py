"""Data sets in S3: moto's server on this machine, with faults between it and its reader."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.prepare import PreparePlan, prepare_dataset
from qfleet.datasets.storage import RemoteFolder, open_place, remote_folder, s3
from qfleet.errors import StorageError, UsageError
from tests.support.recorded import make_dataset

pytestmark = pytest.mark.slow  # the server takes some seconds to start
SECRET = "very-secret-access-key"  # noqa: S105
real_connect = s3.connect


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bucket(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    host, port = server.get_host_and_port()
    settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "tester"}
    settings |= {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    settings |= {"QFLEET_CACHE": str(tmp_path / "cache")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_folder, "FIRST_WAIT_SECONDS", 0.001)
    name = f"bucket-{random.randrange(10**9)}"
    real_connect().mkdir(name)
    return name


class FaultyStore:
    """A store that fails in a seeded share of its requests: before it acts, after it has acted, or with a cut body."""

    def __init__(self, store: Any, share: float) -> None:
        self.store = store
        self.share = share
        self.random = random.Random(1)
        self.num_faults = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            fault = self.random.choice(["503", "time-out", "lost answer", "cut"])
            if self.random.random() > self.share:
                return getattr(self.store, name)(*args, **options)
            self.num_faults += 1
            if fault == "503":
                raise OSError(5, "503 Slow Down")
            if fault == "time-out":
                raise TimeoutError("no answer")
            found = getattr(self.store, name)(*args, **options)
            if fault == "cut" and isinstance(found, bytes):
                return found[: len(found) // 2]
            raise ConnectionResetError("connection lost")

        return call


def test_a_place_in_s3_is_like_a_folder(bucket: str) -> None:
    place = open_place(f"s3://{bucket}/deep/set")
    assert place.names() == []
    place.write("data/a.parquet", b"0123456789")
    place.write("data/a.parquet", b"abcdefghij")
    assert place.names() == ["data/a.parquet"]
    assert place.read("data/a.parquet", 10) == b"abcdefghij"
    assert place.read_range("data/a.parquet", 2, 5) == b"cde"
    assert (place.size("data/a.parquet"), place.exists("data/a.parquet"), place.exists("b")) == (10, True, False)
    assert place.write_new("manifest.json", b"one")
    assert not place.write_new("manifest.json", b"two")
    assert place.read("manifest.json", 10) == b"one"
    for name in ("../x", "/x", "a/../../x", "missing"):
        with pytest.raises(StorageError):
            place.read(name, 10)
    with pytest.raises(StorageError, match="9 are the most"):
        place.read("data/a.parquet", 9)


def test_under_faults_no_byte_is_lost_and_the_version_is_the_same(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_dataset(tmp_path / "raw", [5] * 40, file_bytes=400)
    version = prepare_dataset(local, str(tmp_path / "ready"), PreparePlan(file_bytes=400))
    store = FaultyStore(real_connect(), 0.2)
    monkeypatch.setattr(s3, "connect", lambda: store)
    monkeypatch.setattr(remote_folder, "ATTEMPTS", 12)
    url = f"s3://{bucket}/ready"
    assert prepare_dataset(local, url, PreparePlan(file_bytes=400)) == version
    dataset = open_dataset(url)
    assert validate_dataset(dataset) == []
    assert open_dataset(url).version == version
    assert store.num_faults > 20
    assert SECRET not in repr(vars(dataset.place))
    assert SECRET not in dataset.place.url


def test_a_writer_that_stops_leaves_no_data_set(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = make_dataset(tmp_path / "raw", [5] * 20)
    url = f"s3://{bucket}/half"

    def fail(self: RemoteFolder, name: str, data: bytes) -> bool:
        raise StorageError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "write_new", fail)
        with pytest.raises(StorageError, match="gone"):
            prepare_dataset(local, url, PreparePlan())
    with pytest.raises(StorageError, match="there is no data set"):
        open_dataset(url)
    prepare_dataset(local, url, PreparePlan())
    assert validate_dataset(open_dataset(url)) == []


def test_a_second_read_comes_from_the_cache_and_a_damaged_copy_does_not(bucket: str, tmp_path: Path) -> None:
    prepare_dataset(make_dataset(tmp_path / "raw", [5] * 20), f"s3://{bucket}/set", PreparePlan())
    dataset = open_dataset(f"s3://{bucket}/set")
    file = dataset.files()[0]
    data = dataset.read(file)
    real_connect().rm(f"{bucket}/set/{file.name}")
    assert dataset.read(file) == data
    (tmp_path / "cache" / file.sha256).write_bytes(data[:-1] + b"x")
    with pytest.raises(StorageError, match="cannot be read"):
        dataset.read(file)


def test_a_store_that_is_gone_is_an_error_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "tester", "SECRET_ACCESS_KEY": SECRET, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(remote_folder, "TOTAL_SECONDS", 3.0)
    begin = time.monotonic()
    with pytest.raises(StorageError, match=r"s3://bucket/set/manifest.json cannot be read") as caught:
        open_dataset("s3://bucket/set")
    assert time.monotonic() - begin < 30
    assert caught.value.exit_code == 5
    assert SECRET not in str(caught.value)


def test_a_store_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def info(self, path: str) -> dict[str, Any]:
            time.sleep(1.0)
            return {}

    monkeypatch.setattr(remote_folder, "TOTAL_SECONDS", 0.3)
    monkeypatch.setattr(remote_folder, "REQUEST_SECONDS", 0.1)
    with pytest.raises(StorageError, match="cannot be read"):
        RemoteFolder("s3://bucket/set", "bucket/set", Silent).size("a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket", "s3://user:word@bucket/set", "s3://bucket/../x", "s3://bucket/a?b"]
)
def test_other_addresses_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(UsageError, match="no address of a folder in S3") as caught:
        open_place(url)
    assert "word" not in caught.value.what
