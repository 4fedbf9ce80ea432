"""The pages of the site in one folder: those of docs/, generated references, and the files that they link to."""

import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from scripts.pages.markdown import fenced, title_of, with_anchors, with_blank_lines, with_links, without_comments

ROOT = Path(__file__).parents[2]
PICTURES = {".png", ".svg", ".jpg", ".gif"}
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash"}
MAX_SHOWN_BYTES = 200_000
NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n"
Navigation = dict[str, dict[str, str]]


class Stage:
    """A folder of Markdown that is being filled. A path in the repository has one place in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generated: set[str] = set()
        self.todo: list[Path] = []  # in the repository
        self.staged: set[Path] = set()

    def write(self, name: str, text: str) -> None:
        """A page that is made here, by its name in the site."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(with_anchors(with_blank_lines(without_comments(text))), "utf-8")
        self.generated.add(name)

    def add_docs(self) -> None:
        """README, everything in docs/, and whatever they link to."""
        self.todo += [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        while self.todo:
            source = self.todo.pop()
            if source not in self.staged:
                self.staged.add(source)
                self.add(source)

    def add(self, source: Path) -> None:
        """One file or folder of the repository."""
        target = self.folder / place_of(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in PICTURES:
            shutil.copy(source, target)
            return
        if source.is_dir():
            text = self.listing(source)
        elif source.suffix == ".md":
            text = self.page(source)
        else:
            text = self.source_page(source)
        target.write_text(text, "utf-8")

    def page(self, source: Path) -> str:
        """A page of Markdown, with links that work in the site."""
        text = with_links(without_comments(source.read_text("utf-8")), lambda link: self.link(source, link))
        return with_anchors(with_blank_lines(text))

    def link(self, source: Path, link: str) -> str:
        """A link of a page in the repository as it is in the site; its target becomes a part of the site."""
        name, _, anchor = link.partition("#")
        target = (source.parent / unquote(name)).resolve()
        if not name or "://" in link or not target.exists() or not target.is_relative_to(ROOT):
            return link  # what leads nowhere is reported by the builder
        if target == ROOT / "docs/decisions":
            target /= "README.md"
        self.todo.append(target)
        return relative(place_of(target), place_of(source)) + (f"#{anchor}" if anchor else "")

    def source_page(self, source: Path) -> str:
        """A file of the repository as a page."""
        data = source.read_bytes()
        text = data.decode("utf-8", "replace") if len(data) <= MAX_SHOWN_BYTES else "(a large file, see the repository)"
        return f"{NO_SEARCH}# {source.relative_to(ROOT)}\n\n{fenced(text, LANGUAGES.get(source.suffix, 'text'))}"

    def listing(self, folder: Path) -> str:
        """A folder of the repository as a page: its first lines, and its files."""
        lines = [f"{NO_SEARCH}# {folder.relative_to(ROOT)}", ""]
        for each in sorted(folder.iterdir()):
            if each.suffix in {".py", ".md"} and each.name != "__init__.py":
                lines.append(f"- [{each.name}]({self.link(folder / 'x', each.name)})")
        return "\n".join(lines) + "\n"


def place_of(source: Path) -> str:
    """Where a file or folder of the repository is in the site."""
    name = source.relative_to(ROOT)
    if source.is_dir():
        return f"source/{name}/index.md"
    if name == Path("README.md"):
        return "index.md"
    if name.parts[0] == "docs":
        return str(name.relative_to("docs")).replace("README.md", "index.md")
    if source.suffix == ".md" and len(name.parts) == 1:
        return name.name.lower()
    return f"source/{name}" if source.suffix in {*PICTURES, ".md"} else f"source/{name}.md"


def relative(target: str, page: str) -> str:
    """The way from one page of the site to another."""
    return str(Path(*[".."] * page.count("/")) / target)


# --- navigation ---


def read_navigation() -> Navigation:
    """docs/nav.toml: sections, and their pages with titles."""
    found: Navigation = tomllib.loads((ROOT / "docs/nav.toml").read_text("utf-8"))
    return found


def existing(navigation: Navigation, folder: Path) -> Navigation:
    """The pages that there are: a page may be named before it is written."""
    kept = {
        title: {page: name for page, name in pages.items() if (folder / page).is_file()}
        for title, pages in navigation.items()
    }
    return {title: pages for title, pages in kept.items() if pages}


def with_titles(pages: Mapping[str, str], folder: Path) -> list[dict[str, str]]:
    """Titles and pages; a page without a title of its own has that of its first heading."""
    return [{title or title_of((folder / page).read_text("utf-8")) or page: page} for page, title in pages.items()]


def configuration(navigation: Navigation, folder: Path) -> str:
    """The builder's settings: no fonts or scripts from elsewhere, and plain Markdown."""
    nav = [{title: with_titles(pages, folder)} for title, pages in existing(navigation, folder).items()]
    extensions = ("attr_list", "tables", "sane_lists", "pymdownx.superfences", "pymdownx.highlight")
    lines = [
        "[project]",
        'site_name = "qfleet"',
        'site_description = "Deep Q-learning from a laptop to a cluster"',
        f"docs_dir = {json.dumps(folder.name)}",
        'site_dir = "site"',
        "use_directory_urls = false",  # the pages can be read without a server
        f"nav = {inline_toml(nav)}",
        "[project.theme]",
        "font = false",  # the reader's own; others would come from the network
        'features = ["navigation.tabs", "navigation.top", "content.code.copy", "toc.follow"]',
        *palettes(),
        *(f"[project.markdown_extensions.{name}]" for name in extensions),
        "[project.markdown_extensions.toc]",
        "permalink = true",
        "toc_depth = 3",
    ]
    return "\n".join(lines) + "\n"


def palettes() -> list[str]:
    """A light and a dark look, by the reader's own setting and by a switch."""
    looks = (("default", "light", "slate", "lucide/sun"), ("slate", "dark", "default", "lucide/moon"))
    lines = []
    for scheme, preferred, other, icon in looks:
        lines += [
            "[[project.theme.palette]]",
            f'media = "(prefers-color-scheme: {preferred})"',
            f'scheme = "{scheme}"',
            f'toggle.icon = "{icon}"',
            f'toggle.name = "Switch to the {"dark" if other == "slate" else "light"} look"',
        ]
    return lines


def inline_toml(value: object) -> str:
    """Lists, tables and texts as one TOML value."""
    if isinstance(value, list):
        return "[" + ", ".join(map(inline_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {inline_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
