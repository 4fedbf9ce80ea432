"""Changed paths in on stdin, the slow suites they call for out: name, minutes, marks and tests, tab-separated."""

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SUITES = Path(__file__).with_name("suites.toml")


def load() -> list[dict[str, Any]]:
    suites: list[dict[str, Any]] = tomllib.loads(SUITES.read_text())["suite"]
    return suites


def pick(suites: list[dict[str, Any]], changed: Iterable[str]) -> list[dict[str, Any]]:
    changed = tuple(changed)
    return [suite for suite in suites if any(path.startswith(tuple(suite["paths"])) for path in changed)]


if __name__ == "__main__":
    for suite in pick(load(), sys.stdin.read().splitlines()):
        print(suite["name"], suite["minutes"], suite["marks"], " ".join(suite["tests"]), sep="\t")
