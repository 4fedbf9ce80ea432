"""`qfleet data import` and `export`: from and to other formats."""

import re
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from qfleet.cli.output import echo
from qfleet.errors import UsageError

if TYPE_CHECKING:
    from qfleet.datasets.convert.minari_import import MinariImporter
    from qfleet.datasets.convert.transitions_import import TransitionsImporter

_COUNTS = re.compile(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*")
Source = Annotated[
    str, Parameter(name="SOURCE", help="A folder of Minari, or a table: Parquet or CSV, one file or a folder.")
]
Target = Annotated[str, Parameter(name="URL", help="Folder of the new data set.")]


def import_(
    source: Source,
    url: Target,
    /,
    *,
    format: Annotated[
        Literal["minari", "rllib", "transitions"] | None, Parameter(help="What SOURCE is; found by itself otherwise.")
    ] = None,
    column: Annotated[
        list[str] | None,
        Parameter(help="Which column means what (reward=r, obs=x,y).", metavar="ROLE=NAME", negative=""),
    ] = None,
    actions: Annotated[
        str | None, Parameter(help="Number of actions, of each dimension: 4 or 3,2.", metavar="N")
    ] = None,
    env: Annotated[str, Parameter(help="Environment id for the data set of a table.", metavar="ENV")] = "",
) -> int:
    """Make a data set of one in another format; no environment is made."""
    from qfleet.datasets.convert import import_dataset

    importer = _importer(source, format, column or [], actions, env)
    import_dataset(importer, url)
    _echo_notes(importer.notes())
    from qfleet.cli.offline.inspect import inspect

    return inspect(url)


def _importer(
    source: str, format: str | None, columns: list[str], actions: str | None, env: str
) -> "MinariImporter | TransitionsImporter":
    from qfleet.datasets.convert.column_roles import parse_columns
    from qfleet.datasets.convert.minari_import import MinariImporter, minari_folder
    from qfleet.datasets.convert.transitions_import import TableOptions, TransitionsImporter, looks_like_rllib
    from qfleet.plan.local_paths import local_path

    if format == "minari" or (format is None and minari_folder(local_path(source))):
        if columns or actions or env:
            raise UsageError(
                "--column, --actions and --env do not go with a data set of Minari",
                "Its own files say what its data are.",
                "Leave them out, or name the format: --format transitions",
            )
        return MinariImporter(source)
    rllib = format == "rllib" or (format is None and looks_like_rllib(source))
    return TransitionsImporter(source, TableOptions(parse_columns(columns), env, _counts(actions), rllib))


def _counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    if _COUNTS.fullmatch(text) is None:
        raise UsageError(
            f"--actions {text} is not valid",
            "It is a number, or a number for each dimension of an action.",
            "Example: --actions 4, or --actions 3,2",
        )
    return tuple(map(int, text.split(",")))


def export(
    url: Annotated[str, Parameter(name="URL", help="Folder of the data set.")],
    target: Annotated[str, Parameter(name="TARGET", help="Folder to write to.")],
    /,
    *,
    format: Annotated[Literal["minari", "rllib"], Parameter(help="minari, or rllib: its columns as Parquet.")],
) -> int:
    """Write a data set in another format; says what that format cannot carry."""
    from qfleet.datasets.convert.minari_export import export_minari
    from qfleet.datasets.convert.rllib_export import export_rllib
    from qfleet.datasets.format import open_dataset

    dataset = open_dataset(url)
    notes = (export_minari if format == "minari" else export_rllib)(dataset, target)
    _echo_notes(notes)
    echo(f"exported {dataset.manifest.num_episodes:,} episodes to {target}")
    return 0


def _echo_notes(notes: list[str]) -> None:
    for note in notes:
        echo(f"note: {note}", to_stderr=True)
