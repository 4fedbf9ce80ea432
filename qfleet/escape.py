"""Making untrusted text safe to print, log or show in a notebook."""

import html


def escaped(text: object, keep: str = "") -> str:
    r"""The text on one line, with every control character written out: a newline becomes \n, an escape \x1b.

    Names of runs and files, ids and messages may come from anywhere. Raw, they could move the cursor, recolour the
    terminal, or forge a line of output. Characters in `keep` stay as they are.
    """
    return "".join(mark if mark.isprintable() or mark in keep else ascii(mark)[1:-1] for mark in str(text))


def html_text(value: object) -> str:
    """A value as text inside HTML, or inside an attribute in double quotes: no tags, no control characters."""
    return html.escape(escaped(value))


def indented(text: object, by: str = "  ") -> str:
    """Several lines of text, each escaped and all but the first indented, so that none looks like qfleet's own."""
    return f"\n{by}".join(escaped(line, keep="\t") for line in str(text).split("\n"))
