"""Pieces of HTML for notebooks. Every text is escaped here: it may come from a run that a stranger made."""

from collections.abc import Iterable, Sequence

from qfleet.escape import html_text

MOST_CHARACTERS = 300  # of one cell of a table
CELL = 'style="text-align:left"'


def html_table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """A table of texts."""
    head = f"<tr>{''.join(f'<th {CELL}>{html_text(name)}</th>' for name in header)}</tr>" if header else ""
    return f"<table>{head}{''.join(_row(row) for row in rows)}</table>"


def _row(cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<td {CELL}>{short_text(cell)}</td>' for cell in cells)}</tr>"


def short_text(value: object) -> str:
    """The beginning of a text, escaped."""
    text = str(value)
    return html_text(text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "...")


def heading(title: object, more: object = "") -> str:
    """A line above a table: what it is in bold, and more about it."""
    return f"<div><b>{short_text(title)}</b> {short_text(more)}</div>"


def folded(title: str, body: str) -> str:
    """HTML that is shown when its title is clicked."""
    return f"<details><summary>{html_text(title)}</summary>{body}</details>"
