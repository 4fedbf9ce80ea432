"""Hostile workflow files: one clear error, the right exit code, nothing executed, nothing written outside, bounded."""

import os
from pathlib import Path

import pytest

from tests.hostile.cases.workflows import CASES, SAMPLE, WorkflowCase
from tests.hostile.commands import Server, broken, unsafe_output

pytestmark = pytest.mark.timeout(600)  # the server ends a command that takes too long
LIMIT_SECONDS = 20.0
EVIL = "import pathlib\npathlib.Path('executed').touch()\nclass Evil: pass\nW = Evil\n"


def make_place(root: Path, case: WorkflowCase) -> None:
    for name in ("home", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "evil.py").write_text(EVIL)
    (root / "logs.csv").write_text("obs,action,reward,terminated\n1,0,1,1\n")
    os.mkfifo(root / "pipe")
    with (root / "sparse.csv").open("wb") as file:
        file.truncate(1 << 42)
    (root / "workflow.toml").write_bytes(case.text.encode(errors="surrogateescape"))


def check(case: WorkflowCase, server: Server, root: Path) -> None:
    make_place(root, case)
    result = server.run(root, ["workflow", "workflow.toml", "--out", "out"], LIMIT_SECONDS)
    found = broken(result) + unsafe_output(result)
    found += ["executed"] if (root / "executed").exists() else []
    found += [f"stopped: {result.stopped}"] if result.stopped else []
    found += [] if result.code == case.code else [f"exit code {result.code}, not {case.code}"]
    lines = [line for line in result.err.splitlines() if line.startswith(("error: ", "  why: ", "   do: "))]
    found += [] if len(lines) == 3 else ["not one error of three parts"]
    found += [] if case.says in result.err else [f"does not say {case.says}"]
    found += [] if len(result.err) < 6_000 else [f"{len(result.err):,} characters"]
    found += ["a result"] if list(root.glob("out/*/manifest.json")) + list(root.glob("out/report.*")) else []
    assert not found, "\n".join([*found, result.err[:2_000], result.out[-400:]])


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SAMPLE], ids=lambda case: case.name)
def test_a_hostile_workflow_does_no_harm(case: WorkflowCase, server: Server, tmp_path: Path) -> None:
    check(case, server, tmp_path / "root")


@pytest.mark.slow
@pytest.mark.soak  # a suite of its own: hostile
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in SAMPLE], ids=lambda case: case.name)
def test_no_hostile_workflow_does_harm(case: WorkflowCase, server: Server, tmp_path: Path) -> None:
    check(case, server, tmp_path / "root")


def test_there_are_many_kinds() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40
    assert {case.name for case in CASES} >= set(SAMPLE)
