"""Hostile data sets x every command that reads one: one clear error, the right exit code, nothing executed, bounded."""

import shutil
from pathlib import Path

import pytest

from qfleet.data import Spec
from tests.hostile.cases.data_sets import ALL, CASES, DataCase
from tests.hostile.commands import CommandResult, Server, broken, unsafe_output
from tests.support.recorded import make_dataset

pytestmark = pytest.mark.timeout(600)  # the server ends a command that takes too long
LIMIT_SECONDS = 20.0
LIMIT_GROWTH_MEGABYTES = 250  # above the same command on the good data set
LEARN = "replay.type=dataset replay.split=all algo.batch_size=8 net.torso.type=mlp net.torso.sizes=[8] eval.episodes=0"
COMMANDS = {
    "inspect": ["data", "inspect", "set"],
    "validate": ["data", "validate", "set"],
    "prepare": ["data", "prepare", "set", "ready"],
    "train": ["train", "CartPole-v1", "--steps", "64", "replay.path=set", *LEARN.split(), "eval.test_episodes=0"],
}
SAMPLE = ("manifest-deep-field", "index-two-ids", "data-is-fifo", "data-nan", "bomb-lying-footer", "texts-escapes")


def make_good(root: Path) -> Path:
    for name in ("home", "tmp"):
        (root / name).mkdir(parents=True)
    make_dataset(root / "set", [5] * 12, env_id="CartPole-v1", spec=Spec((4,), "float32", (2,)))
    return root / "set"


def run(server: Server, root: Path, name: str) -> CommandResult:
    for made in ("ready", "runs"):
        shutil.rmtree(root / made, ignore_errors=True)
    return server.run(root, COMMANDS[name], LIMIT_SECONDS)


@pytest.fixture(scope="session")
def good(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CommandResult]:
    """What each command does with a good data set."""
    root = tmp_path_factory.mktemp("good")
    make_good(root)
    found = {name: run(server, root, name) for name in COMMANDS}
    assert {name: result.code for name, result in found.items()} == dict.fromkeys(COMMANDS, 0), found
    return found


def violations(case: DataCase, name: str, result: CommandResult, good: CommandResult, root: Path) -> list[str]:
    """What a command did that it must not do."""
    expected = 5 if name in case.refused_by else 0
    found = broken(result) + unsafe_output(result)
    found += [f"audit: {line}" for line in result.audit if not line.startswith("start") or str(root) in line]
    found += ["executed"] if (root / "executed").exists() else []
    found += [f"stopped: {result.stopped}"] if result.stopped else []
    if result.code != expected:
        found.append(f"exit code {result.code}, not {expected}: {(result.err or result.out)[-400:]!r}")
    if result.megabytes - good.megabytes > LIMIT_GROWTH_MEGABYTES:
        found.append(f"held {result.megabytes} MB, and {good.megabytes} MB of a good one")
    if expected:
        lines = [line for line in result.err.splitlines() if line.startswith(("error: ", "  why: ", "   do: "))]
        found += [] if len(lines) == 3 else [f"not one error of three parts: {result.err!r}"]
        found += (
            [] if case.text in result.err and len(result.err) < 3_000 else [f"does not say {case.text}: {result.err}"]
        )
        found += ["published"] if (root / "ready" / "manifest.json").exists() else []
    return [f"{name}: {text}" for text in found]


def check(case: DataCase, server: Server, good: dict[str, CommandResult], root: Path) -> None:
    case.change(make_good(root))
    found = [text for name in ALL for text in violations(case, name, run(server, root, name), good[name], root)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SAMPLE], ids=lambda case: case.name)
def test_a_hostile_data_set_does_no_harm(
    case: DataCase, server: Server, good: dict[str, CommandResult], tmp_path: Path
) -> None:
    check(case, server, good, tmp_path / "root")


@pytest.mark.slow
@pytest.mark.soak  # a suite of its own: hostile
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in SAMPLE], ids=lambda case: case.name)
def test_no_hostile_data_set_does_harm(
    case: DataCase, server: Server, good: dict[str, CommandResult], tmp_path: Path
) -> None:
    check(case, server, good, tmp_path / "root")


def test_there_are_many_kinds() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 30
