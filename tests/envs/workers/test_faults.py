"""If an environment or its process fails, the others continue and no row is invented."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.envs import TRAIN, make_world
from qfleet.errors import EnvError
from qfleet.plan.schema import Env
from qfleet.system.child_process import LOG_BYTES
from tests.envs.record import (
    NUM,
    SEED,
    Record,
    alive,
    ended_within,
    lanes_of,
    make_actor,
    worker_pids,
    world_of,
)

SHARED = "/dev/shm"  # noqa: S108

# ---- Faults of an environment.


@pytest.mark.parametrize(
    ("toy", "fault", "kind", "message"),
    [
        ("Breaking", "", "raised", "step() raised ZeroDivisionError: the toy broke"),
        ("Breaking", "exit", "raised", "SystemExit: the toy has had enough"),
        ("Lying", "shape", "wrong", "observation shape: expected (3,), got (7,)"),
        ("Lying", "dtype", "wrong", "observation dtype: expected float32, got <U1"),
        ("Lying", "nan", "wrong", "observation: expected finite numbers, got nan"),
        ("Lying", "reward", "wrong", "reward: expected finite numbers, got inf"),
    ],
)
def test_a_failed_environment_is_made_again_without_affecting_others(
    toy: str, fault: str, kind: str, message: str
) -> None:
    with world_of(toy, every=20, fault=fault, rebuilds=100) as world:
        pids = worker_pids(world)
        record = Record(world)
        record.run(400, until=lambda: len(record.faults) >= 4)
        record.run(30).check()
        assert len(record.faults) >= 4
        assert worker_pids(world) == pids
        for each in record.faults:
            assert each.kind == kind
            assert message in each.what
            assert len(each.lanes) == 1
            assert f"lane {each.lanes[0]}: " in each.what
            assert not each.quarantined
        assert all(record.whole(lane) for lane in set(range(NUM)) - lanes_of(record.faults))
        if kind == "raised":
            assert "in _fail" in record.faults[0].cause


def test_a_failed_reset_is_retried_with_another_seed() -> None:
    with world_of("Breaking", every=7, at=0, rebuilds=100) as world:
        record = Record(world)
        record.run(300, until=lambda: len(record.faults) >= 3).run(10).check()
        assert all("reset() raised" in fault.what for fault in record.faults)


@pytest.mark.parametrize(
    ("toy", "fault", "kind", "message", "cause"),
    [
        ("Crashing", "", "died", "was ended by SIGSEGV", "in _fail"),
        ("Crashing", "exit", "died", "ended with exit code 7", ""),
        ("Hanging", "", "hung", "did not answer in time", "in _fail"),
        ("Hanging", "hard", "hung", "did not answer in time", "in _fail"),
    ],
)
def test_a_failed_process_is_replaced_without_affecting_others(
    toy: str, fault: str, kind: str, message: str, cause: str
) -> None:
    with world_of(toy, every=40, fault=fault, rebuilds=100, step_timeout_seconds=1.0) as world:
        record = Record(world)
        record.run(400, until=lambda: bool(record.faults))
        seen = record.faults[0]
        assert seen.kind == kind
        assert message in seen.what
        assert cause in seen.cause
        assert seen.lanes in ((0, 1), (2, 3))
        assert f"at lane {seen.guilty[0]}," in seen.what
        assert len(seen.guilty) == 1
        if kind == "hung":
            assert 1.0 <= seen.seconds < 2.0
        before = record.finished
        record.run(60).check()
        assert record.finished > before + 3
        untouched = set(range(NUM)) - lanes_of(record.faults)
        assert all(record.whole(lane) for lane in untouched)


def test_a_leaking_worker_is_stopped_at_the_end_of_an_episode() -> None:
    with world_of("Leaking", every=10, rebuilds=100, worker_memory_gib=0.35) as world:
        record = Record(world)
        until = time.monotonic() + 40
        record.run(1_000_000, until=lambda: bool(record.faults) or time.monotonic() > until)
        assert {fault.kind for fault in record.faults} == {"leaked"}
        assert "env.worker_memory_gib" in record.faults[0].what
        if "far beyond" not in record.faults[0].what:
            assert record.actor.last[list(record.faults[0].lanes)].any()
        assert (world._lost | record.actor.last)[list(record.faults[0].lanes)].all()
        record.run(300).check()
        # No step is lost: the last row of a stopped worker is an ordinary step.
        assert record.actor.steps == sum(int((~row["last"]).sum()) for row in record.rows)


def test_output_of_an_environment_is_logged_up_to_a_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with world_of("Leaking", 2, 1, every=3, fault="flood", logs=tmp_path) as world:
        Record(world).run(60).check()
        assert not world.take_faults()
        assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("worker_0.log", LOG_BYTES)]
    assert capfd.readouterr() == ("", "")


def test_workers_of_an_actor_log_beside_the_log_of_the_actor(tmp_path: Path) -> None:
    with world_of("Leaking", 2, 2, every=1, fault="flood", logs=tmp_path / "actor-1.log") as world:
        Record(world).run(10)
        sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
        assert sizes == {"actor-1-worker-0.log": LOG_BYTES, "actor-1-worker-1.log": LOG_BYTES}


def test_a_log_that_grows_within_one_step_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import os\nfrom qfleet.testing.toys import Traced\nclass Endless(Traced):\n    def step(self, action):\n"
        "        while True:\n            os.write(1, b'x' * 100_000)\n"
    )
    env = Env(id=f"{tmp_path / 'endless.py'}:Endless", num=1, workers=1, step_timeout_seconds=1.0, rebuilds=0)
    world = make_world(env, seed=SEED, stream=TRAIN, logs=tmp_path)
    world.reset()
    world.send(np.zeros(1, np.int64))
    with pytest.raises(EnvError, match="did not answer in time"):
        world.receive()
    world.close()
    assert (tmp_path / "worker_0.log").stat().st_size == LOG_BYTES


# ---- Budget, quarantine, error.


def test_a_lane_over_its_budget_is_quarantined_and_the_last_one_raises() -> None:
    with world_of("Breaking", every=8, rebuilds=0) as world:
        record = Record(world)
        out = [np.zeros(NUM, bool)]

        def no_steps_there() -> bool:
            row = record.rows[-1]
            assert row["last"][out[-1]].all()
            assert not world.quarantined[~row["last"]].any()
            out.append(world.quarantined)
            return False

        with pytest.raises(EnvError) as caught:
            record.run(100_000, until=no_steps_there)
        record.check()
        assert len({int(lanes.sum()) for lanes in out}) == NUM  # one after the other
        record.faults += world.take_faults()
        assert [fault.quarantined for fault in record.faults] == [fault.lanes for fault in record.faults]
        assert len(record.faults) == NUM
    assert "all 4 environments failed more than 0 times (env.rebuilds) in 600 s" in caught.value.what
    assert "ZeroDivisionError: the toy broke" in caught.value.why
    assert "in _fail" in str(caught.value.__cause__)
    assert caught.value.exit_code == 4


def test_a_quarantined_lane_takes_no_steps() -> None:
    with world_of("Breaking", every=8, rebuilds=0) as world:
        record = Record(world)
        record.run(300, until=lambda: bool(world.quarantined.any()))
        record.run(2)
        out = int(world.quarantined.sum())
        ends = int(record.actor.last.sum())
        record.actor.send()
        assert record.actor.in_flight == NUM - ends
        assert ends >= out
        record.actor.receive()


def test_dying_processes_are_charged_to_their_lanes_until_the_run_ends() -> None:
    with world_of("Crashing", every=1, rebuilds=1, workers=2) as world:
        record = Record(world)
        with pytest.raises(EnvError, match="SIGSEGV") as caught:
            record.run(10_000)
        assert "Segmentation fault" in caught.value.why
        given_up = [fault.quarantined for fault in record.faults + world.take_faults()]
        assert sorted(lane for lanes in given_up for lane in lanes) == list(range(NUM))
        assert max(map(len, given_up)) == 1  # only the lane that was being stepped is charged


def test_the_error_for_a_hang_suggests_a_longer_timeout() -> None:
    with world_of("Hanging", every=1, rebuilds=0, step_timeout_seconds=0.5, num=1, workers=1) as world:
        with pytest.raises(EnvError) as caught:
            Record(world).run(100)
        assert "raise env.step_timeout_seconds" in caught.value.fix


def test_the_error_for_a_leak_in_the_last_lane_suggests_more_memory() -> None:
    with world_of("Leaking", every=1, rebuilds=0, worker_memory_gib=0.01, num=2, workers=1) as world:
        record = Record(world)
        with pytest.raises(EnvError) as caught:  # its last step was valid, and its fault was taken with it
            record.run(1_000_000)
        assert [fault.kind for fault in record.faults] == ["leaked"]
    assert "beyond env.worker_memory_gib" in caught.value.what
    assert "raise env.worker_memory_gib" in caught.value.fix
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("at", [0, 2])
def test_a_state_with_failed_lanes_can_be_restored(at: int) -> None:
    toy = {"toy": "Breaking", "every": 8, "at": at, "rebuilds": 0}
    with world_of(**toy) as world, world_of(**toy) as again:
        record = Record(world)
        record.run(300, until=lambda: bool(world.quarantined.any()))
        record.run(3)
        state = record.actor.state_dict()
        actor = make_actor(again)
        assert not actor.load_state_dict(state).any()
        assert np.array_equal(actor.current().obs, record.actor.current().obs)
        assert np.array_equal(actor.last, record.actor.last)
        assert not again.take_faults()
        assert not again.quarantined.any()  # budgets are not restored


# ---- Faults from outside.


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_workers_killed_or_stopped_at_random_moments_are_replaced(name: str) -> None:
    rng = random.Random(5)
    with world_of("Traced", 6, 3, rebuilds=1_000, step_timeout_seconds=1.0) as world:
        record = Record(world)
        for number in range(5):
            record.run(rng.randrange(20, 40))
            victim = rng.choice(worker_pids(world))
            record.actor.send()
            time.sleep(rng.random() * 0.003)
            os.kill(victim, getattr(signal, name))
            rollout, _ = record.actor.receive()
            record.rows.append({key: getattr(rollout, key)[0] for key in ("obs", "reward", "discount", "last")})
            start = time.monotonic()
            record.run(100_000, until=lambda n=number: len(record.faults) > n and len(worker_pids(world)) == 3)  # type: ignore[misc]
            assert time.monotonic() - start < 5
            assert ended_within([victim], 2)
        record.run(40).check()
        assert len(record.faults) == 5
        assert {fault.kind for fault in record.faults} == {"died" if name == "SIGKILL" else "hung"}
        assert all(len(fault.lanes) == 2 for fault in record.faults)


@pytest.mark.chaos
def test_a_replacement_resolves_relative_ids_from_the_original_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("from qfleet.testing.toys import Traced\nclass Mine(Traced):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    world = make_world(Env(id="mine.py:Mine", num=2, workers=1), seed=SEED, stream=TRAIN)
    monkeypatch.chdir("/")
    record = Record(world).run(5)
    os.kill(worker_pids(world)[0], signal.SIGKILL)
    record.run(20).check()
    assert len(record.faults) == 1
    world.close()


def test_a_worker_is_not_hung_because_this_process_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom qfleet.testing.toys import Traced\nclass Slow(Traced):\n    def step(self, action):\n"
        "        time.sleep(0.5)\n        return super().step(action)\n"
    )
    env = Env(id=f"{tmp_path / 'slow.py'}:Slow", num=1, workers=1, step_timeout_seconds=5.0)
    world: Any = make_world(env, seed=SEED, stream=TRAIN)
    with closing(world):
        world.reset()
        world.send(np.zeros(1, np.int64))
        monkeypatch.setattr(world._pool, "_clock", lambda: time.monotonic() + 3_600.0)  # Ctrl-Z, and an hour later
        assert world.receive().lost is None
        assert not world.take_faults()


@pytest.mark.chaos
def test_all_workers_are_replaced_if_killed_at_once() -> None:
    with world_of("Traced", 4, 2, rebuilds=10) as world:
        record = Record(world).run(20)
        for pid in worker_pids(world):
            os.kill(pid, signal.SIGKILL)
        record.run(60).check()
        assert len(record.faults) == 2


PARENT = """
import os, signal, sys, time
import numpy as np
from qfleet.envs import TRAIN, make_world
from qfleet.plan.schema import Env
env = Env(id="qfleet.testing.toys:toys/Hanging-v0", num=3, workers=3, options={"fault": sys.argv[1], "every": 2})
world = make_world(env, seed=1, stream=TRAIN)
world.reset()
for _ in range(2):
    world.send(np.zeros(3, np.int64))
    if _ == 0:
        world.receive()
time.sleep(0.3)
pids = [child.process.pid for child in world._pool.workers]
print(*pids, flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
for pid in pids:
    os.kill(pid, signal.SIGSTOP)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["", "hard"])
def test_workers_end_if_their_parent_is_killed(fault: str) -> None:
    before = set(os.listdir(SHARED))
    command = [sys.executable, "-c", PARENT, fault, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert all(map(alive, pids))
        assert len(pids) == 3
        parent.kill()
    assert ended_within(pids, 5)
    assert set(os.listdir(SHARED)) <= before


KENNEL = """
import subprocess
from pathlib import Path
from qfleet.testing.toys import Hanging
class Kennel(Hanging):
    def reset(self, **settings):
        dog = subprocess.Popen(["sleep", "1000"])
        (Path(__file__).parent / f"{dog.pid}.dog").touch()
        return super().reset(**settings)
"""


@pytest.mark.chaos
def test_processes_started_by_environments_end_if_the_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "kennel.py").write_text(KENNEL)
    script = PARENT.replace("qfleet.testing.toys:toys/Hanging-v0", f"{tmp_path / 'kennel.py'}:Kennel")
    command = [sys.executable, "-c", script, "hard", "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        dogs = [int(file.stem) for file in tmp_path.glob("*.dog")]
        try:
            assert sum(map(alive, dogs)) >= 3
            parent.kill()
            assert ended_within(dogs, 5)
        finally:
            for pid in filter(alive, dogs):
                os.kill(pid, signal.SIGKILL)


def test_an_unclosed_world_does_not_block_process_exit() -> None:
    command = [sys.executable, "-c", PARENT, "hard", "exit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert ended_within([int(pid) for pid in done.stdout.split()], 5)


def test_closing_leaves_no_process_and_no_descriptor() -> None:
    with world_of("Traced"):
        pass  # the fork server and its pipes stay
    before = set(os.listdir("/proc/self/fd"))
    with world_of("Traced") as world:
        record = Record(world).run(5)
        pids = worker_pids(world)
        os.kill(pids[0], signal.SIGKILL)
        pids += worker_pids(record.run(30).world)
    assert ended_within(pids, 1)
    world.close()
    assert set(os.listdir("/proc/self/fd")) == before
