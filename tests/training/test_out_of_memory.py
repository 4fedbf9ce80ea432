"""Real processes in a control group with little memory: the kernel kills one, and the run says so and goes on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from qfleet.watch import read_rows

ROOT = Path(__file__).parents[2]
GROUPS = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
# An environment that takes hold of memory in one process, once: the file says that it was done.
GREEDY = """
import multiprocessing
import os
import gymnasium as gym
import numpy as np


class Greedy(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    held = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 40 and self.first():
            while True:
                self.held.append(np.ones(1 << 22))
        return np.zeros(1, np.float32), 1.0, False, self.steps >= 50, {}

    def first(self):
        if not multiprocessing.current_process().name.startswith("qfleet-actor"):
            return False
        try:
            os.close(os.open(os.environ["GREEDY_ONCE"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 2 GiB; a process joins it by writing its number into `cgroup.procs`."""
    for place, limit in GROUPS.items():
        made = place / f"qfleet-test-{os.getpid()}"
        try:
            made.mkdir()
            (made / limit).write_text(str(2 << 30))
        except OSError:
            with suppress(OSError):
                made.rmdir()
            continue
        yield made
        until = time.monotonic() + 10
        while made.exists() and time.monotonic() < until:
            with suppress(OSError):
                made.rmdir()
            time.sleep(0.1)
        return
    pytest.skip("no control group with a memory limit can be made here")


@pytest.mark.slow
@pytest.mark.chaos
def test_an_actor_that_is_killed_for_lack_of_memory_is_replaced_and_the_cause_is_reported(
    group: Path, tmp_path: Path
) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    words = ["train", "greedy.py:Greedy", "--steps", "20000", "runtime.type=processes", "runtime.inference=local"]
    words += ["actors.num=2", "env.num=2", "eval.episodes=0", "eval.test_episodes=0", "algo.learn_start_steps=200"]
    join = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -P -m qfleet {' '.join(words)}"
    environment = {**os.environ, "GREEDY_ONCE": str(tmp_path / "once"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", join], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "once").exists(), "the environment did take the memory"
    (run,) = (tmp_path / "runs").iterdir()
    lost = [row for row in read_rows(run / "events.jsonl") if "lack of memory" in json.dumps(row)]
    assert lost, (run / "events.jsonl").read_text()
    assert json.loads((run / "status.json").read_text())["state"] == "done"
