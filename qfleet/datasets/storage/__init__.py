"""Where the files of data sets are."""

from pathlib import Path

from qfleet.datasets.storage.array_cache import ArrayCache
from qfleet.datasets.storage.content_cache import ContentCache, cache_folder, user_cache
from qfleet.datasets.storage.local_folder import LocalFolder
from qfleet.datasets.storage.place import Place
from qfleet.datasets.storage.remote_folder import RemoteFolder
from qfleet.datasets.storage.s3 import SCHEME, open_s3
from qfleet.plan.local_paths import local_path


def open_place(url: str | Path) -> Place:
    """The place that a URL names; UsageError for a scheme that is not supported."""
    if str(url).startswith(SCHEME):
        return open_s3(str(url))
    return LocalFolder(local_path(url))


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
