"""Actors, and optionally the replay, in processes of their own: same counts as inline, also after kills."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from torch import nn

import qfleet.testing.toys as toys
from qfleet import Plan, Run, resume, train
from qfleet.audit.checks import check_history
from qfleet.data import Rollout
from qfleet.distributed.actors.pool import ActorPool
from qfleet.errors import EnvError, UsageError
from qfleet.learn import Learner
from qfleet.learn.learner import NonFiniteUpdate
from qfleet.plan import make_plan
from qfleet.system.child_process import LOG_BYTES
from qfleet.watch import read_rows
from qfleet.watch.text import end_lines, time_line
from tests.support.runs import ACTOR, JUDGED, LOCAL, LSTM, SMALL, Settings, slow_to_close
from tests.support.variants import ANNEAL, RESET

ACTORS: Settings = {
    **SMALL,
    **LOCAL,
    "runtime.type": "processes",
    "actors.num": 2,
    "runtime.chunk_rows": 3,
    "log.history": True,
}
QUICK: Settings = {"runtime.hung_seconds": 4}  # where something hangs; elsewhere a loaded machine must not look hung
SHARED = Path("/dev") / "shm"
REMOTE: Settings = {"runtime.replay_process": True}
Row = dict[str, Any]

pytestmark = pytest.mark.timeout(110)


def plan_of(env: str = "CartPole-v1", **settings: Any) -> Plan:
    return make_plan(env, overrides={**ACTORS, **settings})


def allowed(plan: Plan, steps: int) -> int:
    return int((steps - plan.algo.learn_start_steps) * plan.replay.samples_per_insert) // plan.algo.batch_size  # type: ignore[union-attr]


def events(run: Run, kind: str) -> list[Row]:
    return [row for row in read_rows(run.path / "events.jsonl") if row["kind"] == kind]


def require_sound(run: Run, plan: Plan) -> None:
    """The run reached its steps with exact counts, and no process is left."""
    assert run.status["state"] == "done"
    assert plan.until.steps <= run.status["env_steps"] < plan.until.steps + plan.env.num
    require_exact(run, plan)


def require_exact(run: Run, plan: Plan) -> None:
    """As many updates as the steps allow, a sound history, and no process left."""
    assert run.status["updates"] == allowed(plan, run.status["env_steps"])
    if plan.log.history:
        assert check_history(run.path / "history") == []
    if plan.log.history and plan.runtime.replay_process:
        operations = {row["op"] for row in read_rows(run.path / "history" / "replay.jsonl")}
        assert operations == {"stored", "drawn"}
    assert not multiprocessing.active_children()


def called(name: str) -> list[multiprocessing.process.BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name == name]


class Once:
    """A callback that calls `act` once, in the first row from `steps` on for which `time()` is true."""

    def __init__(self, steps: int, act: Callable[[], object], time: Callable[[], bool] = lambda: True) -> None:
        self.steps, self.act, self.time, self.done = steps, act, time, False

    def __call__(self, row: Row) -> None:
        if row["env_steps"] >= self.steps and not self.done and self.time():
            self.done = True
            self.act()


def sent(name: str, number: int) -> Callable[[], None]:
    """Sends a signal to the process of this name."""

    def act() -> None:
        (process,) = called(name)
        assert process.pid is not None
        os.kill(process.pid, number)

    return act


def has_acted(out: Path, worker: int) -> bool:
    """Has this actor of the run in this directory sent a rollout?"""
    return any(file.stat().st_size > 0 for file in out.glob(f"*/history/actor-{worker}-*.jsonl"))


def until_event(out: Path, kind: str) -> Callable[[Row], bool]:
    """A callback that ends the run in this directory once it has logged such an event."""

    def enough(row: Row) -> bool:
        (log,) = out.glob("*/events.jsonl")
        return any(event["kind"] == kind for event in read_rows(log))

    return enough


@pytest.mark.parametrize("more", [{}, REMOTE], ids=["", "replay-process"])
def test_as_many_updates_as_inline(tmp_path: Path, more: Settings) -> None:
    plan = plan_of(**more)
    require_sound(train(plan, out=tmp_path), plan)


GROW: Settings = {"steer.batch.type": "grow", "steer.batch.patience": 1, "steer.batch.largest": 64}
VARIANTS: dict[str, Settings] = {
    "recurrent": {**LSTM, **ACTOR},
    "remote-recurrent": {**LSTM, **ACTOR, **REMOTE},
    "remote-priorities": {"replay.sampler.type": "prioritized", **REMOTE},
    "remote-anneal": {**ANNEAL, **REMOTE},
    "remote-bonus": {"algo.bonus.type": "count", "algo.bonus.settle_steps": 30, **REMOTE},
    "remote-filter": {"replay.filter.type": "duplicates", "replay.filter.copies": 1, **REMOTE},
    "remote-growing": {**GROW, **JUDGED, **REMOTE},
    "remote-reset": {**RESET, **REMOTE},
    "population": {"population.num": 2, **JUDGED},
    "remote-population": {"population.num": 2, **JUDGED, **REMOTE},
    "central": {"runtime.inference": "central"},
}


@pytest.mark.parametrize("more", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.slow
def test_variants_run(tmp_path: Path, more: Settings) -> None:
    plan = plan_of(**more)
    run = train(plan, out=tmp_path)
    assert run.status["state"] == "done"
    assert run.status["updates"] > 0
    assert check_history(run.path / "history") == []
    assert not multiprocessing.active_children()


PID_SCALE = np.float32(2**-22)  # a power of two, and no process has a larger number: nothing is lost


class Signed(toys.Random):
    """Observations contain the id of the process that steps it."""

    def _show(self) -> Any:
        return np.array([os.getpid() * PID_SCALE, 0.0], np.float32)


def make_signed() -> gym.Env[Any, Any]:
    return Signed()


@pytest.mark.parametrize("inference", ["central", "local"])
def test_inference_decides_which_processes_send_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inference: str
) -> None:
    insert, received, sending = ActorPool.insert, list[Rollout](), set[tuple[str, int | None]]()

    def recording(pool: ActorPool, rollout: Rollout) -> None:
        received.append(replace(rollout, obs=rollout.obs.copy()))
        insert(pool, rollout)

    def record_children(row: Row) -> None:
        sending.update((child.name, child.pid) for child in multiprocessing.active_children())

    monkeypatch.setattr(ActorPool, "insert", recording)
    plan = plan_of("toys/Random-v0", **{"runtime.inference": inference})
    run = train(plan, out=tmp_path, env=make_signed, callbacks=[record_children])
    require_sound(run, plan)
    pids = [set(np.rint(each.obs[..., 0] / PID_SCALE).astype(int).ravel().tolist()) for each in received]
    senders = {pid for _, pid in sending}
    if inference == "central":
        assert {name for name, _ in sending} == {"qfleet-actor-0"}
        assert {each.source[0] for each in received} == {0}
        assert {each.last.shape[1] for each in received} == {plan.env.num}
        assert all(len(own) == plan.actors.num and not own & senders for own in pids)  # environments have processes
    else:
        assert {name for name, _ in sending} == {"qfleet-actor-0", "qfleet-actor-1"}
        assert {each.last.shape[1] for each in received} == {plan.env.num // plan.actors.num}
        assert set[int]().union(*pids) <= senders


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, REMOTE], ids=["", "replay-process"])
def test_a_rollback_replaces_every_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: Settings) -> None:
    update, calls = Learner.update, [0]

    def updating(self: Learner, batch: Any) -> Any:
        calls[0] += 1
        if 40 <= calls[0] < 45:
            raise NonFiniteUpdate("loss nan, gradient norm nan")
        return update(self, batch)

    monkeypatch.setattr(Learner, "update", updating)
    plan = plan_of(**{"save.every_steps": 50, **more})
    run = train(plan, out=tmp_path)
    require_sound(run, plan)
    (back,) = events(run, "rollback")
    assert back["env_steps"] > 0
    # Not the files of the actors: one may not have acted before the rollback.
    notes = read_rows(run.path / "history" / "learner.jsonl")
    started = {(row["worker"], row["incarnation"]) for row in notes if row["op"] == "started"}
    assert started == {(worker, incarnation) for worker in (0, 1) for incarnation in (0, 1)}


@pytest.mark.slow
def test_action_masks_reach_a_remote_replay(tmp_path: Path) -> None:
    plan = plan_of("toys/Masked-v0", **REMOTE)
    require_sound(train(plan, out=tmp_path, env=toys.Masked), plan)


def test_compression_savings_are_reported(tmp_path: Path) -> None:
    more = {"runtime.compress": True, "replay.compress": True, "until.steps": 400, "net.torso.type": "mlp"}
    run = train(plan_of("ALE/Pong-v5", **{**more, "env.frame_size": 42, "env.clip_reward": True}), out=tmp_path)
    assert run.status["state"] == "done"
    for found in (run.status["profile"]["compression"][what] for what in ("rollouts", "replay")):
        assert 1 < found["packed_bytes"] < found["raw_bytes"] / 4
        assert found["seconds"] > 0
    raw = run.status["profile"]["compression"]["rollouts"]["raw_bytes"]
    assert 42 * 42 * 400 <= raw < 1.2 * 42 * 42 * 420
    assert "rollouts " in time_line(run.status["profile"])


@pytest.mark.slow
def test_fresh_experience_from_several_actors(tmp_path: Path) -> None:
    settings = {key: value for key, value in ACTORS.items() if not key.startswith(("replay.", "algo.target"))}
    settings = {
        key: value for key, value in settings.items() if key not in ("algo.batch_size", "algo.learn_start_steps")
    }
    fresh = {"replay.type": "fresh", "replay.rows": 6, "replay.minibatches": 2, "replay.epochs": 2}
    run = train(make_plan("CartPole-v1", overrides={**settings, **fresh}), out=tmp_path)
    assert run.status["state"] == "done"
    # Each block of 6 rows of one actor's 2 lanes makes 4 updates.
    assert run.status["updates"] >= 4 * (run.status["env_steps"] // 12 - 8)
    assert check_history(run.path / "history") == []


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_actor_that_is_killed_or_stopped_is_replaced(tmp_path: Path, number: int) -> None:
    more = {"until.steps": 10_000_000, "replay.capacity": 2_000, "log.every_steps": 100}
    plan = plan_of(**more, **(QUICK if number == signal.SIGSTOP else {}))
    # A start has a far longer timeout than an actor that has acted.
    blow = Once(300, sent("qfleet-actor-1", number), lambda: has_acted(tmp_path, 1))
    run = train(plan, out=tmp_path, callbacks=[blow, until_event(tmp_path, "actor_back")])
    assert run.status["state"] == "stopped"
    require_exact(run, plan)
    (lost,) = events(run, "actor_lost")
    assert (lost["worker"], lost["incarnation"]) == (1, 0)
    assert lost["cause"] == ("dead" if number == signal.SIGKILL else "hung")
    (back,) = events(run, "actor_back")
    assert (back["worker"], back["incarnation"]) == (1, 1)


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replay_that_is_killed_or_stopped_is_restored_from_the_last_commit(tmp_path: Path, number: int) -> None:
    more = {"until.steps": 1_000, "log.every_steps": 50, "save.every_steps": 100}
    plan = plan_of(**REMOTE, **more, **(QUICK if number == signal.SIGSTOP else {}))
    run = train(plan, out=tmp_path, callbacks=[Once(330, sent("qfleet-replay", number))])
    require_sound(run, plan)
    (lost,) = events(run, "replay_lost")
    assert lost["env_steps"] in [row["step"] for row in events(run, "checkpoint_committed")]
    assert lost["steps_lost"] + lost["env_steps"] >= 330


def test_a_run_refused_after_its_start_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="taken"):
        train(plan_of(**REMOTE), out=tmp_path, name="taken")
    assert not multiprocessing.active_children()


class Chatty(toys.Random):
    """Prints 4,000 characters with every step."""

    def step(self, action: Any) -> Any:
        """Print and step."""
        print("x" * 4_000, flush=True)
        return super().step(action)


def make_chatty() -> gym.Env[Any, Any]:
    return Chatty()


def test_an_actor_cannot_flood_the_disk(tmp_path: Path) -> None:
    run = train(plan_of("toys/Random-v0", **{"until.steps": 2_000}), out=tmp_path, env=make_chatty)
    assert run.status["state"] == "done"
    sizes = [log.stat().st_size for log in (run.path / "logs").glob("actor-*.log")]
    assert len(sizes) == 2
    assert max(sizes) == LOG_BYTES  # 8 MB were printed, by one more than by the other


@pytest.mark.slow
def test_the_workers_of_each_actor_write_to_logs_of_their_own(tmp_path: Path) -> None:
    more = {"env.workers": 1, "until.steps": 200}
    run = train(plan_of("toys/Random-v0", **more), out=tmp_path, env=make_chatty)
    assert run.status["state"] == "done"
    sizes = {log.name: log.stat().st_size for log in (run.path / "logs").glob("*worker*")}
    assert sizes.keys() == {"actor-0-worker-0.log", "actor-1-worker-0.log"}
    assert any(sizes.values())  # one may have made all steps before the other began


def test_environments_of_workers_have_the_time_to_be_closed(tmp_path: Path) -> None:
    env_id, unclosed = slow_to_close(tmp_path)
    more = {"actors.num": 1, "env.num": 2, "env.workers": 1, "until.steps": 100}
    run = train(plan_of(env_id, **more), out=tmp_path / "runs")
    assert run.status["state"] == "done"
    assert unclosed() == set()


UNGUARDED = """
from qfleet import train
from qfleet.plan import make_plan
print("the script runs", flush=True)
train(make_plan("CartPole-v1", overrides={settings}), out={out!r})
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(settings={**ACTORS, **REMOTE}, out=str(tmp_path / "runs")))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.count("the script runs") == 1


class Fragile(toys.Random):
    """Raises in its first step, also after it was made anew."""

    def step(self, action: Any) -> Any:
        """Raise."""
        raise ZeroDivisionError("the toy broke")


def make_fragile() -> gym.Env[Any, Any]:
    return Fragile()


@pytest.mark.chaos
def test_an_actor_lost_for_good_is_reported_with_its_cause_and_in_the_status(tmp_path: Path) -> None:
    more = {"until.steps": 10_000_000, "replay.capacity": 2_000, "log.every_steps": 100, "runtime.restarts": 0}
    blow = Once(300, sent("qfleet-actor-1", signal.SIGKILL), lambda: has_acted(tmp_path, 1))
    run = train(plan_of(**more), out=tmp_path, callbacks=[blow, until_event(tmp_path, "actor_lost")])
    (lost,) = run.status["lost"]
    assert re.fullmatch(r"actor 1 \(of 2\) was lost for good at step \d+: its process was ended by SIGKILL", lost)
    (warning,) = [row["text"] for row in events(run, "warning") if "lost for good" in row["text"]]
    assert warning == f"{lost}; it is not started again (runtime.restarts), and the run goes on without it"
    assert f"lost: {lost}" in end_lines(run.status)
    assert "1 of 2 actors" in time_line(run.status["profile"])


@pytest.mark.chaos
def test_an_environment_that_always_breaks_ends_the_run_with_its_error(tmp_path: Path) -> None:
    plan = plan_of("toys/Random-v0", **{"runtime.restarts": 1, "log.history": False})
    with pytest.raises(EnvError, match="all 2 actors have failed") as raised:
        train(plan, out=tmp_path, env=make_fragile)
    assert "the toy broke" in raised.value.why
    assert not multiprocessing.active_children()


def test_an_object_that_cannot_be_pickled_is_refused_before_anything_starts(tmp_path: Path) -> None:
    held = threading.Lock()

    def make() -> toys.Random:
        with held:
            return toys.Random()

    for more in ({}, {"runtime.replay_process": True}):
        with pytest.raises(UsageError, match=r"env=.* cannot be given to another process"):
            train(plan_of("toys/Random-v0", **more), out=tmp_path, env=make)
        assert not list(tmp_path.iterdir())
        assert not multiprocessing.active_children()


class Torso(nn.Module):
    """Eight features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 8)

    def forward(self, obs: Any) -> Any:
        """Features."""
        return self.layer(obs).relu()


@pytest.mark.slow
def test_a_custom_environment_and_a_custom_torso(tmp_path: Path) -> None:
    settings = {key: value for key, value in ACTORS.items() if not key.startswith("net.torso")}
    plan = make_plan("toys/Random-v0", overrides=settings)
    run = train(plan, out=tmp_path, env=toys.Random, torso=Torso())
    require_sound(run, run.plan)


def test_a_run_is_resumed_and_counts_on(tmp_path: Path) -> None:
    plan = plan_of(**{"until.steps": 200})
    first = train(plan, out=tmp_path)
    before = first.status["updates"]
    run = resume(first.path, steps=400)
    require_sound(run, run.plan)
    assert run.status["exact"] is False
    assert run.status["updates"] == allowed(plan, run.status["env_steps"]) > before


SCRIPT = """
import json, sys
from qfleet import train
from qfleet.plan import make_plan
from tests.distributed.actors.test_process import ACTORS
if __name__ == "__main__":
    settings = {**ACTORS, "until.steps": 10**7, "runtime.replay_process": True, **json.loads(sys.argv[2])}
    train(make_plan("CartPole-v1", overrides=settings), out=sys.argv[1])
"""


def process_tree(pid: int) -> set[int]:
    """The process and all its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
    tree = {pid}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree


def alive(pids: Iterable[int]) -> set[int]:
    """The processes that have not ended; zombies have."""
    found = set()
    for pid in pids:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.add(pid)
        except OSError:
            continue
    return found


LEARNERS: Settings = {"learners.num": 3, "sync.type": "server", "sync.shards": 2, "sync.max_staleness": 4}


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("more", "num"),
    [
        ({}, 5),
        pytest.param(LEARNERS, 9, marks=pytest.mark.slow),
    ],  # driver, fork server, two actors, replay; two more learners, two shards
    ids=["alone", "learners"],
)
def test_when_the_driver_is_killed_nothing_is_left(tmp_path: Path, more: Settings, num: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    before = set(os.listdir(SHARED))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, tmp_path / "script.py", tmp_path / "runs", json.dumps(more)]
    driver = subprocess.Popen(command, env=environment)
    limit = time.monotonic() + 60
    while time.monotonic() < limit and not list(tmp_path.glob("runs/*/checkpoints/step_*[1-9]*")):
        time.sleep(0.1)
    tree = process_tree(driver.pid)
    assert len(tree) >= num
    driver.kill()
    driver.wait(10)
    limit = time.monotonic() + 5
    while time.monotonic() < limit and alive(tree):
        time.sleep(0.05)
    assert not alive(tree)
    assert set(os.listdir(SHARED)) <= before
    (run,) = (tmp_path / "runs").iterdir()
    assert resume(run, steps=read_rows(run / "metrics.jsonl")[-1]["env_steps"] + 300).status["state"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"env.workers": 1}], ids=["native", "workers"])
def test_the_fork_server_has_imported_the_modules_of_workers(more: dict[str, Any]) -> None:
    """Otherwise every actor and replay process would import torch again."""
    settings = {"runtime.type": "processes", **more}
    code = f"""
from qfleet.system.child_process import fork_server
from qfleet.plan import make_plan
from qfleet.build.worlds import make_train_world
world = make_train_world(make_plan("Acrobot-v1", overrides={settings!r}))
with fork_server().Pool(1) as pool:
    print("imported", pool.apply(eval, ("'qfleet.distributed.actors.main' in __import__('sys').modules",)))
world.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "imported True\n", done.stderr


class Starting(toys.Random):
    """Starts processes in actors that would outlive them; they are found by the number they sleep for."""

    def __init__(self, seconds: str) -> None:
        super().__init__()
        if not multiprocessing.current_process().name.startswith("qfleet-actor"):
            return
        subprocess.Popen(["sleep", seconds])
        subprocess.Popen(["sh", "-c", f"setsid sleep {seconds} &"], start_new_session=True)


@pytest.mark.parametrize("number", [0, signal.SIGKILL])
def test_processes_started_by_environments_of_actors_are_killed(number: int, tmp_path: Path) -> None:
    plan = plan_of(**{"actors.num": 1, "env.num": 2, "runtime.inference": "local"})
    kill = Once(100, sent("qfleet-actor-0", number) if number else list)
    seconds = f"7{time.monotonic_ns()}"
    run = train(plan, out=tmp_path, env=partial(Starting, seconds), callbacks=[kill])
    assert run.status["state"] == "done"
    # A killed actor leaves those that have left its process group; the supervisor of the command kills these.
    least = 0 if number == 0 else 2
    left = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if seconds in text_of(path)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) <= least


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
