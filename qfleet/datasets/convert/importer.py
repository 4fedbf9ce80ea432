"""What a reader of another format provides, and how a data set is made of it."""

from collections.abc import Iterator
from typing import Protocol

from qfleet.datasets.format import Description, RecordedEpisode, Setting, write_dataset
from qfleet.datasets.storage import open_place


class Importer(Protocol):
    """A data set in another format."""

    def description(self) -> Description:
        """What its data are; read without making the environment."""

    def settings(self) -> dict[str, Setting]:
        """Where it came from, for the manifest: the format, the name, its version."""

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Its episodes, one at a time."""


def import_dataset(importer: Importer, url: str) -> str:
    """Write a data set in another format to a URL; returns the version."""
    return write_dataset(open_place(url), importer.description(), importer.episodes(), importer.settings())
