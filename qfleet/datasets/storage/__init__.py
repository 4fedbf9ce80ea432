"""Where the files of data sets are."""

from pathlib import Path

from qfleet.datasets.storage.addresses import SUPPORTED, scheme_of, without_secrets
from qfleet.datasets.storage.array_cache import ArrayCache
from qfleet.datasets.storage.content_cache import ContentCache, cache_folder, user_cache
from qfleet.datasets.storage.hdfs import open_hdfs
from qfleet.datasets.storage.local_folder import LocalFolder
from qfleet.datasets.storage.place import Place
from qfleet.datasets.storage.remote_folder import RemoteFolder
from qfleet.datasets.storage.s3 import open_s3
from qfleet.errors import UsageError


def open_place(url: str | Path) -> Place:
    """The place that a URL names; UsageError for a scheme that is not supported."""
    text = str(url)
    scheme = scheme_of(text)
    if scheme == "s3":
        return open_s3(text)
    if scheme == "hdfs":
        return open_hdfs(text)
    if scheme:
        raise UsageError(
            f"{without_secrets(text)} cannot be the place of a data set",
            f"Supported: {SUPPORTED}" + ("; file systems are not chained with `::`." if "::" in scheme else "."),
            _advice(scheme, text),
        )
    return LocalFolder(Path(url))


def _advice(scheme: str, text: str) -> str:
    if scheme == "file":
        return "Leave file:// out: /" + without_secrets(text)[len("file:") :].lstrip("/")
    if "::" in scheme:
        return "Give the plain address; files from a network are kept on this machine anyway (QFLEET_CACHE)."
    return "Copy the data set to one of these places, and name that one."


__all__ = [
    "ArrayCache",
    "ContentCache",
    "LocalFolder",
    "Place",
    "RemoteFolder",
    "cache_folder",
    "open_place",
    "user_cache",
]
