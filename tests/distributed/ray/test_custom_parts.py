"""Parts that a script defines itself work on Ray: with two learners, and with the replay in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]
SCRIPT = """
import json, sys
from tests.custom import parts
from tests.support.runs import small
import qfleet

# As if this script had defined them: they cannot be imported from anywhere else.
for part in (parts.Blend, parts.PredictReward, parts.Counting, parts.TanhHead, parts.nadam):
    part.__module__ = "__main__"

RAY = {"runtime.type": "ray", "actors.num": 1, "runtime.chunk_rows": 4}
run = qfleet.train(small({**RAY, **json.loads(sys.argv[1])}), out=sys.argv[2], **parts.all_parts())
again = qfleet.resume(run.path, steps=400, **parts.all_parts())
loaded = qfleet.load(run.path, which="latest", head=parts.TanhHead())
print(json.dumps({**again.status, "custom": loaded.plan.custom.rule}))
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"learners.num": 2, "runtime.learner_cpus": 0.5, "runtime.actor_cpus": 0.5},
        {"runtime.replay_process": True, "runtime.replay_cpus": 0.5},
    ],
    ids=["two learners", "replay process"],
)
def test_custom_parts_work_on_ray(settings: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings), str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    status = json.loads(done.stdout.strip().splitlines()[-1])
    assert status["state"] == "done"
    assert status["env_steps"] >= 400
    assert status["updates"] > 0
    assert status["custom"].startswith("__main__:Blend(share=0.5) sha256:")
