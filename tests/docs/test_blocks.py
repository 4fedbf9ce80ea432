"""Every block of every page is run, quoted from the source, or left out with a reason (tests/support/pages.py)."""

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest

from qfleet.cli import main
from qfleet.plan import read_toml
from tests.support.pages import BLOCKS, PAGES, ROOT, TINY, WORDS, Block, blocks_of, lines_of

FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|toml))\n")
BIG = re.compile(r"^(ALE|MinAtar|LunarLander|Pendulum|Acrobot)")
STEPS = re.compile(r'("until\.steps": |\bsteps=)[\d_]+')
INSTALL = re.compile(r'pip install ("?)[^"\[]*(?:\[([\w,]+)\])?\1')
RUNNABLE = [page for page in PAGES if any(block.language in ("sh", "python", "toml") for block in blocks_of(page))]
SLOW = [page for page in RUNNABLE if any(block.word in ("slow", "dry") for block in blocks_of(page))]


# --- commands ---


def shortened(words: list[str], block: Block, thorough: bool) -> list[str]:
    """The same command, tiny: fewer steps and episodes; a large world only as far as its plan."""
    short = list(words)
    for option, value in (("--steps", block.reason if block.word == "steps" else "900"), ("--episodes", "2")):
        if option in short:
            short[short.index(option) + 1] = value
    if short[0] != "train" or "--dry-run" in short:
        return short
    if block.word == "dry" and not thorough and {word for word in short if word.startswith("--")} <= {"--preset"}:
        return ["plan", "check", *short[1:]]
    if BIG.match(short[1]) or block.word == "dry":
        return [*short, "--dry-run"]
    if "--steps" in short:
        at = short.index("--steps")
        del short[at : at + 2]
    if any(word.startswith("learners.schedule=") for word in short):
        # More updates, so that every entry of the schedule comes.
        more = {"--steps=600": "--steps=1200", "replay.samples_per_insert=1": "replay.samples_per_insert=8"}
        return [*short, *(more.get(word, word) for word in TINY)]
    steps = [f"--steps={block.reason}"] if block.word == "steps" else []
    return [*short, *TINY, *steps]


def is_qfleet(line: str) -> bool:
    return line.startswith(("qfleet ", "scripts/qfleet "))


def run_command(line: str, block: Block, thorough: bool = False) -> None:
    """Run a command of qfleet; `> FILE` gets what it prints."""
    words = shlex.split(line, comments=True)[1:]
    if ">" in words:
        at = words.index(">")
        said = StringIO()
        with redirect_stdout(said):
            code = main(shortened(words[:at], block, thorough))
        Path(words[at + 1]).write_text(said.getvalue())
    else:
        code = main(shortened(words, block, thorough))
    assert code == 0, f"{block.page.name}: {line}"


def other_command(line: str) -> str | None:
    """Why a line that is not a command of qfleet cannot be left as it is."""
    first = line.split()[0]
    if first.startswith("scripts/"):
        return None if (ROOT / first).is_file() else f"{first} does not exist"
    if found := INSTALL.match(line):
        known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        unknown = [extra for extra in (found[2] or "").split(",") if extra and extra not in known]
        return f"there is no extra {', '.join(unknown)}" if unknown else None
    return "it is not run; say why: <!-- test: skip REASON -->"


# --- Python ---


class PageRunner:
    """Runs the blocks of one page in their order, as the cells of a notebook: later ones see names of earlier ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = ModuleType("__main__")
        self.num_blocks = 0
        self.thorough = False  # in the slow suite

    def run(self, block: Block) -> None:
        """Write a block that bears a file's name; run every other."""
        named = FILE_NAME.match(block.text)
        if named:
            (self.folder / named[1]).write_text(block.text)
        elif block.language == "python" and not block.source:
            self.run_python(block)
        elif block.language == "sh":
            for line in lines_of(block):
                if is_qfleet(line):
                    run_command(line, block, self.thorough)

    def run_python(self, block: Block) -> None:
        text = STEPS.sub(rf"\g<1>{block.reason}", block.text) if block.word == "steps" else block.text
        self.num_blocks += 1
        file = self.folder / f"block_{self.num_blocks}.py"
        file.write_text(text)  # for tracebacks, and for the hash of what it defines
        exec(compile(text, str(file), "exec"), vars(self.module))  # noqa: S102


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PageRunner:
    """A folder to work in, as a newcomer has one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = PageRunner(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", made.module)
    return made


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUNNABLE, ids=page_id)
def test_blocks_run_in_the_order_they_are_read(page: Path, runner: PageRunner) -> None:
    for block in blocks_of(page):
        if block.word not in ("skip", "slow"):
            runner.run(block)


@pytest.mark.slow
@pytest.mark.site
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", SLOW, ids=page_id)
def test_slow_blocks_run_as_well(page: Path, runner: PageRunner) -> None:
    runner.thorough = True
    for block in blocks_of(page):
        if block.word != "skip":
            runner.run(block)


# --- nothing is forgotten ---


def untested(block: Block) -> Iterator[str]:
    """Why a block is neither tested nor left out with a reason."""
    if block.how and block.word not in WORDS:
        yield f"{block.name}: nobody knows the word {block.word}"
    if block.word in ("skip", "slow") and len(block.reason.split()) < 3:
        yield f"{block.name}: {block.word} needs a reason of a few words"
    if block.word == "steps" and not block.reason.isdigit():
        yield f"{block.name}: steps needs a number"
    if block.word == "skip":
        return
    if block.language == "sh":
        found = ((line, other_command(line)) for line in lines_of(block) if not is_qfleet(line))
        yield from (f"{block.name}: {line}: {why}" for line, why in found if why)
    elif block.language in ("text", ""):
        lost = [line for line in block.text.splitlines() if is_qfleet(line)]
        yield from (f"{block.name}: {line}: a command belongs into a block ```sh" for line in lost)
    elif block.language == "toml":
        tomllib.loads(block.text)
    elif block.language != "python":
        yield f"{block.name}: nobody knows the language {block.language}"


def test_every_block_is_tested_or_left_out_with_a_reason() -> None:
    assert not [why for block in BLOCKS for why in untested(block)]


def test_no_block_is_hidden_by_its_indentation() -> None:
    lost = [f"{page.name}: {line}" for page in PAGES for line in page.read_text("utf-8").splitlines() if "```" in line]
    assert not [line for line in lost if not re.search(r": ```", line)]


def block(language: str, text: str, how: str = "", source: str = "") -> Block:
    return Block(ROOT / "page.md", how, language, source, text)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (block("sh", "make all\n"), "it is not run"),
        (block("sh", "scripts/nothing\n"), "does not exist"),
        (block("sh", 'pip install "qfleet[everything]"\n'), "no extra everything"),
        (block("sh", "make all\n", "skip because"), "needs a reason"),
        (block("sh", "make all\n", "later it is long"), "nobody knows the word"),
        (block("python", "1\n", "steps few"), "needs a number"),
        (block("rust", "1\n"), "nobody knows the language"),
        (block("text", "qfleet runs\n"), "belongs into a block"),
        (block("", "scripts/qfleet runs\n"), "belongs into a block"),
    ],
)
def test_a_block_that_nobody_tests_is_seen(wrong: Block, why: str) -> None:
    assert [each for each in untested(wrong) if why in each]


@pytest.mark.parametrize(
    "right",
    [
        block("sh", "scripts/test tests/plan\nqfleet runs  # all of them\n# a comment\n"),
        block("sh", 'pip install "qfleet[ray,box2d]"\npip install -e .\n'),
        block("sh", "make all\n", "skip it needs a compiler"),
        block("text", "$ qfleet runs\nnone\n"),
        block("python", "1\n", "steps 600"),
    ],
)
def test_a_block_that_is_right_is_let_pass(right: Block) -> None:
    assert not list(untested(right))


def test_a_command_that_fails_is_seen(runner: PageRunner) -> None:
    with pytest.raises(AssertionError, match=r"algo\.nstep"):
        runner.run(block("sh", "scripts/qfleet train CartPole-v1 algo.nstep=3\n"))


def test_code_that_fails_is_seen(runner: PageRunner) -> None:
    with pytest.raises(AssertionError):
        runner.run(block("python", "assert 1 == 2\n"))


def test_later_blocks_see_the_names_of_earlier_ones(runner: PageRunner) -> None:
    runner.run(block("python", "answer = 42\n"))
    runner.run(block("python", "assert answer == 42\nsteps=900\n", "steps 7"))
    assert vars(runner.module)["steps"] == 7


def test_toml_blocks_with_a_name_become_files(runner: PageRunner) -> None:
    runner.run(block("toml", "# my.toml\n[algo]\nn_step = 3\n"))
    assert read_toml(runner.folder / "my.toml") == {"algo": {"n_step": 3}}
