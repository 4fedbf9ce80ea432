"""docs/promises.md and SECURITY.md name tests: each of them exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["docs/promises.md", "SECURITY.md"]


def missing(text: str) -> list[str]:
    """Tests that a page names and that are not there."""
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", text)
    return [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists() or (test and not re.search(rf"\bdef {test}\(", (ROOT / file).read_text("utf-8")))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert missing(text) == []


def test_a_test_that_does_not_exist_is_found() -> None:
    assert missing("`tests/test_promises.py::test_nothing`, `tests/nowhere.py`") == [
        "tests/test_promises.py::test_nothing",
        "tests/nowhere.py::",
    ]
    assert missing("`tests/test_promises.py::test_a_test_that_does_not_exist_is_found`") == []


def test_every_promise_has_a_test_or_says_that_it_has_none() -> None:
    rows = re.findall(r"^\| (?:I?\d+|-) \|.*$", (ROOT / "docs/promises.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 12 + 33 + 1
    assert not [row for row in rows if "tests/" not in row and "not yet" not in row]
