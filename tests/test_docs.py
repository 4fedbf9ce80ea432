"""What the pages for strangers say is true: what they show is printed, their quotes, links and plan paths exist."""

import re
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from qfleet import errors
from qfleet.cli import main
from qfleet.cli.app import app
from qfleet.plan.paths import index, parse
from qfleet.plan.presets.catalog import algorithm_presets, environment_presets
from qfleet.training.process.forward_signals import ENDINGS
from tests.support.pages import BLOCKS, PAGES, ROOT, TINY, Block, blocks_of, prose_of

PATH = re.compile(r"(?<!`)`([a-z]+(?:\.[a-z_]+)*)(?:=([^`]*))?`(?!`)")
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, as a newcomer has one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


# --- what is shown ---


def shape(line: str) -> str:
    """A line of output without its numbers and without the folder it speaks of."""
    return NUMBER.sub("N", re.sub(r"runs/\S+", "RUN", line))


def test_the_output_shown_first_is_what_the_command_prints(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLEET_PROGRAM", "scripts/qfleet")  # as that script does
    shown = next(block.text for block in blocks_of(ROOT / "README.md") if block.language == "text")
    assert main(["train", "CartPole-v1", *TINY, "until.score=1"]) == 0  # a score that the first evaluation has
    printed = capsys.readouterr().out.splitlines()
    wanted = [line for line in shown.splitlines() if line != "..."]
    assert printed[0].startswith(wanted[0])
    shapes = {shape(line) for line in printed}
    assert not [line for line in wanted[1:] if shape(line) not in shapes], "\n".join(printed)


def test_errors_shown_are_what_is_printed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = next(block.text for block in BLOCKS if block.text.startswith("error:"))
    assert main(["train", "CartPole-v1", "algo.nstep=3"]) == 2
    assert capsys.readouterr().err == shown


def test_the_check_shown_is_what_is_printed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = next(block.text for block in blocks_of(ROOT / "docs/worlds.md") if block.text.startswith("made "))
    assert main(["env", "check", "CartPole-v1"]) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_every_exit_code_is_listed() -> None:
    table = (ROOT / "README.md").read_text("utf-8").partition("## Exit codes")[2].partition("\n## ")[0]
    listed = {int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in cell.split(",")}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.QfleetError)]
    killed = 128 + signal.SIGKILL
    assert listed == {0, killed, *(kind.exit_code for kind in kinds), *(code for _, code in ENDINGS.values())}


def test_every_preset_is_listed() -> None:
    table = (ROOT / "README.md").read_text("utf-8").partition("| presets |")[2].partition("\n\n")[0]
    assert re.findall(r"`([\w-]+)`", table) == [*algorithm_presets(), *environment_presets()]


def test_every_axis_is_in_the_table_of_algorithms() -> None:
    table = (ROOT / "docs/algorithms.md").read_text("utf-8").partition("| axis |")[2].partition("\n\n")[0]
    rooms = ("algo.", "net.", "replay", "steer.")
    axes = {f"{section}.type" for section in index().choices if section.startswith(rooms)}
    axes |= {path for path in index().paths() if path.startswith("population.")}
    axes |= {"algo.rescale", "algo.n_step", "steer.stop_patience"}
    assert axes <= set(re.findall(r"`([\w.]+)`", table))
    assert "`algo.bonus.type` | [learn/count_bonus.py]" in table


def test_what_is_said_not_to_exist_does_not() -> None:
    status = (ROOT / "README.md").read_text("utf-8").partition("## Status")[2]
    missing = status.partition("not exist yet:")[2].partition(".")[0]
    absent = (
        "offline losses",
        "importers",
        "model parallel",
        "export",
        "serving",
        "dashboard",
        "planner",
        "tuning",
        "clouds",
    )
    absent += ("recipes", "federation", "remote storage", "elasticity", "nodes that come while a run goes on")
    assert not [word for word in absent if word not in missing]
    assert not {"serve", "export", "tune", "dashboard", "cloud"} & set(app)  # or else the list is out of date
    assert index().choices["runtime"].names == ["inline", "processes", "ray"]
    there = ("distributional", "noisy", "recurrent", "n-step", "population", *algorithm_presets())
    assert not [word for word in there if word in missing]


def test_the_run_directory_is_as_drawn(place: Path) -> None:
    drawn = next(block.text for block in BLOCKS if block.text.startswith("runs/cartpole-double-n5-0001/"))
    assert main(["train", "CartPole-v1", "--quiet", *TINY]) == 0
    names = re.findall(r"\b[a-z]+\.(?:toml|jsonl|json|md|safetensors)\b", drawn.replace("--plan run.toml", ""))
    made = {path.name for path in place.rglob("runs/cartpole-double-n5-0001/**/*") if path.is_file()}
    assert {name for name in made if not name.endswith(".zst")} == set(names)


# --- quotes, links, plan paths, pictures ---


def misquoted(block: Block) -> Iterator[str]:
    """The first line of a quotation that its file does not hold, in this order and whatever its indentation."""
    lines = iter((ROOT / block.source).read_text("utf-8").splitlines())
    for quoted in filter(None, map(str.strip, block.text.splitlines())):
        if not any(line.strip() == quoted for line in lines):
            yield f"{block.page.name} quotes {block.source}: {quoted}"
            return


def test_quotes_are_true() -> None:
    quotes = [block for block in BLOCKS if block.source]
    assert len(quotes) > 5
    assert not [wrong for block in quotes for wrong in misquoted(block)]


@pytest.mark.parametrize("text", ["class Batch:\nclass Rollout:\n", "class Rollouts:\n"])
def test_a_false_quote_is_seen(text: str) -> None:
    assert list(misquoted(Block(ROOT / "README.md", "", "python", "qfleet/data/types.py", text)))


def anchors_of(page: Path) -> set[str]:
    """The fragments GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if "://" in target:
            continue
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            yield f"{page.name}: {target}"


def test_links_and_their_anchors_lead_somewhere() -> None:
    assert not [link for page in PAGES for link in broken_links(page, prose_of(page))]


def test_a_broken_anchor_is_seen() -> None:
    text = "[a](README.md#python) [b](README.md#perl) [c](gone.md) [d](https://example.org/x)"
    assert list(broken_links(ROOT / "README.md", text)) == ["README.md: README.md#perl", "README.md: gone.md"]


def fits(path: str, value: str) -> bool:
    """Does some variant of this setting take the value?"""
    section = path.removesuffix(".type")
    if path.endswith(".type"):
        return value in index().choices[section].names
    for leaf in index().leaves[path]:
        try:
            parse(value, leaf.hint)
        except ValueError:
            continue
        return True
    return False


def unknown_settings(text: str) -> Iterator[str]:
    """Backticked plan paths that do not exist, or values that they do not take."""
    for path, value in PATH.findall(text):
        if path.partition(".")[0] not in index().sections[""] or path in index().sections:
            continue
        if path.startswith(("env.options", "env.secrets")) or path.endswith((".safetensors", ".json", ".toml")):
            continue
        if path not in index().paths() or (value and not fits(path, value)):
            yield f"{path}={value}" if value else path


def test_plan_paths_exist_and_take_the_values_shown() -> None:
    assert not [f"{page.name}: {wrong}" for page in PAGES for wrong in unknown_settings(prose_of(page))]


def test_a_wrong_plan_path_is_seen() -> None:
    text = "`algo.n_step=3` `algo.nstep` `replay.sampler.type=best` `net.torso` `env.num=many` `run.path` `seed=7`"
    assert list(unknown_settings(text)) == ["algo.nstep", "replay.sampler.type=best", "env.num=many"]


def test_the_picture_of_the_data_flow_names_its_packages() -> None:
    picture = ElementTree.parse(ROOT / "docs/pictures/data-flow.svg")  # noqa: S314  (our own file)
    words = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"envs", "act", "replay", "learn", "Rollout", "Batch", "weights", "priorities"} <= words
    assert all((ROOT / "qfleet" / package).is_dir() for package in ("envs", "act", "replay", "learn"))


def test_the_package_says_what_the_readme_says() -> None:
    description = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["description"]
    claim = description.partition(",")[0]
    assert claim == "Deep Q-learning from a laptop to a cluster"
    assert claim in (ROOT / "README.md").read_text("utf-8")[:300]


def test_the_files_of_one_run_can_be_read_in_an_afternoon() -> None:
    tour = (ROOT / "docs" / "tour.md").read_text()
    table = tour[tour.index("## The files of one inline run") : tour.index("## 0. Before")]
    files = re.findall(r"\]\(\.\./(qfleet/[^)]+)\)", table)
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    assert 20 <= len(files) == len(set(files)) <= 25
    assert lines <= 5_000
