"""`hdfs://namenode:port/folder`, through the fsspec file system of hdfs-native (the extra `hdfs`), without Java."""

import re
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from qfleet.datasets.storage.addresses import without_secrets
from qfleet.datasets.storage.remote_folder import RemoteFolder
from qfleet.errors import UsageError
from qfleet.install import install_command

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEME = "hdfs://"
_URL = re.compile(r"hdfs://([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::([0-9]{1,5}))?/([^\x00-\x1f\x7f?#:\\]+?)/*")
PIECE_BYTES = 4 << 20  # of one call: more would be copied at once
SOCKET_SECONDS = 10
# Of the client's own attempts; RemoteFolder repeats, and has the limits. A name service needs one per namenode.
FAILOVERS = {"port": 1, "name service": 4}
_REMOTE_ERROR = re.compile(r'RPCError\("([\w.$]+)", "(.*)', re.DOTALL)
FORBIDDEN = ("AccessControlException", "AuthorizationException", "InvalidToken", "SaslException")


def open_hdfs(url: str) -> RemoteFolder:
    """The folder that a URL names."""
    found = _URL.fullmatch(url)
    parts = found[3].split("/") if found else []
    if found is None or not all(parts) or {".", ".."} & set(parts) or int(found[2] or 1) not in range(1, 65536):
        raise UsageError(
            "this is no address of a folder in HDFS: " + without_secrets(url),
            "It has a namenode with its port (or a name service) and a folder, and no user, password or query.",
            "Example: hdfs://namenode:8020/data/cartpole; Hadoop's own configuration (HADOOP_CONF_DIR) is used.",
        )
    host = found[1]
    port = int(found[2]) if found[2] else None
    address = host if port is None else f"{host}:{port}"
    return RemoteFolder(f"{SCHEME}{address}/{found[3]}", f"/{found[3]}", lambda: connect(host, port))


def connect(host: str, port: int | None) -> "HdfsStore":
    """A connection; the user and Kerberos' tickets are found by the client in Hadoop's own places."""
    try:
        from hdfs_native.fsspec import HdfsFileSystem
    except ImportError as error:
        raise UsageError(
            "addresses hdfs://... need the package hdfs-native",
            f"It cannot be imported: {error}.",
            f"Run: {install_command('hdfs')}",
        ) from error
    failovers = FAILOVERS["name service" if port is None else "port"]
    options = {"dfs.client.failover.max.attempts": str(failovers)}
    options["dfs.client.socket-timeout"] = str(SOCKET_SECONDS * 1000)
    with clear_errors():
        return HdfsStore(HdfsFileSystem(host, port, skip_instance_cache=True, **options))


class HdfsStore:
    """HDFS with the promises of an object store: a file is written under another name, and renamed when it is whole.

    A rename is one operation of the namenode, and without `overwrite` fails if there is such a file. Names of
    unfinished files begin with a dot, and are not listed.
    """

    def __init__(self, files: Any) -> None:
        self._files = files  # HdfsFileSystem

    def info(self, path: str) -> dict[str, Any]:
        """`type` and `size` of a file."""
        with clear_errors():
            return dict(self._files.info(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes of a file, or a range of them."""
        with clear_errors():
            return bytes(self._files.cat_file(path, start=start, end=end))

    def find(self, path: str) -> list[str]:
        """All files below a path; the file system's own `find` takes a namenode that is gone for an empty folder."""
        found: list[str] = []
        with clear_errors(), suppress(FileNotFoundError):
            found = [status.path for status in self._files.client.list_status(path, True) if not status.isdir]
        return [name for name in found if not PurePosixPath(name).name.startswith(".")]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        """Write a file; with mode `create`, only if there is none."""
        if mode == "create":
            with suppress(FileNotFoundError):
                self.info(path)
                raise FileExistsError(path)
        place = PurePosixPath(path)
        draft = str(place.with_name(f".{place.name}.{token_hex(8)}"))
        with clear_errors():
            try:
                self._write(draft, value)
                self._files.mv(draft, path, overwrite=mode != "create")
            except BaseException:
                with suppress(Exception):
                    self._files.rm(draft)
                raise

    def _write(self, path: str, value: bytes) -> None:
        data = memoryview(value)
        with self._files.open(path, "wb", overwrite=False) as file:
            for begin in range(0, len(data), PIECE_BYTES):
                file.write(data[begin : begin + PIECE_BYTES])
            if value:
                file.hsync()  # on the disks of the datanodes
        if (size := self._files.info(path)["size"]) != len(value):
            raise OSError(f"HDFS has {size:,} bytes of the {len(value):,} that were sent")

    def invalidate_cache(self) -> None:
        """Nothing is kept."""


@contextmanager
def clear_errors() -> "Iterator[None]":
    """Errors of the namenode are RuntimeErrors with a Java stack: raise OSErrors with its first line."""
    try:
        yield
    except RuntimeError as error:
        found = _REMOTE_ERROR.match(str(error))
        kind, text = (found[1].rpartition(".")[2], found[2]) if found else ("", str(error))
        text = re.split(r"\\n|\n|\"\)$", text)[0]
        known = PermissionError if kind.endswith(FORBIDDEN) else OSError
        raise known(f"{kind}: {text}" if kind else text) from error
