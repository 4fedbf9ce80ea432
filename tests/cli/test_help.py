import subprocess
import sys

import pytest

from qfleet.cli import main

VERBS = [
    "",
    "train",
    "resume",
    "eval",
    "play",
    "record",
    "plot",
    "compare",
    "verify",
    "runs",
    "runs list",
    "runs show",
    "runs diff",
    "runs rm",
    "plan",
    "plan show",
    "plan check",
    "plan schema",
    "presets",
    "env",
    "env list",
    "env check",
    "doctor",
    "completion",
    "completion install",
    "completion show",
]

LOOK = """
import sys
from qfleet.cli import main
for verb in sys.stdin.read().splitlines():
    code = main([*verb.split(), "--help"])
    heavy = [name for name in ("torch", "numpy", "gymnasium", "matplotlib", "numba") if name in sys.modules]
    if code or heavy:
        sys.exit(f"{verb}: exit code {code}, imported {heavy}")
"""


def test_no_help_imports_anything_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK], input="\n".join(VERBS), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: qfleet {verb}".rstrip() in shown
    assert "Example" in shown or "First steps" in shown
    assert f"  qfleet {verb.removesuffix(' list')}".rstrip() in shown.split("Example")[-1]


def test_the_first_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f" {verb} " in shown for verb in VERBS if verb and " " not in verb)
    assert "Exit codes: 0 done" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        ("eval", "--episodes"),
        ("eval", "--seed"),
        ("record", "--episodes"),
        ("play", "--episodes"),
        ("play", "--fps"),
        ("train", "--seeds"),
        ("train", "--seed"),
        ("train", "--steps"),
        ("resume", "--steps"),
    ],
)
def test_numbers_are_shown_as_numbers(verb: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f" {option} N " in capsys.readouterr().out
