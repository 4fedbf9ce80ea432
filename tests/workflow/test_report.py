"""The report's page: it loads nothing, runs nothing, escapes everything, and is readable without colours or data."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from qfleet.workflow import charts
from qfleet.workflow.page import html_report
from tests.workflow.workflows import run

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m\u202e"


class Page(HTMLParser):
    """The tags, what they load, and their handlers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [] if tag in ("meta", "br", "link") else [tag]
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "data") or name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a small workflow, as it is in report.json."""
    place = tmp_path_factory.mktemp("report")
    run(place)
    found: dict[str, Any] = json.loads((place / "out/report.json").read_text())
    return found


def hostile(value: Any) -> Any:
    """The same with markup in every text, and as a name in every table of names."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return {name: hostile(each) for name, each in value.items()} if isinstance(value, dict) else value


def test_every_text_is_escaped(report: dict[str, Any]) -> None:
    evil = hostile({**report, "made": "x", "state": "x"})
    evil["data"]["splits"] = report["data"]["splits"]
    evil["on_data"]["numbers"] = {name + EVIL: each for name, each in evil["on_data"]["numbers"].items()}
    text = html_report(evil)
    page = Page(text)
    assert not page.loads
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert text.count("&lt;script&gt;") > 20
    assert not set(text) & {"\x1b", "\u202e"}


def test_the_page_loads_nothing_and_is_whole(report: dict[str, Any]) -> None:
    text = html_report(report)
    page = Page(text)
    assert not page.loads
    assert not page.open
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://", text)
    assert "prefers-color-scheme: dark" in text
    for part in ("validation return", "returns of all recorded episodes", "refused", "hash of inputs", "Policy.load"):
        assert part in text
    assert report["first_parameters"]["sha256"] in text


def test_a_run_that_was_stopped_has_a_report_too(report: dict[str, Any]) -> None:
    stopped = {**report, "state": "interrupted", "reason": "stopped by SIGINT", "test": None, "on_data": None}
    stopped |= {"validation": [], "progress": [], "best": None, "decisions": [], "first_parameters": {}}
    text = html_report(stopped)
    assert "not done: stopped by SIGINT" in text
    assert "fewer than two points" in text
    assert not Page(text).open


@pytest.mark.parametrize(
    "values", [[0.0, 0.0], [1e-300, 2e-300], [-1e300, 1e300], [5.0, 5.0], [float("nan"), 1.0, 2.0]]
)
def test_curves_of_odd_numbers_are_drawn(values: list[float]) -> None:
    drawn = charts.curve("odd", list(enumerate(values)), "x", "y")
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_many_points_are_thinned_and_the_last_one_stays() -> None:
    points = [(float(at), float(at)) for at in range(100_000)]
    assert len(charts.thinned(points)) <= charts.MOST_POINTS + 1
    assert charts.thinned(points)[-1] == points[-1]


def test_ticks_are_round() -> None:
    assert charts.Axis(0.0, 1.0, 0, 100).ticks() == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert charts.number_text(20_000) == "20k"
    assert charts.number_text(1_500_000) == "1.5M"


def test_a_report_file_is_plain_text(tmp_path: Path, report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report
