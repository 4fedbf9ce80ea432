"""The generated parts of docs/algorithms/*.md: the settings of a preset, and where its results are."""

import re
from collections.abc import Iterator
from pathlib import Path

from qfleet.plan.presets.algorithms import ALGORITHMS, COMBINATIONS, OFFLINE
from qfleet.plan.presets.catalog import algorithm_presets
from scripts.pages.markdown import slug
from scripts.pages.settings_reference import preset_settings
from scripts.pages.stage import ROOT

FOLDER = ROOT / "docs/algorithms"
RESULTS = ROOT / "docs/results.md"
PART = re.compile(r"(<!-- generated:(\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
NAMES = [preset.__name__ for preset in (*ALGORITHMS, *COMBINATIONS, *OFFLINE)]


def page_of(name: str) -> Path:
    """The page of an algorithm."""
    return FOLDER / f"{name}.md"


def updated(name: str) -> str:
    """The page with its generated parts made anew."""
    parts = {"settings": settings_part(name), "results": results_part(name)}
    text = page_of(name).read_text("utf-8")
    return PART.sub(lambda found: f"{found[1]}{parts[found[2]]}{found[3]}", text)


def settings_part(name: str) -> str:
    """What `--preset NAME` sets, and what its small variant does."""
    text = f"`--preset {name}` sets:\n\n{preset_settings(name)}"
    small = f"{name}-small"
    if small in algorithm_presets():
        text += f"\n`--preset {small}`, for small environments and small machines, sets:\n\n{preset_settings(small)}"
    return text


def results_part(name: str) -> str:
    """The tables of docs/results.md that have a run of this preset."""
    found = list(tables_with(name))
    links = [f"- [{title}](../results.md#{slug(title)})\n" for title in found]
    return "".join(links) or "No table of [results](../results.md) has this preset.\n"


def tables_with(name: str) -> Iterator[str]:
    """Titles of the results in which a preset is named."""
    for part in RESULTS.read_text("utf-8").split("\n## ")[1:]:
        if re.search(rf"`{name}(-small)?`", part) or re.search(rf"^\| {name} \|", part, re.MULTILINE):
            yield part.partition("\n")[0]


def outdated() -> list[str]:
    """Pages whose generated parts are not as they would be made now."""
    pages = [name for name in NAMES if page_of(name).exists()]
    return [f"docs/algorithms/{name}.md" for name in pages if updated(name) != page_of(name).read_text("utf-8")]


def update() -> list[str]:
    """Bring the pages up to date; returns those that were not."""
    found = outdated()
    for page in found:
        name = Path(page).stem
        page_of(name).write_text(updated(name), "utf-8")
    return found
