"""Small workflows for tests."""

from pathlib import Path
from typing import Any

from qfleet.workflow.plan import GivenWorkflow, read_workflow
from qfleet.workflow.stages import run_workflow

PLAN = """
env = "CartPole-v1"
[collect]
episodes = 60
seed = 1
[learn]
until.epochs = 2
net.torso = { type = "mlp", sizes = [16] }
algo.batch_size = 32
log.every_steps = 500
eval = { every_steps = 1_000, episodes = 4, test_episodes = 4 }
"""
CSV_PLAN = """
env = "Logs-v0"
[import]
source = "SOURCE"
columns = { episode = "visit", obs = "x,y", reward = "r", next_obs = "x2,y2" }
actions = [2]
[learn]
until.epochs = 6
net.torso = { type = "mlp", sizes = [16] }
algo.batch_size = 32
algo.n_step = 1
algo.discount = 0.5
algo.target = { type = "copy", every_updates = 10 }
optim.learning_rate = 1e-2
log.every_steps = 100
eval = { every_steps = 1_000, episodes = 10, test_episodes = 10 }
"""


def write(place: Path, text: str = PLAN) -> Path:
    """The file of a workflow."""
    file = place / "plan.toml"
    file.write_text(text)
    return file


def given(place: Path, text: str = PLAN, **settings: str) -> GivenWorkflow:
    """A workflow, with settings as of the command line (`__` stands for a dot)."""
    return read_workflow(write(place, text), [(path.replace("__", "."), value) for path, value in settings.items()])


def run(place: Path, text: str = PLAN, out: str = "out", **settings: str) -> dict[str, Any]:
    """The report of a workflow."""
    return run_workflow(given(place, text, **settings), place / out)


def skipped(report: dict[str, Any]) -> list[bool]:
    """Which stages were done before."""
    return [stage["skipped"] for stage in report["stages"]]


def write_csv(file: Path, episodes: int = 120, seed: int = 1) -> None:
    """Logs of a walk in two dimensions: action 1 goes right and is paid, 0 goes left; ten steps per visit."""
    import random

    draw = random.Random(seed)
    lines = ["visit,x,y,action,r,terminated,x2,y2"]
    for visit in range(episodes):
        x, y = draw.randrange(-3, 4), visit % 3
        for step in range(10):
            action = draw.randrange(2)
            after = x + (1 if action else -1)
            reward = 1.0 if action else 0.0
            lines.append(f"v{visit},{x},{y},{action},{reward},{int(step == 9)},{after},{y}")
            x = after
    file.write_text("\n".join(lines) + "\n")


def csv_plan(place: Path) -> str:
    """The text of a workflow that imports a CSV file."""
    write_csv(place / "logs.csv")
    return CSV_PLAN.replace("SOURCE", str(place / "logs.csv"))
