"""Rows of runs as a pandas DataFrame; needs the extra `pandas`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.errors import UsageError
from qfleet.install import install_command
from qfleet.watch.read_files import each_row
from qfleet.watch.run_listing import flatten_tables

if TYPE_CHECKING:
    from pandas import DataFrame

KINDS = ("progress", "eval", "end")  # that every run can have; a change of settings has a kind of its own
MOST_COLUMNS = 1_000  # a run has fewer than a hundred
MOST_CELLS = 100_000_000


def rows_frame(sources: Iterable[tuple[Mapping[str, Any], Path]], kind: str | None = None) -> "DataFrame":
    """The rows of runs below each other, those of one kind if asked; a source is its first columns and a run.

    Fields inside a field become columns of their own, such as `stages.act`.
    """
    pandas = _pandas()
    rows: list[dict[str, Any]] = []
    kinds = set[str]()
    columns = dict[str, None]()
    for first, path in sources:
        for row in each_row(path / "metrics.jsonl"):
            kinds.add(str(row.get("kind")))
            if kind is None or row.get("kind") == kind:
                rows.append({**first, **flatten_tables(row)})
                columns.update(dict.fromkeys(rows[-1]))
                _require_size(path, len(columns), len(rows))
    _require_kind(kind, kinds)
    found: DataFrame = pandas.DataFrame(rows, columns=list(columns))
    return found


def _require_size(path: Path, columns: int, rows: int) -> None:
    """Refuse a file with rows that no run of qfleet writes: a frame has room for every column in every row."""
    if columns > MOST_COLUMNS or columns * rows > MOST_CELLS:
        raise UsageError(
            f"{path / 'metrics.jsonl'} is too large for a DataFrame",
            f"It would have {columns:,} columns and more than {rows:,} rows.",
            'Ask for one kind of rows, frame("eval"), or read the file row by row.',
        )


def _require_kind(kind: str | None, kinds: set[str]) -> None:
    """Refuse a kind that no run has; one that comes later gives an empty frame."""
    if kind is None or kind in kinds or kind in KINDS:
        return
    raise UsageError(
        f"there are no rows of kind {kind!r}",
        f"There are rows of kind {', '.join(sorted(kinds)) or 'none yet'}.",
        "Write one of these, or frame() for all rows.",
    )


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise UsageError(
            "a DataFrame needs the package pandas", f"It cannot be imported: {error}.", install_command("pandas")
        ) from error
    return pandas
