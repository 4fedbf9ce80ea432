"""What a reader of another format provides, and how a data set is made of it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from qfleet.datasets.format import Description, RecordedEpisode, Setting, write_dataset
from qfleet.datasets.storage import open_place
from qfleet.errors import UsageError
from qfleet.plan.local_paths import local_path


class Importer(Protocol):
    """A data set in another format."""

    def description(self) -> Description:
        """What its data are; read without making the environment."""

    def settings(self) -> dict[str, Setting]:
        """Where it came from, for the manifest: the format, the name, its version."""

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Its episodes, one at a time."""

    def notes(self) -> list[str]:
        """What somebody who imports it should know."""


def make_importer(
    source: str, format: str | None, columns: Sequence[str], actions: tuple[int, ...], env: str
) -> Importer:
    """The importer of a source, whose format is found if it is not named."""
    from qfleet.datasets.convert.column_roles import parse_columns
    from qfleet.datasets.convert.minari_import import MinariImporter, minari_folder
    from qfleet.datasets.convert.transitions_import import TableOptions, TransitionsImporter, looks_like_rllib

    if format == "minari" or (format is None and minari_folder(local_path(source))):
        if columns or actions or env:
            raise UsageError(
                "--column, --actions and --env do not go with a data set of Minari",
                "Its own files say what its data are.",
                "Leave them out, or name the format: --format transitions",
            )
        return MinariImporter(source)
    rllib = format == "rllib" or (format is None and looks_like_rllib(source))
    return TransitionsImporter(source, TableOptions(parse_columns(columns), env, actions, rllib))


def import_dataset(
    importer: Importer, url: str, show: Callable[[int, int], object] = lambda episodes, steps: None
) -> str:
    """Write a data set in another format to a URL; returns the version. `show` is told the episodes and steps done."""

    def counted() -> Iterator[RecordedEpisode]:
        steps = 0
        for number, episode in enumerate(importer.episodes(), 1):
            yield episode
            steps += episode.num_steps
            show(number, steps)

    return write_dataset(open_place(url), importer.description(), counted(), importer.settings())
