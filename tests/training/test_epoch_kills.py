"""Killed in mid-epoch: each transition is used exactly once per epoch, and one learner ends with the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from qfleet.save import Checkpoints
from tests.support.recorded import make_dataset

pytestmark = pytest.mark.chaos

LENGTHS = [101, 57, 240, 33, 160, 9, 200]  # 800 transitions: 50 batches of 16
EPOCHS = 6
ROOT = Path(__file__).parents[2]


def start(data: Path, out: Path, num_learners: int) -> "subprocess.Popen[bytes]":
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.training.epoch_child", str(data), str(out), str(num_learners), str(EPOCHS)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def size(out: Path) -> int:
    path = out / "positions"
    return path.stat().st_size if path.exists() else 0


def killed(child: "subprocess.Popen[bytes]", out: Path, bytes_more: int) -> bool:
    """Kill it once it has noted so much more; False if it ended before."""
    until = size(out) + bytes_more
    limit = time.monotonic() + 120
    while size(out) < until and child.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.001)
    if child.poll() is None:
        os.kill(child.pid, signal.SIGKILL)
    return child.wait(60) == -signal.SIGKILL


def used(out: Path) -> list[tuple[int, int]]:
    """The batches of the history that counts: going back drops those after the position."""
    found: list[tuple[int, int]] = []
    for line in (out / "positions").read_text().splitlines():
        word, *numbers = line.split()
        if word == "back":
            found = [each for each in found if each[1] <= int(numbers[0])]
        else:
            found.append((int(numbers[0]), int(numbers[1])))
    return found


def weights(out: Path) -> bytes:
    return Checkpoints(out / "run/checkpoints", writer=False).newest().read("model.safetensors")


def survive(data: Path, out: Path, num_learners: int, kills: int) -> int:
    """Run under kills, then to the end; returns how many fell."""
    chance = random.Random(num_learners)
    fallen = 0
    for _ in range(kills):
        child = start(data, out, num_learners)
        fallen += killed(child, out, chance.randrange(8, 900))
    child = start(data, out, num_learners)
    _, said = child.communicate(timeout=240)
    assert child.returncode == 0, said.decode()
    counts = Counter(position for begin, end in used(out) for position in range(begin, end))
    assert counts == Counter(range(800 * EPOCHS))
    return fallen


@pytest.mark.parametrize(
    ("num_learners", "kills"),
    [(1, 3), (2, 2), *(pytest.param(num, 30, marks=[pytest.mark.slow, pytest.mark.soak]) for num in (1, 2, 3))],
)
def test_each_transition_is_used_once_per_epoch(tmp_path: Path, num_learners: int, kills: int) -> None:
    make_dataset(tmp_path / "data", LENGTHS, file_bytes=3_000)
    assert survive(tmp_path / "data", tmp_path / "killed", num_learners, kills) > 0
    if num_learners == 1:
        survive(tmp_path / "data", tmp_path / "whole", 1, 0)
        assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
