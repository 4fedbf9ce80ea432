"""The jars of Hadoop 2.7.3, from the source distribution of pyspark 2.4.8: nothing else on PyPI has a whole HDFS.

`python -m tests.datasets.stores.hadoop_jars FOLDER` downloads 220 MB and keeps 20 MB. It is a process of its own:
tests themselves have no network.
"""

import fcntl
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.request import urlopen

ROOT = Path(__file__).parents[3]

URL = (
    "https://files.pythonhosted.org/packages/13/29/"
    "1a5d7c60609dfc8fd79c86965e95ea7e9e181385d839bc43913d277effa2/pyspark-2.4.8.tar.gz"
)
SHA256 = "3a19b71b8dc8dd91ebc943604a05e1ab01bce052456d42937035632d852d78dc"
WANTED = (
    *(f"hadoop-{part}-2.*" for part in ("annotations", "auth", "common", "hdfs")),
    *(f"commons-{part}-[1-9]*" for part in ("cli", "codec", "collections", "configuration", "io", "lang", "logging")),
    *("guava-1*", "htrace-core-*", "jetty-6*", "jetty-util-6*", "log4j-*", "netty-*", "protobuf-java-*"),
    *("jackson-*-asl-*", "javax.servlet-api-*", "javax.ws.rs-api-*", "slf4j-*", "xmlenc-*"),
)
READ_SECONDS = 30
ALL_SECONDS = 400


class NoHadoop(Exception):
    """There is no Java, or the jars cannot be downloaded."""


def hadoop_jars() -> Path:
    """The folder with the jars, in the user's cache; the first caller downloads them."""
    if shutil.which("java") is None:
        raise NoHadoop("there is no java on this machine (Debian: openjdk-17-jre-headless)")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qfleet-tests"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"hadoop-{SHA256[:12]}"
    with locked(cache / "hadoop.lock"):
        if not folder.is_dir():
            command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(folder)]
            try:
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, timeout=ALL_SECONDS, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise NoHadoop(f"its jars did not arrive within {ALL_SECONDS} s") from error
            if done.returncode != 0:
                raise NoHadoop(f"its jars cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class HashingFile:
    """A stream whose bytes are hashed as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.sha256.update(data)
        return data


def download(folder: Path) -> None:
    """Put the wanted jars into a new folder; nothing is kept of a download with another hash."""
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".hadoop-"))
    try:
        with urlopen(URL, timeout=READ_SECONDS) as answer:
            stream = HashingFile(answer)
            with tarfile.open(fileobj=stream, mode="r|gz") as archive:  # type: ignore[call-overload]
                for member in archive:
                    name = Path(member.name).name
                    if member.isfile() and any(fnmatch.fnmatch(name, f"{each}.jar") for each in WANTED):
                        content = archive.extractfile(member)
                        assert content is not None
                        (draft / name).write_bytes(content.read())
            while stream.read(1 << 20):
                pass
        if stream.sha256.hexdigest() != SHA256:
            raise SystemExit(f"{URL} has another hash")
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


if __name__ == "__main__":
    download(Path(sys.argv[1]))
