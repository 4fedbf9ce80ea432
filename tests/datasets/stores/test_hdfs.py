"""Data sets in a real HDFS: a namenode and a datanode on this machine, and what happens when they end."""

import json
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.prepare import PreparePlan, prepare_dataset
from qfleet.datasets.storage import open_place, remote_folder
from qfleet.errors import StorageError
from tests.datasets.stores.commands import COLLECT, Commands
from tests.datasets.stores.hadoop_jars import NoHadoop
from tests.datasets.stores.hdfs_cluster import DATANODE, NAMENODE, HdfsCluster, started_cluster
from tests.support.recorded import make_dataset

pytest.importorskip("hdfs_native", reason="needs the extra hdfs")
pytestmark = [pytest.mark.slow, pytest.mark.stores, pytest.mark.timeout(300)]
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HADOOP_CONF_DIR", raising=False)
        patch.delenv("HADOOP_HOME", raising=False)
        try:
            with started_cluster(tmp_path_factory.mktemp("hdfs")) as found:
                yield found
        except NoHadoop as error:
            pytest.skip(f"no HDFS can be started here: {error}")


@pytest.fixture
def hdfs(cluster: HdfsCluster) -> HdfsCluster:
    """The cluster with both servers running."""
    for server in (NAMENODE, DATANODE):
        if server not in cluster.running:
            cluster.start(server)
    cluster.wait_until_writable()
    return cluster


@pytest.fixture
def url(hdfs: HdfsCluster) -> str:
    """A new folder."""
    return f"{hdfs.url}/test-{random.randrange(10**9)}"


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def test_a_place_in_hdfs_is_like_a_folder(url: str) -> None:
    place = open_place(f"{url}/deep/set")
    assert place.names() == []
    place.write("data/a.parquet", b"0123456789")
    place.write("data/a.parquet", b"abcdefghij")
    assert place.names() == ["data/a.parquet"]
    assert place.read("data/a.parquet", 10) == b"abcdefghij"
    assert place.read_range("data/a.parquet", 2, 5) == b"cde"
    assert (place.size("data/a.parquet"), place.exists("data/a.parquet"), place.exists("b")) == (10, True, False)
    assert not place.exists("data")
    assert place.write_new("manifest.json", b"one")
    assert not place.write_new("manifest.json", b"two")
    assert place.read("manifest.json", 10) == b"one"
    assert place.names() == ["data/a.parquet", "manifest.json"]
    place.write("empty", b"")
    assert place.read("empty", 10) == b""
    for name in ("../x", "/x", "a/../../x", "missing", "data"):
        with pytest.raises(StorageError):
            place.read(name, 10)
    with pytest.raises(StorageError, match="9 are the most"):
        place.read("data/a.parquet", 9)


def test_a_file_of_many_blocks_is_the_same_afterwards(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "PIECE_BYTES", 3 * MIB + 1)
    data = random.Random(1).randbytes(10 * MIB + 17)
    place = open_place(url)
    place.write("a.parquet", data)
    assert place.read("a.parquet", len(data)) == data
    assert place.read_range("a.parquet", MIB - 1, 2 * MIB + 1) == data[MIB - 1 : 2 * MIB + 1]


def test_of_many_writers_of_one_manifest_exactly_one_wins(url: str) -> None:
    texts = [f"writer {number}".encode() * 1000 for number in range(8)]
    won = dict[int, bool]()
    ready = threading.Barrier(len(texts))

    def write(number: int) -> None:
        place = open_place(url)
        ready.wait(30)
        won[number] = place.write_new("manifest.json", texts[number])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(won.values()) == [False] * 7 + [True]
    winner = next(number for number, each in won.items() if each)
    assert open_place(url).read("manifest.json", 10**6) == texts[winner]
    assert open_place(url).names() == ["manifest.json"]


def test_the_whole_chain_gives_the_versions_of_a_local_folder(url: str, commands: Commands) -> None:
    found = json.loads(commands.whole_chain(url))
    commands.succeed(*COLLECT, "raw", "--episodes", "40", "--seed", "1", "env.num=4")
    commands.succeed("data", "prepare", "raw", "ready", "--split", "50/25/25")
    assert found["version"] == open_dataset(str(commands.folder / "ready")).version
    status = json.loads((commands.folder / "runs/run/status.json").read_text())
    assert status["state"] == "done"
    assert status["updates"] > 0


def test_a_user_without_permission_is_told_at_once(url: str, commands: Commands) -> None:
    open_place(url).write("mine", b"x")
    begin = time.monotonic()
    code, output = commands.run(*COLLECT, f"{url}/raw", "--episodes", "2", HADOOP_USER_NAME="eve")
    assert code == 5
    assert "Permission denied: user=eve" in output
    assert "attempt 1 of 6" in output
    assert "at org.apache" not in output
    assert time.monotonic() - begin < 60


def test_a_namenode_that_is_gone_is_a_clear_error_of_every_verb(
    url: str, hdfs: HdfsCluster, commands: Commands
) -> None:
    commands.succeed(*COLLECT, "raw", "--episodes", "4", "--seed", "1")
    hdfs.kill(NAMENODE)
    set_url = f"{url}/set"
    verbs = [
        (*COLLECT, set_url, "--episodes", "4"),
        ("data", "validate", set_url),
        ("data", "prepare", "raw", set_url),
        ("data", "inspect", set_url),
        ("train", "CartPole-v1", "replay.type=dataset", f"replay.path={set_url}", "--name", "run", "--quiet"),
    ]
    begin = time.monotonic()
    for process in [commands.start(*verb) for verb in verbs]:
        code, output = commands.finish(process)
        assert code == 5, output
        assert f"{set_url}/manifest.json cannot be read" in output
        assert "Connection refused" in output
        assert "Traceback" not in output
    assert time.monotonic() - begin < remote_folder.TOTAL_SECONDS


@pytest.mark.parametrize("server", [NAMENODE, DATANODE], ids=["namenode", "datanode"])
def test_a_server_that_comes_back_costs_only_time(
    server: str, url: str, hdfs: HdfsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "ATTEMPTS", 50)
    monkeypatch.setattr(remote_folder, "LONGEST_WAIT_SECONDS", 1.0)
    data = random.Random(1).randbytes(4 * MIB)
    place = open_place(url)
    place.write("a.parquet", data)
    hdfs.kill(server)
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(place.read("a.parquet", len(data))))
    reading.start()
    time.sleep(1)
    assert reading.is_alive()
    hdfs.start(server)
    reading.join(100)
    assert found == [data]


def test_a_datanode_killed_while_reading(url: str, hdfs: HdfsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "PIECE_BYTES", MIB)
    monkeypatch.setattr(remote_folder, "TOTAL_SECONDS", 20.0)
    data = random.Random(1).randbytes(8 * MIB)
    place = open_place(url)
    place.write("a.parquet", data)
    kept = remote_folder.RemoteFolder._read_piece
    reads = []

    def read_then_kill(self: remote_folder.RemoteFolder, name: str, begin: int, end: int) -> bytes:
        reads.append(begin)
        if len(reads) == 3:
            hdfs.kill(DATANODE)
        return kept(self, name, begin, end)

    monkeypatch.setattr(remote_folder.RemoteFolder, "_read_piece", read_then_kill)
    begin = time.monotonic()
    with pytest.raises(StorageError, match=r"a\.parquet cannot be read") as caught:
        place.read("a.parquet", len(data))
    assert caught.value.exit_code == 5
    assert time.monotonic() - begin < 60
    hdfs.start(DATANODE)
    hdfs.wait_until_writable()
    assert place.read("a.parquet", len(data)) == data


def test_a_datanode_killed_while_writing_leaves_no_data_set(
    url: str, hdfs: HdfsCluster, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_dataset(tmp_path / "raw", [50] * 300, file_bytes=20_000)
    written: list[str] = []
    kept = remote_folder.RemoteFolder.write

    def write_then_kill(self: remote_folder.RemoteFolder, name: str, data: bytes) -> None:
        kept(self, name, data)
        written.append(name)
        if len(written) == 3:
            hdfs.kill(DATANODE)

    with monkeypatch.context() as patch:
        patch.setattr(remote_folder, "TOTAL_SECONDS", 15.0)
        patch.setattr(remote_folder.RemoteFolder, "write", write_then_kill)
        begin = time.monotonic()
        with pytest.raises(StorageError, match="cannot be written") as caught:
            prepare_dataset(local, f"{url}/ready", PreparePlan())
        assert caught.value.exit_code == 5
        assert time.monotonic() - begin < 60
    assert open_place(f"{url}/ready").names() == sorted(written)
    code, output = commands.run("data", "inspect", f"{url}/ready")
    assert code == 5
    assert "there is no data set" in output
    hdfs.start(DATANODE)
    hdfs.wait_until_writable()
    require_same(commands, ("data", "prepare", str(tmp_path / "raw"), f"{url}/ready"), local.place.url, url)


def test_a_writer_that_is_killed_leaves_no_data_set(url: str, tmp_path: Path, commands: Commands) -> None:
    local = make_dataset(tmp_path / "raw", [50] * 300, file_bytes=20_000)
    prepare = ("data", "prepare", str(tmp_path / "raw"), f"{url}/ready")
    process = commands.start(*prepare)
    wait_for_files(url, process)
    process.send_signal(signal.SIGKILL)
    commands.finish(process)
    with pytest.raises(StorageError, match="there is no data set"):
        open_dataset(f"{url}/ready")
    require_same(commands, prepare, local.place.url, url)


def wait_for_files(url: str, process: "subprocess.Popen[str]") -> None:
    """Wait until a writer has written its first files, and not yet the manifest."""
    place = open_place(f"{url}/ready")
    limit = time.monotonic() + 60
    while len(names := place.names()) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert "manifest.json" not in names


def require_same(commands: Commands, prepare: tuple[str, ...], source: str, url: str) -> None:
    """The same command again gives the version that it gives in a local folder, and every hash is right."""
    commands.succeed(*prepare)
    commands.succeed("data", "prepare", source, "ready")
    ready = open_dataset(f"{url}/ready")
    assert ready.version == open_dataset(str(commands.folder / "ready")).version
    assert validate_dataset(ready) == []
