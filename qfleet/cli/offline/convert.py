"""`qfleet data import` and `export`: from and to other formats."""

import re
from typing import Annotated, Literal

from cyclopts import Parameter

from qfleet.cli.output import echo
from qfleet.errors import UsageError

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
    from qfleet.datasets.convert import import_dataset, make_importer

    importer = make_importer(source, format, column or [], _counts(actions), env)
    import_dataset(importer, url)
    _echo_notes(importer.notes())
    from qfleet.cli.offline.inspect import inspect

    return inspect(url)


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
