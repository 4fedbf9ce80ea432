"""The seed decides: one command, many times, under changing load, with empty and full caches."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qfleet.watch import read_json, read_rows
from tests.support.runs import Settings, checkpoints, events, hashes, settings

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(2_400)]

TIMES = 20
SHORT: Settings = {"until.steps": 600, "eval.every_steps": 200, "eval.episodes": 3, "eval.test_episodes": 3}
# Long enough to be measured for, but any score ends it at its first evaluation.
MEASURED: Settings = {
    **SHORT,
    "until.steps": 200_000,
    "until.score": 1,
    "runtime.compile": None,
    "runtime.threads": None,
}


def command(out: Path, changes: Settings) -> list[str]:
    """The words of one run."""
    shown = {path: list(value) if isinstance(value, tuple) else value for path, value in settings(changes).items()}
    return ["train", "CartPole-v1", "--quiet", "--out", str(out), *(f"{path}={value}" for path, value in shown.items())]


def run_it(words: list[str], out: Path, cache: Path) -> Path:
    """Run a command line in a process of its own; the folder of its run."""
    home = {**os.environ, "XDG_CACHE_HOME": str(cache), "XDG_STATE_HOME": str(out / "state")}
    subprocess.run([sys.executable, "-m", "qfleet", *words], check=True, env=home, timeout=300, capture_output=True)
    (status,) = out.glob("*/status.json")
    return status.parent


@contextmanager
def load(num: int) -> Iterator[None]:
    """So many processes that only compute, meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def repeated(tmp_path: Path, changes: Settings) -> list[Path]:
    """TIMES runs of one command: every other one with an empty cache, under none to three busy processes."""
    found = []
    for number in range(TIMES):
        out = tmp_path / f"out{number}"
        cache = tmp_path / ("full" if number % 2 else f"empty{number}")
        with load(number % 4):
            found.append(run_it(command(out, changes), out, cache))
    return found


def weights(run: Path) -> str:
    """A hash of what was learned."""
    return hashes(checkpoints(run)[-1])["model.safetensors"]


def test_a_run_that_is_not_measured_for_has_one_hash(tmp_path: Path) -> None:
    runs = repeated(tmp_path, {**SHORT, "runtime.compile": None, "runtime.threads": None})
    assert {weights(run) for run in runs} == {weights(runs[0])}
    assert [read_json(run / "status.json")["not_exact"] for run in runs] == [[]] * TIMES


def test_a_run_that_is_measured_for_says_so_before_its_first_row_and_its_plan_has_one_hash(tmp_path: Path) -> None:
    runs = repeated(tmp_path, MEASURED)
    for run in runs:
        (reason,) = read_json(run / "status.json")["not_exact"]
        assert reason.startswith("a measurement of this machine chose runtime.")
        assert read_json(run / "provenance.json")["not_exact"] == [reason]
        first = events(run, "warning")[0]
        assert (first["text"], first["env_steps"]) == (f"not exact: {reason}", 0)
        assert read_rows(run / "metrics.jsonl")[0]["env_steps"] > 0
    for number, source in enumerate((runs[0], runs[-1])):
        with load(number * 2):
            out = tmp_path / f"again{number}"
            words = ["train", "--plan", str(source / "run.toml"), "--quiet", "--out", str(out)]
            again = run_it(words, out, tmp_path / f"other{number}")
        assert weights(again) == weights(source)
        assert read_json(again / "status.json")["not_exact"] == []
