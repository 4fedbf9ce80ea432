"""The lines of Stable-Baselines3 that docs/coming-from.md shows beside ours run, with the version that was tested."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks_of

PAGE = ROOT / "docs" / "coming-from.md"
PINNED = re.search(r"^stable[_-]baselines3==(\S+)$", (ROOT / "benchmarks/constraints-peers.txt").read_text(), re.M)
THEIRS = [block for block in blocks_of(PAGE) if "Stable-Baselines3" in block.reason]
# What users of its DQN do; each has a block there, and ours beside it.
TASKS = (
    *("model.learn", "model.predict", "model.save", "DQN.load", "save_replay_buffer", "evaluate_policy", "q_net"),
    *(
        "BaseCallback",
        "EvalCallback",
        "StopTrainingOnRewardThreshold",
        "replay_buffer.sample",
        "features_extractor_class",
    ),
    *("TimeLimit", "make_vec_env", "tensorboard_log", "info_keywords"),
)
# What its `tensorboard_log` imports.
TENSORBOARD = ("tensorboard", "absl-py", "grpcio", "markdown", "protobuf", "tensorboard-data-server", "werkzeug")


def test_every_task_is_shown_and_has_our_lines_beside_it() -> None:
    text = "\n".join(block.text for block in THEIRS)
    assert [task for task in TASKS if task not in text] == []
    blocks = [block for block in blocks_of(PAGE) if block.language == "python"]
    for at, block in enumerate(blocks):
        if block in THEIRS:
            assert blocks[at + 1] not in THEIRS, f"nothing beside {block.name}"


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Stable-Baselines3 and TensorBoard; all else that they import is in the environment of the tests."""
    assert PINNED is not None
    folder = tmp_path_factory.mktemp("sb3")
    wanted = f"stable-baselines3=={PINNED[1]}"
    pins = f"--constraint={ROOT / 'benchmarks/constraints-peers.txt'}"
    words = ["-m", "pip", "install", "--quiet", "--no-deps", pins, "--target", str(folder), wanted, *TENSORBOARD]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{wanted} cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_lines_of_stable_baselines3_run(theirs: Path, tmp_path: Path) -> None:
    script = tmp_path / "theirs.py"
    script.write_text("\n\n".join(block.text for block in THEIRS))
    variables = {**os.environ, "PYTHONPATH": str(theirs), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=360
    )
    assert done.returncode == 0, done.stderr[-3000:]
