"""The command line: the help of every command, as it is printed."""

import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO

from cyclopts import App

from qfleet.cli import main
from qfleet.cli.app import app
from scripts.pages.markdown import fenced

INTRODUCTION = """# Command line

The help of every command, as `qfleet COMMAND --help` prints it. In a checkout write `scripts/qfleet`.
Any setting of a [plan](settings.md) can be given as `path=value`.
"""


def commands(part: App = app, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command by its words; a second name of a command is left out."""
    seen: set[int] = set()
    for name in part:
        if name.startswith("-") or id(part[name]) in seen:
            continue
        seen.add(id(part[name]))
        words = (*before, name)
        yield words
        yield from commands(part[name], words)


def help_of(words: tuple[str, ...]) -> str:
    """What `qfleet WORDS --help` prints, on a terminal of fixed width without colours."""
    settings = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    said = StringIO()
    try:
        with redirect_stdout(said):
            main([*words, "--help"])
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return "\n".join(line.rstrip() for line in said.getvalue().splitlines())


def page() -> str:
    """All commands."""
    parts = [INTRODUCTION, "## qfleet\n", fenced(help_of(()))]
    for words in commands():
        parts += [f"{'#' * (len(words) + 1)} {' '.join(('qfleet', *words))}\n", fenced(help_of(words))]
    return "\n".join(parts)
