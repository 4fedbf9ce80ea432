"""Commands on s3:// URLs: moto's server on this machine, with a proxy before it that injects faults."""

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.storage import open_place, remote_folder, s3
from qfleet.errors import StorageError
from tests.datasets.stores.commands import COLLECT, SMALL, Commands, files_holding
from tests.support.recorded import make_dataset

pytestmark = [pytest.mark.slow, pytest.mark.stores, pytest.mark.timeout(300)]
KEY = "CANARYKEYID00000"
SECRET = "CANARY/secret+access/key"  # noqa: S105
TOKEN = "CANARYsessionTOKEN"  # noqa: S105
MIB = 1 << 20


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to the store; a seeded share of them meets a fault."""

    daemon_threads = True

    def __init__(self, store: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), FaultyRequest)
        self.store = store
        self.faults: tuple[str, ...] = ()
        self.share = 0.0
        self.only = ""  # part of the requests that faults meet
        self.random = random.Random(1)
        self.lock = threading.Lock()
        self.met: list[str] = []
        self.requests: list[str] = []

    def fault(self, request: str) -> str:
        """The fault that a request meets, or nothing."""
        with self.lock:
            self.requests.append(request)
            if not self.faults or self.only not in request or self.random.random() >= self.share:
                return ""
            self.met.append(self.random.choice(self.faults))
            return self.met[-1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are expected here."""


class FaultyRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(f"{self.command} {self.path}")
        if fault == "503":
            self.answer(503, {"Content-Type": "application/xml"}, b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault == "500":
            self.answer(500, {"Content-Type": "application/xml"}, b"<Error><Code>InternalError</Code></Error>")
            return
        if fault == "silence":  # longer than the client waits
            time.sleep(4)
            self.close_connection = True
            return
        store = HTTPConnection(*self.server.store, timeout=20)
        store.request(self.command, self.path, body, dict(self.headers))
        found = store.getresponse()
        data = found.read()
        if fault == "lost answer":
            self.close_connection = True
            return
        self.answer(found.status, dict(found.getheaders()), data, cut=fault == "cut")

    def answer(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = cut

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = pass_on

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def moto() -> Iterator[tuple[str, int]]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def proxy(moto: tuple[str, int]) -> Iterator[FaultyProxy]:
    with FaultyProxy(moto) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield proxy
        proxy.shutdown()


@pytest.fixture
def url(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A folder in a new bucket, reached through the proxy by this process and by commands."""
    for name, value in credentials(proxy.server_address[1]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("QFLEET_CACHE", str(tmp_path / "cache"))
    name = f"bucket-{random.randrange(10**9)}"
    s3.connect().mkdir(name)
    return f"s3://{name}/sets"


def credentials(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Commands whose output and files are searched for credentials at the end."""
    commands = Commands(tmp_path)
    yield commands
    secrets = (KEY, SECRET, TOKEN, "CANARY")
    printed = "\n".join(commands.outputs)
    assert [secret for secret in secrets if secret in printed] == []
    assert files_holding(secrets, tmp_path) == {}


def test_the_whole_chain_gives_the_versions_of_a_local_folder(url: str, commands: Commands) -> None:
    found = json.loads(commands.whole_chain(url))
    commands.succeed(*COLLECT, "raw", "--episodes", "40", "--seed", "1", "env.num=4")
    commands.succeed("data", "prepare", "raw", "ready", "--split", "50/25/25")
    assert found["version"] == open_dataset(str(commands.folder / "ready")).version
    assert f'path = "{url}/ready"' in (commands.folder / "runs/run/run.toml").read_text()


def test_under_faults_every_verb_gives_the_same_result(url: str, proxy: FaultyProxy, commands: Commands) -> None:
    proxy.faults = ("503", "500", "lost answer", "cut")
    proxy.share = 0.15
    found = json.loads(commands.whole_chain(url))
    proxy.faults = ()
    commands.succeed(*COLLECT, "raw", "--episodes", "40", "--seed", "1", "env.num=4")
    commands.succeed("data", "prepare", "raw", "ready", "--split", "50/25/25")
    assert found["version"] == open_dataset(str(commands.folder / "ready")).version
    assert len(set(proxy.met)) >= 3
    assert "Traceback" not in "".join(commands.outputs)


def test_a_store_that_is_silent_is_asked_again(
    url: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "READ_SECONDS", 1)
    monkeypatch.setattr(remote_folder, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(remote_folder, "ATTEMPTS", 10)
    place = open_place(url)
    place.write("a.parquet", b"0123456789")
    proxy.faults = ("silence",)
    proxy.share = 0.5
    assert [place.read("a.parquet", 10) for _ in range(4)] == [b"0123456789"] * 4
    assert "silence" in proxy.met


def test_a_store_that_never_answers_well_is_an_error(url: str, proxy: FaultyProxy, commands: Commands) -> None:
    commands.succeed(*COLLECT, "raw", "--episodes", "4", "--seed", "1")
    proxy.faults = ("503",)
    proxy.share = 1.0
    begin = time.monotonic()
    for process in [commands.start(*verb) for verb in verbs(f"{url}/set")]:
        code, output = commands.finish(process)
        assert code == 5, output
        assert "Service Unavailable" in output
        assert "(attempt 6 of 6)" in output
        assert "Traceback" not in output
    assert time.monotonic() - begin < remote_folder.TOTAL_SECONDS


def test_a_store_that_is_gone_is_an_error_of_every_verb(commands: Commands) -> None:
    commands.env = credentials(9)
    commands.succeed(*COLLECT, "raw", "--episodes", "4", "--seed", "1")
    begin = time.monotonic()
    for process in [commands.start(*verb) for verb in verbs("s3://bucket/set")]:
        code, output = commands.finish(process)
        assert code == 5, output
        assert "s3://bucket/set/manifest.json cannot be read" in output
        assert "Could not connect" in output
        assert "Traceback" not in output
    assert time.monotonic() - begin < remote_folder.TOTAL_SECONDS


def verbs(url: str) -> list[tuple[str, ...]]:
    """Every verb that names a data set."""
    return [
        (*COLLECT, url, "--episodes", "4"),
        ("data", "validate", url),
        ("data", "prepare", "raw", url),
        ("data", "inspect", url),
        ("train", "CartPole-v1", "replay.type=dataset", f"replay.path={url}", "--name", "run", "--quiet", *SMALL),
    ]


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_a_store_that_goes_away_after_the_manifest_was_read(
    fault: str, url: str, proxy: FaultyProxy, commands: Commands
) -> None:
    ready = f"{url}/ready"
    commands.succeed(*COLLECT, "raw", "--episodes", "8", "--seed", "1", "env.num=4")
    commands.succeed("data", "prepare", "raw", ready, "--split", "100/0/0")
    proxy.faults = (fault,)
    proxy.share = 1.0
    proxy.only = "/data/"
    learn = ("replay.type=dataset", f"replay.path={ready}", "until.epochs=1", "--name", "run", "--quiet", *SMALL)
    started = [
        commands.start(*verb, QFLEET_CACHE=str(commands.folder / "empty"))
        for verb in [("train", "CartPole-v1", *learn), ("data", "validate", ready), ("data", "prepare", ready, "copy")]
    ]
    for process in started:
        code, output = commands.finish(process)
        assert code == 5, output
        assert f"{ready}/data/" in output
        assert "cannot be read" in output
        assert "Traceback" not in output
    assert not (commands.folder / "copy/manifest.json").exists()
    proxy.faults = ()
    commands.succeed("data", "prepare", ready, "copy")
    assert commands.succeed("data", "validate", "copy").startswith("ok: 8 episodes")


def test_a_writer_killed_in_mid_upload_leaves_nothing_that_is_read(
    url: str, proxy: FaultyProxy, commands: Commands
) -> None:
    make_dataset(commands.folder / "raw", [50] * 100, file_bytes=10_000)
    prepare = ("data", "prepare", "raw", f"{url}/ready")
    process = commands.start(*prepare)
    limit = time.monotonic() + 60
    while sum(request.startswith("PUT") for request in proxy.requests) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    commands.finish(process)
    with pytest.raises(StorageError, match="there is no data set"):
        open_dataset(f"{url}/ready")
    commands.succeed(*prepare)
    commands.succeed("data", "prepare", "raw", "ready")
    assert open_dataset(f"{url}/ready").version == open_dataset(str(commands.folder / "ready")).version
    assert commands.succeed("data", "validate", f"{url}/ready").startswith("ok: 100 episodes")


def test_an_upload_in_parts_that_is_cut_off_is_no_file(
    url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "ATTEMPTS", 1)
    data = random.Random(1).randbytes(101 * MIB)  # s3fs divides what has 100 MiB
    place = open_place(url)
    place.write("large.parquet", b"the old content")
    proxy.faults = ("503",)
    proxy.share = 1.0
    proxy.only = "partNumber=2"
    with pytest.raises(StorageError, match="cannot be written"):
        place.write("large.parquet", data)
    assert place.read("large.parquet", 100) == b"the old content"
    proxy.faults = ()
    place.write("large.parquet", data)
    assert place.read("large.parquet", len(data)) == data


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


def test_credentials_in_an_address_are_refused_and_not_repeated(commands: Commands) -> None:
    commands.succeed(*COLLECT, "raw", "--episodes", "4", "--seed", "1")
    address = f"{KEY}:{SECRET}@bucket/set?token={TOKEN}"
    tried = verbs(f"s3://{address}")
    tried += [("data", "inspect", f"{scheme}{address}") for scheme in ("hdfs://", "https://", "simplecache::s3://")]
    for process in [commands.start(*verb) for verb in tried]:
        code, output = commands.finish(process)
        assert code == 2, output
        assert "Traceback" not in output
    with suppress(FileNotFoundError):
        assert list((commands.folder / "runs").iterdir()) == []


@pytest.mark.parametrize("place", ["environment", "profile"])
def test_a_secret_that_the_store_repeats_is_not_shown(
    place: str, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A store, or a proxy before it, may answer with the request itself."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def answer() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(65_536)
                body = f"<Error><Code>Bad</Code><Message>{KEY} {SECRET} {TOKEN}</Message></Error>".encode()
                connection.sendall(
                    b"HTTP/1.1 403 x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
                )

    threading.Thread(target=answer, daemon=True).start()
    commands.env = credentials(listener.getsockname()[1])
    if place == "profile":
        profile = tmp_path_factory.mktemp("aws") / "credentials"
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        profile.write_text("[default]\n" + "\n".join(f"{name} = {commands.env.pop(name.upper())}" for name in names))
        commands.env["AWS_SHARED_CREDENTIALS_FILE"] = str(profile)
    code, output = commands.run("data", "inspect", "s3://bucket/set")
    assert code == 5, output
