"""Small runs, and what is left of them on the disk."""

import hashlib
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import qfleet.testing.toys  # noqa: F401  registers toys/...
from qfleet import Plan, Run, resume, train
from qfleet.distributed.learners.launcher import LocalLearnerLauncher
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.local import LocalWorker
from qfleet.plan import make_plan
from qfleet.watch import read_json, read_rows, without_clock

Settings = dict[str, Any]

# What makes a small run recurrent, gives it priorities from its actors, or lets it draw from torch's generator.
LSTM: Settings = {
    "net.memory.type": "lstm",
    "net.memory.size": 8,
    "algo.view.type": "sequences",
    "algo.view.burn_in": 2,
    "algo.view.length": 4,
    "algo.view.stride": 2,
    "replay.samples_per_insert": 20,
}
ACTOR: Settings = {"replay.sampler.type": "prioritized", "replay.sampler.initial": "actor"}
RANDOM: Settings = {"net.noisy": True, "net.head.type": "implicit", "net.head.fractions": 4, "net.dropout": 0.2}

# Many rows, saves and updates in few steps; no evaluation.
SMALL: Settings = {
    "env.num": 4,
    "algo.learn_start_steps": 40,
    "algo.batch_size": 16,
    "algo.explore.steps": 200,
    "algo.target.type": "copy",
    "algo.target.every_updates": 7,
    "replay.capacity": 150,
    "replay.samples_per_insert": 5,
    "net.torso.type": "mlp",
    "net.torso.sizes": (16,),
    "log.every_steps": 30,
    "save.every_steps": 50,
    "save.max_share": 1,
    "eval.episodes": 0,
    "eval.test_episodes": 0,
    "until.steps": 300,
    "runtime.threads": 1,
    "runtime.compile": False,  # long plans that end early would compile, and start the compiler
}
# Where it is measured, a machine that is busy decides how many processes a run has.
LOCAL: Settings = {"runtime.inference": "local", "runtime.inference_device": "cpu"}
JUDGED: Settings = {"eval.every_steps": 100, "eval.episodes": 3, "eval.test_episodes": 4}
PONG: Settings = {
    "env.num": 2,
    "net.torso.type": "nature",
    "net.torso.width": 16,
    "net.torso.sizes": None,
    "algo.batch_size": 4,
    "algo.learn_start_steps": 60,
    "replay.samples_per_insert": 1,
    "replay.capacity": 200,
    "until.steps": 150,
}


def process_of(handle: WorkerHandle) -> BaseProcess:
    """A learner worker's process on this machine."""
    if not isinstance(handle.control, LocalWorker):
        raise TypeError("it runs on another machine")
    return handle.control.process.process


def kill_first_learner(monkeypatch: pytest.MonkeyPatch) -> tuple[list[WorkerHandle], Callable[[dict[str, Any]], None]]:
    """The handles of all learners that will be launched, and a callback that kills the first of them."""
    handles: list[WorkerHandle] = []
    launch = LocalLearnerLauncher.launch

    def watched(launcher: LocalLearnerLauncher, number: int, incarnation: int) -> WorkerHandle:
        handles.append(launch(launcher, number, incarnation))
        return handles[-1]

    def strike(row: dict[str, Any]) -> None:
        if row["kind"] == "progress" and len(handles) == 1 and process_of(handles[0]).is_alive():
            os.kill(process_of(handles[0]).pid or 0, signal.SIGKILL)

    monkeypatch.setattr(LocalLearnerLauncher, "launch", watched)
    return handles, strike


def small(changes: Settings | None = None, env_id: str = "CartPole-v1") -> Plan:
    """A small plan with some settings changed; None takes one away."""
    return make_plan(env_id, None, settings(changes))


def settings(changes: Settings | None = None) -> Settings:
    """The small plan's settings, some changed, some taken away."""
    return {path: value for path, value in {**SMALL, **(changes or {})}.items() if value is not None}


def until(plan: Plan, steps: int) -> Plan:
    """The same plan with an earlier end, be it before anything is learned."""
    return msgspec.structs.replace(plan, until=msgspec.structs.replace(plan.until, steps=steps))


def train_arguments(out: Path, changes: Settings | None = None, env_id: str = "CartPole-v1") -> list[str]:
    """The command that trains the same plan."""
    shown = {path: list(value) if isinstance(value, tuple) else value for path, value in settings(changes).items()}
    return ["train", env_id, "--quiet", "--out", str(out), *(f"{path}={value}" for path, value in shown.items())]


def checkpoints(run: Path) -> list[Path]:
    """The committed checkpoints, oldest first."""
    return sorted(path.parent for path in run.glob("checkpoints/step_*/manifest.json") if ".corrupt" not in str(path))


def hashes(checkpoint: Path) -> dict[str, str]:
    """Every file but the manifest, which carries clock and versions."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rows(run: Path) -> list[Settings]:
    """All rows of a run, without the clock."""
    return [without_clock(row) for row in read_rows(run / "metrics.jsonl")]


def events(run: Path, kind: str) -> list[Settings]:
    """All events of one kind."""
    return [event for event in read_rows(run / "events.jsonl") if event["kind"] == kind]


def status(run: Path) -> Settings:
    """status.json."""
    return read_json(run / "status.json")


def same(run: Path, reference: Path) -> bool:
    """Did two runs end bit-equal? An assertion shows where not."""
    last = checkpoints(run)[-1]
    expected = checkpoints(reference)[-1]
    assert last.name == expected.name
    assert hashes(last) == hashes(expected)
    assert rows(run) == rows(reference)
    return True


def trained(plan: Plan, out: Path, **more: Any) -> Run:
    """Train; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(plan, out=out, **more)


def resumed(run: Run | Path, **more: Any) -> Run:
    """Resume; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return resume(run.path if isinstance(run, Run) else run, **more)


SLOW_TO_CLOSE = """
import os, time
from pathlib import Path
from qfleet.testing.toys import Random
class Slow(Random):
    def __init__(self):
        super().__init__()
        self.name = f"{os.getpid()}-{id(self)}"
        (Path(__file__).parent / "made" / self.name).touch()
    def close(self):
        time.sleep(0.5)
        (Path(__file__).parent / "closed" / self.name).touch()
"""


def slow_to_close(folder: Path) -> tuple[str, Callable[[], set[str]]]:
    """The id of an environment that takes its time to close, and which of those made in a run were not closed."""
    (folder / "slow.py").write_text(SLOW_TO_CLOSE)
    for name in ("made", "closed"):
        (folder / name).mkdir()

    def unclosed() -> set[str]:
        made = set(os.listdir(folder / "made"))
        assert len(made) >= 2
        return made - set(os.listdir(folder / "closed"))

    return f"{folder / 'slow.py'}:Slow", unclosed
