"""Pieces of a report's page; every foreign text that enters it goes through `safe`."""

from collections.abc import Iterable, Sequence
from html import escape

from qfleet.escape import escaped


def safe(text: object) -> str:
    """Foreign text for the page: no markup, no control characters."""
    return escape(escaped(str(text)))


def number(value: float | None) -> str:
    """A number for people."""
    return "none" if value is None else f"{value:.4g}"


def section(title: str, parts: Iterable[str]) -> str:
    """A part of the page; none if it is empty."""
    body = "\n".join(part for part in parts if part)
    return f"<section><h2>{safe(title)}</h2>\n{body}</section>" if body else ""


def table(header: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> str:
    """A table; the columns `numbers` are aligned to the right."""

    def cell(tag: str, at: int, value: object) -> str:
        style = ' class="num"' if at in numbers else ""
        return f"<{tag}{style}>{safe(value)}</{tag}>"

    head = "".join(cell("th", at, name) for at, name in enumerate(header))
    body = "".join("<tr>" + "".join(cell("td", at, value) for at, value in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def lines(texts: Sequence[str]) -> str:
    """Lines of code."""
    return "\n".join(safe(each) for each in texts)


def details(title: str, body: str) -> str:
    """A part that is folded."""
    return f"<details><summary>{safe(title)}</summary>{body}</details>"
