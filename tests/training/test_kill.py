"""Killed at any moment: a run goes on from its last commit, ends as if nothing had been, and leaves nothing behind."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from benchmarks import resume as benchmark
from qfleet.api import resume
from qfleet.errors import StorageError
from qfleet.plan import compose, total_updates
from qfleet.save import verify_run
from qfleet.watch import read_rows
from qfleet.watch.run_listing import run_state
from tests.support.command_server import CommandProcess, CommandServer
from tests.support.run_fixtures import Reference
from tests.support.runs import JUDGED, PONG, Settings, checkpoints, resumed, same, status, train_arguments
from tests.support.variants import ACTOR, IQN, MUNCHAUSEN, NOISY, PQN, R2D2

pytestmark = pytest.mark.chaos

TELLING = "toys/Random-v0"
KILLS = 3
LIVELY: Settings = {**JUDGED, "until.steps": 1_500, "log.every_steps": 100, "eval.every_steps": 300}
PER_3: Settings = {**LIVELY, "replay.sampler.type": "prioritized", "algo.n_step": 3, "env.normalize": "both"}


def only_run(out: Path, child: CommandProcess) -> Path:
    """The run folder, once it has a checkpoint: from then on everything must survive."""
    limit = time.monotonic() + 60
    while not (found := list(out.glob("*/checkpoints/step_*/manifest.json"))):
        assert time.monotonic() < limit
        assert child.code is None, child.output()
        time.sleep(0.001)
    return found[0].parents[2]


def killed(child: CommandProcess, run: Path, steps: int, seconds: float) -> bool:
    """Kill it a moment after it got so far; False if it was done before."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit and child.code is None and progress(run) < steps:
        time.sleep(0.001)
    time.sleep(seconds)
    child.send(signal.SIGKILL)
    return child.wait() == -signal.SIGKILL


def progress(run: Path) -> int:
    """Steps according to the newest row."""
    rows = read_rows(run / "metrics.jsonl")
    return int(rows[-1]["env_steps"]) if rows else 0


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()  # noqa: S108


def children(pid: int) -> list[int]:
    """Living processes whose parent this is."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def survive(command_server: CommandServer, out: Path, command: list[str], chance: random.Random) -> Path:
    """Train under kills until enough have fallen, then to the end."""
    child = command_server.start(*command)
    run = only_run(out, child)
    for steps in sorted(chance.randrange(0, 1_200) for _ in range(KILLS)):
        assert killed(child, run, steps, chance.uniform(0.0, 0.05)), child.output()
        assert run_state(run) == "killed"
        assert all(verdict.ok for verdict in verify_run(run))
        child = command_server.start("resume", str(run), "--quiet")
    assert child.wait() == 0, child.output()
    return run


@pytest.mark.parametrize(
    ("env_id", "changes", "seed"),
    [
        ("CartPole-v1", LIVELY, 1),
        ("CartPole-v1", PER_3, 2),
        (TELLING, LIVELY, 3),
        (TELLING, PER_3, 4),
        pytest.param("CartPole-v1", {**R2D2, **LIVELY}, 5, marks=pytest.mark.slow),
        ("CartPole-v1", {**PQN, **LIVELY}, 6),
        pytest.param(TELLING, {**IQN, **NOISY, **MUNCHAUSEN, **ACTOR, **LIVELY}, 7, marks=pytest.mark.slow),
    ],
)
def test_sigkill_at_random_moments(
    env_id: str, changes: Settings, seed: int, tmp_path: Path, command_server: CommandServer, reference: Reference
) -> None:
    before = shared_memory()
    whole = reference(changes, env_id)
    run = survive(command_server, tmp_path, train_arguments(tmp_path, changes, env_id), random.Random(seed))
    assert same(run, whole.path)
    assert shared_memory() <= before
    assert not list(run.glob("checkpoints/.*"))
    assert not list(run.glob(".*"))
    assert not (run / "run.lock").exists()


@pytest.mark.atari
def test_sigkill_in_the_middle_of_pong(tmp_path: Path, command_server: CommandServer, reference: Reference) -> None:
    pytest.importorskip("ale_py")
    whole = reference(PONG, "ALE/Pong-v5")
    child = command_server.start(*train_arguments(tmp_path, PONG, "ALE/Pong-v5"))
    run = only_run(tmp_path, child)
    assert killed(child, run, 60, 0.05)
    assert same(resumed(run).path, whole.path)


def test_the_living_run_is_protected_and_the_dead_one_is_not(tmp_path: Path, command_server: CommandServer) -> None:
    child = command_server.start(*train_arguments(tmp_path, {"until.steps": 1_000_000}))
    run = only_run(tmp_path, child)
    second = command_server.start("resume", str(run), "--quiet")
    assert second.wait() == 5
    assert f"process {child.pid} on" in second.output()
    with pytest.raises(StorageError, match=f"process {child.pid} on"):
        resume(run)
    assert child.code is None
    assert status(run)["state"] == "running"
    assert children(child.pid) == []
    assert killed(child, run, 0, 0.0)
    newest = int(checkpoints(run)[-1].name.removeprefix("step_"))
    assert resumed(run, steps=newest + 60).exit_code == 0


def test_leftovers_of_a_killed_save_are_gone_after_the_next_start(
    tmp_path: Path, command_server: CommandServer
) -> None:
    child = command_server.start(*train_arguments(tmp_path, {"until.steps": 1_000_000, "save.every_steps": 4}))
    run = only_run(tmp_path, child)
    limit = time.monotonic() + 30
    while time.monotonic() < limit and child.code is None and not list(run.glob("checkpoints/.tmp-*")):
        pass
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    (run / "checkpoints" / ".tmp-left").mkdir(exist_ok=True)  # in case the kill came a moment late
    newest = int(checkpoints(run)[-1].name.removeprefix("step_"))
    resumed(run, steps=newest + 8)
    assert not list(run.glob("checkpoints/.*"))


BENCHMARKED = [
    benchmark.Cell("CartPole-v1", "prioritized", 3),
    benchmark.Cell("CartPole-v1", member="r2d2"),
    benchmark.Cell("CartPole-v1", member="pqn"),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", BENCHMARKED, ids=lambda cell: cell.member)
def test_the_resume_benchmark_finds_no_difference(cell: benchmark.Cell) -> None:
    found = benchmark.examine(cell, kills=3, seed=0)
    assert found["kills"] == 3
    assert found["different"] == 0, found["trials"]


def test_the_resume_benchmark_tries_every_member_of_the_family() -> None:
    tried = {cell.member for cell in benchmark.CELLS}
    assert tried == set(benchmark.FAMILY) >= {"dqn", "c51", "qrdqn", "iqn", "noisy", "munchausen", "r2d2", "pqn"}
    for cell in benchmark.CELLS:
        words = [word.split("=") for word in [*cell.settings(), f"until.steps={cell.steps}"] if "=" in word]
        given = [(path, text, "command line") for path, text in words]
        plan = compose(cell.env, benchmark.FAMILY[cell.member][0] or None, overrides=given).plan
        assert total_updates(plan) >= 200
