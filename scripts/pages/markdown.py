"""Markdown as GitHub reads it, made ready for the site's builder, which reads an older dialect."""

import re
from collections.abc import Callable, Iterator

FENCE = re.compile(r"^(```+|~~~+)")
COMMENT = re.compile(r"^[ ]*<!--.*?-->[ ]*\n?", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.*?)\s*$")
ITEM = re.compile(r"^(- |\* |\d+\. )")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pieces(text: str) -> Iterator[tuple[bool, list[str]]]:
    """Stretches of lines in their order: inside a fence or not, and the lines."""
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        mark = FENCE.match(line)
        if mark and not fence:
            yield False, lines
            fence = mark[1]
            lines = [line]
        elif fence and line.rstrip() == fence:
            yield True, [*lines, line]
            fence = ""
            lines = []
        else:
            lines.append(line)
    yield bool(fence), lines


def with_prose(text: str, change: Callable[[list[str]], list[str]]) -> str:
    """The page with its lines outside of fences changed."""
    changed = [lines if fenced else change(lines) for fenced, lines in pieces(text)]
    return "\n".join(line for lines in changed for line in lines) + "\n"


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def with_anchors(text: str) -> str:
    """Every heading with the anchor that it has on GitHub: the builder would make another of some."""
    seen: dict[str, int] = {}

    def anchored(line: str) -> str:
        found = HEADING.match(line)
        if not found or found[2].endswith("}"):
            return line
        name = slug(found[2])
        seen[name] = seen.get(name, -1) + 1
        number = f"-{seen[name]}" if seen[name] else ""
        return f"{line} {{: #{name}{number} }}"

    return with_prose(text, lambda lines: [anchored(line) for line in lines])


def with_blank_lines(text: str) -> str:
    """A blank line before every list and table: without one the builder takes them for the paragraph's next lines."""
    return with_prose(text, lambda lines: list(_separated(lines)))


def _separated(lines: list[str]) -> Iterator[str]:
    before = ""
    in_list = False
    for line in lines:
        item = bool(ITEM.match(line))
        if not before.strip() and line.strip() and not line.startswith((" ", "\t")):
            in_list = item
        starts_list = item and not in_list
        starts_table = line.startswith("|") and not before.startswith("|")
        if before.strip() and (starts_list or starts_table):
            yield ""
        in_list = in_list or item
        yield line
        before = line


def with_links(text: str, target: Callable[[str], str]) -> str:
    """The page with the target of each of its links changed."""
    return with_prose(text, lambda lines: [LINK.sub(lambda found: f"]({target(found[1])})", line) for line in lines])


def without_comments(text: str) -> str:
    """The page without comments, which are for its tests and generators."""
    return with_prose(text, lambda lines: COMMENT.sub("", "\n".join(lines)).split("\n"))


def title_of(text: str) -> str | None:
    """The first heading of a page."""
    for fenced, lines in pieces(text):
        found = [HEADING.match(line) for line in lines if not fenced]
        for heading in filter(None, found):
            return heading[2]
    return None


def fenced(text: str, language: str = "text") -> str:
    """Text as a block, inside a fence that it does not contain."""
    longest = max((len(found) for found in re.findall(r"`{3,}", text)), default=2)
    mark = "`" * (longest + 1)
    return f"{mark}{language}\n{text.rstrip()}\n{mark}\n"


def cell(text: str) -> str:
    """Text inside a table: one line, and no bar of its own."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table with these columns."""
    lines = [head, tuple("---" for _ in head), *(tuple(cell(each) for each in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
