"""Training in a real kernel: progress in the cell, interrupts, threads, and classes that a cell defines."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.kernel import run_cells

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BEGIN = """
import os, signal, threading
import gymnasium, numpy as np
from qfleet import Plan, load, resume, resume_group, train, train_group
SMALL = {"env.num": 4, "algo.learn_start_steps": 40, "algo.batch_size": 16, "replay.capacity": 150,
         "replay.samples_per_insert": 5, "log.every_steps": 30, "save.every_steps": 50, "eval.episodes": 0,
         "eval.test_episodes": 2, "until.steps": 300, "runtime.threads": 1}
class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps / 10, np.float32), float(action), self.steps == 10, False, {}
def interrupt(times):
    def callback(row):
        if row["kind"] == "progress" and row["env_steps"] > 100:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
    return callback
"""


def texts(outputs: list[dict[str, Any]]) -> str:
    return "\n".join(str(text) for bundle in outputs for text in bundle.values())


def test_progress_is_one_output_that_ends_with_the_score(tmp_path: Path) -> None:
    _, shown, silent = run_cells(
        [
            BEGIN,
            'run = train("CartPole-v1", overrides=SMALL)',
            'train("CartPole-v1", overrides=SMALL, progress=False);',
        ],
        tmp_path,
    )
    assert len(shown) == 1
    assert re.search(r"100%.*30\d / 300 steps", shown[0]["text/html"])
    assert "done: reached until.steps=300" in shown[0]["text/plain"]
    assert silent == []


def test_an_interrupt_saves_and_returns_the_run_and_a_second_one_leaves(tmp_path: Path) -> None:
    stopped = 'run = train("CartPole-v1", overrides=SMALL, callbacks=[interrupt(1)])\nprint(run)'
    again = "print(resume(run.path).status['state'])"
    left = """
try:
    train("CartPole-v1", overrides=SMALL, callbacks=[interrupt(2)])
except KeyboardInterrupt:
    print("left", load("latest", which="any").status["reason"])
"""
    alive = "print('alive', signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    _, first, second, third, last = run_cells([BEGIN, stopped, again, left, alive], tmp_path)
    assert "interrupted" in texts(first)
    assert "to go on: " in texts(first)
    assert "done" in texts(second)
    assert "left left at once, by SIGINT" in texts(third)
    assert "alive True" in texts(last)


def test_a_thread_trains_and_says_that_it_hears_no_signals(tmp_path: Path) -> None:
    code = """
found = []
thread = threading.Thread(target=lambda: found.append(train("CartPole-v1", overrides=SMALL)))
thread.start()
thread.join(100)
print(found[0].status["state"])
"""
    _, outputs = run_cells([BEGIN, code], tmp_path)
    assert "done" in texts(outputs)
    assert "this is not the main thread" in texts(outputs)


@pytest.mark.parametrize(
    "settings",
    [
        {"env.workers": 2},
        {"learners.num": 2},
        {"runtime.type": "processes", "runtime.inference": "local", "actors.num": 2},
    ],
    ids=["workers", "learners", "processes"],
)
def test_what_a_cell_defines_works_in_other_processes(settings: dict[str, Any], tmp_path: Path) -> None:
    code = f"print(train('Walk', overrides={{**SMALL, **{settings!r}}}, env=Walk).status['state'])"
    assert "done" in texts(run_cells([BEGIN, code], tmp_path, seconds=300)[1])


def test_what_a_cell_defines_works_in_a_group(tmp_path: Path) -> None:
    code = """
group = train_group("Walk", 2, overrides=SMALL, env=Walk, callbacks=[lambda row: row["env_steps"] > 150])
print([load(member, env=Walk).status["state"] for member in group.members])
group = resume_group(group.path, env=Walk)
print(group.status["state"], [load(member, env=Walk).status["exact"] for member in group.members])
print(resume(group.members[0], steps=400, env=Walk).status["exact"])
"""
    found = texts(run_cells([BEGIN, code], tmp_path, seconds=300)[1])
    assert "['stopped', 'stopped']" in found
    assert "done [True, True]" in found
    assert found.strip().endswith("True")
