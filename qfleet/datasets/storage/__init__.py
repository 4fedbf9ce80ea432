"""Where the files of data sets are."""

from pathlib import Path

from qfleet.datasets.storage.local_folder import LocalFolder
from qfleet.datasets.storage.place import Place
from qfleet.plan.local_paths import local_path


def open_place(url: str | Path) -> Place:
    """The place that a URL names; UsageError for a scheme that is not supported."""
    return LocalFolder(local_path(url))


__all__ = ["LocalFolder", "Place", "open_place"]
