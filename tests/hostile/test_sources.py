"""Hostile sources of `data import`: one clear error, the right exit code, nothing executed, bounded memory and time."""

from pathlib import Path

import pytest

from tests.hostile.cases.sources import CASES, SourceCase, parquet, transitions
from tests.hostile.commands import CommandResult, Server, broken, unsafe_output

pytestmark = pytest.mark.timeout(600)  # the server ends a command that takes too long
LIMIT_SECONDS = 20.0
LIMIT_GROWTH_MEGABYTES = 400  # above the import of a small good file; an honest source may take more
SAMPLE = ("parquet-bomb-lists", "arrow-size-lies", "csv-columns", "minari-external", "parquet-pickled")


def make_root(root: Path) -> Path:
    for name in ("home", "tmp"):
        (root / name).mkdir(parents=True)
    return root


def run(server: Server, root: Path, file: str) -> CommandResult:
    return server.run(root, ["data", "import", file, "set"], LIMIT_SECONDS)


@pytest.fixture(scope="session")
def good(server: Server, tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    """What the command does with a good source."""
    root = make_root(tmp_path_factory.mktemp("good") / "root")
    parquet(transitions)(root / "source.parquet")
    result = run(server, root, "source.parquet")
    assert result.code == 0, result
    return result


def violations(case: SourceCase, result: CommandResult, good: CommandResult, root: Path) -> list[str]:
    """What the command did that it must not do."""
    found = broken(result) + unsafe_output(result)
    found += [f"audit: {line}" for line in result.audit if not line.startswith("start") or str(root) in line]
    found += ["executed"] if (root / "executed").exists() else []
    found += [f"stopped: {result.stopped}"] if result.stopped else []
    found += [] if result.code == case.code else [f"exit code {result.code}, not {case.code}: {result.err[-400:]!r}"]
    if result.megabytes - good.megabytes > LIMIT_GROWTH_MEGABYTES:
        found.append(f"held {result.megabytes} MB, and {good.megabytes} MB of a good one")
    lines = [line for line in result.err.splitlines() if line.startswith(("error: ", "  why: ", "   do: "))]
    found += [] if len(lines) == 3 else [f"not one error of three parts: {result.err!r}"]
    found += [] if case.text in result.err and len(result.err) < 3_000 else [f"does not say {case.text}: {result.err}"]
    return found + (["published"] if (root / "set" / "manifest.json").exists() else [])


def check(case: SourceCase, server: Server, good: CommandResult, root: Path) -> None:
    make_root(root)
    case.make(root / case.file)
    found = violations(case, run(server, root, case.file), good, root)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SAMPLE], ids=lambda case: case.name)
def test_a_hostile_source_does_no_harm(case: SourceCase, server: Server, good: CommandResult, tmp_path: Path) -> None:
    check(case, server, good, tmp_path / "root")


@pytest.mark.slow
@pytest.mark.soak  # a suite of its own: hostile
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in SAMPLE], ids=lambda case: case.name)
def test_no_hostile_source_does_harm(case: SourceCase, server: Server, good: CommandResult, tmp_path: Path) -> None:
    check(case, server, good, tmp_path / "root")


def test_there_are_many_kinds() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40
