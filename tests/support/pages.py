"""The pages of the documentation, and the pieces of them that can be run.

A comment just before a block says how it is tested: `<!-- test: WORD reason -->`.

| word | meaning |
| --- | --- |
| skip | it is not run; the reason says why |
| slow | it is run in the slow suite only |
| dry | commands that train have their plan checked; in the slow suite they are run with --dry-run |
| steps N | training is cut to N steps, in commands and in Python |
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"(?:^<!-- test: ([^\n]+?) -->\n)?^```(\S*)[ ]*(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORDS = {"skip", "slow", "dry", "steps"}
# Long enough for updates, evaluations and a checkpoint; short enough for a test.
TINY = [
    "--steps=600",
    "algo.learn_start_steps=200",
    "algo.batch_size=8",
    "replay.samples_per_insert=1",
    "eval.every_steps=300",
    "eval.episodes=2",
    "eval.test_episodes=2",
]


class Block(NamedTuple):
    """A fenced piece of a page: ```LANGUAGE SOURCE, and how it is tested."""

    page: Path
    how: str
    language: str
    source: str
    text: str

    @property
    def word(self) -> str:
        """How it is tested."""
        return self.how.partition(" ")[0]

    @property
    def reason(self) -> str:
        """What follows the word."""
        return self.how.partition(" ")[2].strip()

    @property
    def name(self) -> str:
        """The page and the first line, for messages."""
        return f"{self.page.name}: {self.text.strip().partition(chr(10))[0]}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced pieces of a page."""
    return [Block(page, *found) for found in FENCE.findall(page.read_text("utf-8"))]


def prose_of(page: Path) -> str:
    """The page without them."""
    return FENCE.sub("", page.read_text("utf-8"))


def lines_of(block: Block) -> list[str]:
    """The commands of a block: without comments, and with lines that end in a backslash joined."""
    joined = block.text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in joined if line.strip() and not line.lstrip().startswith("#")]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
