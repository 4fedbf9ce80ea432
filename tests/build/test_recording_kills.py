"""Killed while it is recorded: no step is missing or there twice; of one actor the data set is the unbroken one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qfleet.datasets.format import open_dataset
from tests.build.recording_child import STEPS
from tests.build.test_run_recorder import LANES
from tests.support.traced import require_traced

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def start(out: Path, runtime: str) -> "subprocess.Popen[bytes]":
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.build.recording_child", str(out), runtime]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def rows(out: Path) -> int:
    path = out / "run/metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def killed(child: "subprocess.Popen[bytes]", out: Path, more: int, seconds: float) -> bool:
    """Kill it a moment after it has written so many rows more; False if it ended before."""
    until = rows(out) + more
    limit = time.monotonic() + 60
    while rows(out) < until and child.poll() is None and time.monotonic() < limit:
        time.sleep(0.002)
    time.sleep(seconds)
    if child.poll() is None:
        os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    return child.returncode == -signal.SIGKILL


def survive(out: Path, runtime: str, kills: int) -> int:
    """Run under kills, then to the end; returns how many fell."""
    chance = random.Random(kills)
    fallen = 0
    for _ in range(kills):
        fallen += killed(start(out, runtime), out, chance.randrange(1, 15), chance.uniform(0, 0.05))
        assert not (out / "data/manifest.json").exists() or rows(out) > STEPS // 50
    child = start(out, runtime)
    try:
        _, said = child.communicate(timeout=240)
    finally:
        child.kill()
    assert child.returncode == 0, said.decode()
    return fallen


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.soak])])
def test_the_data_set_is_that_of_an_unbroken_run(tmp_path: Path, kills: int) -> None:
    survive(tmp_path / "whole", "inline", 0)
    assert survive(tmp_path / "broken", "inline", kills) >= 1
    versions = {open_dataset(str(tmp_path / name / "data")).version for name in ("whole", "broken")}
    assert len(versions) == 1
    require_traced(open_dataset(str(tmp_path / "broken/data")))


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.soak])])
def test_actors_in_processes(tmp_path: Path, kills: int) -> None:
    fallen = survive(tmp_path, "processes", kills)
    dataset = open_dataset(str(tmp_path / "data"))
    most = LANES * (fallen + 1)
    assert require_traced(dataset) <= most
    assert STEPS - most <= dataset.manifest.num_steps <= STEPS + LANES
