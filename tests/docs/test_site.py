"""The site is built from the pages, without warnings, without dead links, and without anything from elsewhere."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from scripts.pages.__main__ import is_free
from scripts.pages.markdown import table, title_of, with_anchors, with_blank_lines, without_comments
from scripts.pages.stage import ROOT, Stage, configuration, existing, place_of, read_navigation

# --- Markdown ---


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("Text:\n- a\n- b\n", "Text:\n\n- a\n- b\n"),
        ("Text:\n1. a\n   more\n2. b\n", "Text:\n\n1. a\n   more\n2. b\n"),
        ("- a\n  more\n- b\n\nText\n- c\n", "- a\n  more\n- b\n\nText\n\n- c\n"),
        ("Text\n| a |\n| --- |\n", "Text\n\n| a |\n| --- |\n"),
        ("# H\n- a\n", "# H\n\n- a\n"),
        ("```text\nText\n- a\n```\n", "```text\nText\n- a\n```\n"),
    ],
)
def test_lists_and_tables_get_a_blank_line(text: str, made: str) -> None:
    assert with_blank_lines(text) == made


def test_headings_get_the_anchors_of_github() -> None:
    text = "# A - b\n## `x.y` & z\n## Twice\n## Twice\n```sh\n# no heading\n```\n"
    assert re.findall(r"#([\w-]*) }", with_anchors(text)) == ["a---b", "xy--z", "twice", "twice-1"]


def test_comments_are_dropped_but_not_those_of_code() -> None:
    text = without_comments("<!-- test: skip x -->\n```sh\n<!-- kept -->\n```\n")
    assert text.strip() == "```sh\n<!-- kept -->\n```"


def test_a_table_keeps_its_columns() -> None:
    assert table(("a",), [("x | y\nz",)]) == "| a |\n| --- |\n| x \\| y z |\n"


# --- gathering ---


def test_every_file_has_a_place_of_its_own(tmp_path: Path) -> None:
    assert place_of(ROOT / "README.md") == "index.md"
    assert place_of(ROOT / "docs/decisions/README.md") == "decisions/index.md"
    assert place_of(ROOT / "CHANGELOG.md") == "changelog.md"
    assert place_of(ROOT / "qfleet/api.py") == "source/qfleet/api.py.md"
    assert place_of(ROOT / "qfleet/replay") == "source/qfleet/replay/index.md"


def test_links_to_files_of_the_repository_lead_to_pages_of_the_site(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    page = ROOT / "docs/algorithms/dqn.md"
    assert stage.link(page, "../../qfleet/api.py") == "../source/qfleet/api.py.md"
    assert stage.link(page, "../results.md#learning") == "../results.md#learning"
    assert stage.link(ROOT / "docs/house.md", "decisions/README.md") == "decisions/index.md"
    assert stage.link(ROOT / "README.md", "docs/decisions") == "decisions/index.md"
    assert stage.link(page, "https://example.org/x.py") == "https://example.org/x.py"
    assert stage.link(page, "gone.md") == "gone.md"
    assert stage.link(page, "../../../outside.md") == "../../../outside.md"
    assert ROOT / "qfleet/api.py" in stage.todo


def test_pages_that_do_not_exist_yet_are_left_out_of_the_navigation(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# The first\n")
    navigation = {"Start": {"a.md": "", "later.md": "Later"}, "Empty": {"other.md": "Other"}}
    assert existing(navigation, tmp_path) == {"Start": {"a.md": ""}}
    made = tomllib.loads(configuration(navigation, tmp_path))["project"]
    assert made["nav"] == [{"Start": [{"The first": "a.md"}]}]
    assert made["theme"]["font"] is False


def test_the_navigation_has_no_page_twice() -> None:
    pages = [page for section in read_navigation().values() for page in section]
    assert len(pages) == len(set(pages))


def test_a_title_is_the_first_heading_outside_of_code() -> None:
    assert title_of("```sh\n# no\n```\n\n# Yes\n") == "Yes"


def test_only_a_site_is_replaced(tmp_path: Path) -> None:
    assert is_free(tmp_path / "new")
    assert is_free(tmp_path)
    (tmp_path / "thesis.tex").write_text("years of work")
    assert not is_free(tmp_path)
    (tmp_path / "sitemap.xml").write_text("")
    assert is_free(tmp_path)


# --- the site itself ---


class Page(HTMLParser):
    """What a page of HTML loads, links to, and can be linked to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given["id"]} if "id" in given else set()
        self.loads += [given["src"]] if "src" in given else []
        if "href" in given:
            (self.links if tag == "a" else self.loads).append(given["href"])


def dead_links(site: Path) -> list[str]:
    """Links and files inside the site that lead nowhere."""
    pages = {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    found = []
    for file, page in pages.items():
        for link in (*page.links, *page.loads):
            name, _, anchor = unquote(link).partition("#")
            target = (file.parent / name).resolve() if name else file
            if "://" in link or link.startswith(("data:", "mailto:")):
                continue
            lost = anchor and target in pages and anchor not in pages[target].anchors
            if not target.exists() or lost:
                found.append(f"{file.relative_to(site)}: {link}")
    return found


def loaded_from_elsewhere(site: Path) -> list[str]:
    """What a browser would fetch from another machine to show a page."""
    pages = {file: Page(file) for file in site.rglob("*.html")}
    return [f"{file.name}: {link}" for file, page in pages.items() for link in page.loads if "//" in link]


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="x"></h1><a href="#x"></a><a href="#y"></a><a href="b.html"></a>')
    assert dead_links(tmp_path) == ["a.html: #y", "a.html: b.html"]
    (tmp_path / "a.html").write_text(
        '<script src="https://example.org/x.js"></script><a href="https://example.org"></a>'
    )
    assert loaded_from_elsewhere(tmp_path) == ["a.html: https://example.org/x.js"]


OFFLINE = ["unshare", "--map-root-user", "--net"]


def offline() -> list[str]:
    """Words that run a command without any network, where the system allows it."""
    if shutil.which("unshare") is None:
        return []
    done = subprocess.run([*OFFLINE, "true"], capture_output=True, timeout=20)
    return OFFLINE if done.returncode == 0 else []


@pytest.mark.slow
@pytest.mark.site
@pytest.mark.timeout(600)
def test_the_site_is_built_without_network_warnings_and_dead_links(tmp_path: Path) -> None:
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed here: scripts/setup could not install the extra docs")
    site = tmp_path / "site"
    command = [*offline(), sys.executable, "-m", "scripts.pages", "--out", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "No issues found" in said
    assert "arning" not in said
    assert dead_links(site) == []
    assert loaded_from_elsewhere(site) == []
    pages = {page.replace(".md", ".html") for section in read_navigation().values() for page in section}
    missing = {page for page in pages if not (site / page).is_file()}
    written = {"docs/" + page.replace(".html", ".md") for page in missing}
    assert not [page for page in written if (ROOT / page).exists()]
    assert (site / "search.json").stat().st_size > 100_000
    assert "td_loss" in (site / "source/qfleet/qlearn/td.py.html").read_text("utf-8")
