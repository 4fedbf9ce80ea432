"""Every algorithm has a page, and what its page says about settings, results and code is so."""

import re

import pytest

from qfleet.plan.presets.catalog import algorithm_presets
from scripts.pages import algorithm_pages
from scripts.pages.stage import ROOT, read_navigation

SECTIONS = ["Train it", "What it sets", "Where its code is", "Pitfalls", "Results"]


def test_every_algorithm_has_a_page_and_no_page_lacks_its_algorithm() -> None:
    named = {name.removesuffix("-small") for name in algorithm_presets()}
    assert named == set(algorithm_pages.NAMES)
    assert {page.stem for page in algorithm_pages.FOLDER.glob("*.md")} == named


@pytest.mark.parametrize("name", algorithm_pages.NAMES)
def test_a_page_has_all_its_parts(name: str) -> None:
    text = algorithm_pages.page_of(name).read_text("utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert re.search(r"^Paper: \[.*\]\(https://", text, re.MULTILINE)
    assert "```text\n" in text
    assert re.search(rf"^scripts/qfleet train \S+ --preset {name}\b", text, re.MULTILINE)
    assert [part for _, part, _ in algorithm_pages.PART.findall(text)] == ["settings", "results"]


def test_generated_parts_are_up_to_date() -> None:
    assert algorithm_pages.outdated() == [], "run: scripts/docs --update"


def test_a_part_that_is_out_of_date_is_seen_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_pages, "preset_settings", lambda name: "something else\n")
    assert len(algorithm_pages.outdated()) == len(algorithm_pages.NAMES)
    assert "`--preset dqn` sets:\n\nsomething else\n" in algorithm_pages.updated("dqn")


def test_settings_of_a_page_are_those_of_the_preset() -> None:
    text = algorithm_pages.page_of("r2d2").read_text("utf-8")
    assert "| `algo.view.burn_in` | `40` |" in text
    assert "`--preset r2d2-small`" in text


def test_results_are_found_where_the_preset_is_named() -> None:
    assert "Every small preset on CartPole-v1" in list(algorithm_pages.tables_with("iqn"))
    assert not list(algorithm_pages.tables_with("nothing"))


@pytest.mark.parametrize("name", algorithm_pages.NAMES)
def test_the_code_is_where_the_page_says(name: str) -> None:
    text = algorithm_pages.page_of(name).read_text("utf-8")
    part = text.partition("## Where its code is\n")[2].partition("\n## ")[0]
    entries = re.findall(r"^- \[.*?\]\(\.\./\.\./(.*?)\): (.*)$", part, re.MULTILINE)
    assert entries
    for file, what in entries:
        source = ROOT / file
        code = source.read_text("utf-8") if source.is_file() else ""
        names = [each for found in re.findall(r"`([\w.]+)`", what) for each in found.split(".")]
        assert source.exists()
        assert not [each for each in names if not re.search(rf"\b(def|class) {each}\b", code)], f"{file}: {what}"


def test_every_page_has_a_place_in_the_navigation() -> None:
    pages = {page for section in read_navigation().values() for page in section}
    here = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*.md")}
    here |= {f"algorithms/{name}.md" for name in algorithm_pages.NAMES}
    assert not sorted(here - pages), "add a line to docs/nav.toml"
