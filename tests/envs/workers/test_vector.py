"""Environments in worker processes: the same rows as without workers, and the errors for users."""

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from qfleet.envs import TRAIN, make_world
from qfleet.envs.episodes import episode_seed
from qfleet.envs.workers.vector import ProcessVectorEnv
from qfleet.errors import EnvError, UsageError
from qfleet.plan.schema import Env
from qfleet.testing.toys import Traced
from tests.envs.record import (
    NUM,
    SEED,
    drive,
    world_of,
)
from tests.envs.steps import assert_same

# ---- Equal to a world without workers.


@pytest.mark.parametrize("toy", ["Random", "Masked", "Traced"])
@pytest.mark.parametrize("workers", [1, 3])
def test_rows_equal_those_of_a_world_without_workers(toy: str, workers: int) -> None:
    with world_of(toy, 5, workers) as ours, world_of(toy, 5, 0) as plain:
        assert isinstance(ours, ProcessVectorEnv)
        assert ours.spec == plain.spec
        seen = [drive(world, 120, np.random.default_rng(3), world.reset()) for world in (ours, plain)]
        for a, b in zip(*seen, strict=True):
            assert_same(a, b)
        assert_same(ours.reset(), plain.reset())
        assert not ours.take_faults()


@pytest.mark.parametrize("steps", [0, 1, 37, 90])
def test_a_saved_world_is_restored_with_and_without_workers(steps: int) -> None:
    with world_of("Random", 5, 2) as ours, world_of("Random", 5, 0) as plain, world_of("Random", 5, 3) as other:
        rng = np.random.default_rng(3)
        here = drive(ours, steps, rng, ours.reset())[-1]
        drive(plain, steps, np.random.default_rng(3), plain.reset())
        state = ours.state_dict()
        same = plain.state_dict()
        assert state.keys() == same.keys()
        for key in state:
            np.testing.assert_array_equal(state[key], same[key])
        drive(other, 5, rng, other.reset())
        again = [world.load_state_dict(state) for world in (other, plain)]
        assert_same(*again)
        np.testing.assert_array_equal(here.obs, again[0].obs)
        goes_on = [drive(w, 60, np.random.default_rng(4), s) for w, s in ((ours, here), (other, again[0]))]
        for a, b in zip(*(seen[1:] for seen in goes_on), strict=True):
            assert_same(a, b)


def test_an_abandoned_lane_starts_a_new_episode() -> None:
    with world_of("Traced") as world:
        drive(world, 2, np.random.default_rng(0), world.reset())
        world.abandon(np.array([False, True, False, False]))
        world.send(np.zeros(NUM, np.int64))
        step = world.receive()
        assert tuple(step.obs[1]) == Traced.shown(episode_seed(SEED, TRAIN, 1, 1), 0)
        assert step.obs[0, 2] == 3
        assert step.lost is None


def test_a_step_under_way_must_be_received_before_saving() -> None:
    with world_of("Traced") as world:
        world.reset()
        with pytest.raises(RuntimeError, match="without send"):
            world.receive()
        world.send(np.zeros(NUM, np.int64))
        for act in (world.state_dict, lambda: world.abandon(np.zeros(NUM, bool))):
            with pytest.raises(RuntimeError, match="under way"):
                act()
        assert_same(world.reset(), world.reset())  # reset discards the step


SLOW = """
import time
from qfleet.testing.toys import Traced
class Slow(Traced):
    def step(self, action):
        time.sleep({seconds})
        return super().step(action)
    @staticmethod
    def length(seed):
        return 1_000
"""


def slow_env(tmp_path: Path, seconds: float) -> str:
    (tmp_path / "slow.py").write_text(SLOW.format(seconds=seconds))
    return f"{tmp_path / 'slow.py'}:Slow"


def test_a_running_step_finishes_before_its_environment_is_closed(tmp_path: Path) -> None:
    name = slow_env(tmp_path, 0.3)
    marked = str(tmp_path / "closed")
    with (tmp_path / "slow.py").open("a") as file:
        file.write(f"    def close(self):\n        open({marked!r}, 'w').close()\n")
    world = make_world(Env(id=name, num=1, workers=1), seed=SEED, stream=TRAIN)
    world.reset()
    (tmp_path / "closed").unlink()  # written by the copy that was probed for its spaces
    world.send(np.zeros(1, np.int64))
    world.close()
    assert (tmp_path / "closed").exists()


def test_environments_step_between_send_and_receive(tmp_path: Path) -> None:
    world = make_world(Env(id=slow_env(tmp_path, 0.3), num=2, workers=2), seed=SEED, stream=TRAIN)
    world.reset()
    start = time.monotonic()
    world.send(np.zeros(2, np.int64))
    assert time.monotonic() - start < 0.2
    time.sleep(0.5)
    start = time.monotonic()
    world.receive()
    assert time.monotonic() - start < 0.2
    world.close()


@pytest.mark.slow
def test_eight_slow_environments_on_two_workers_are_twice_as_fast(tmp_path: Path) -> None:
    """Best of three on a shared machine: at least 0.9 x workers x the speed of one.

    No episode ends during the test: a reset takes no time, and each row waits for the worker with fewer resets.
    With episodes of 3 to 9 steps that alone costs 9 %.
    """
    env = Env(id=slow_env(tmp_path, 0.005), num=8)

    def speed(num: int, workers: int) -> float:
        world = make_world(Env(id=env.id, num=num, workers=workers), seed=SEED, stream=TRAIN)
        rng = np.random.default_rng(0)
        step = world.reset()
        start = time.monotonic()
        steps = sum(num - int(s.terminated.sum() + s.truncated.sum()) for s in drive(world, 100, rng, step)[:-1])
        rate = steps / (time.monotonic() - start)
        world.close()
        return rate

    ratio = max(speed(8, 2) / (2 * speed(1, 0)) for _ in range(3))
    print(f"ratio {ratio:.3f}")
    assert ratio >= 0.9


# ---- Requirements and errors for users.


def test_a_users_own_function_is_called_in_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import numpy as np\nfrom qfleet.envs import TRAIN, make_world\nfrom qfleet.testing.toys import Traced\n"
        "from qfleet.plan.schema import Env\n"
        "def make():\n    return Traced()\n"
        "if __name__ == '__main__':\n"
        "    world = make_world(Env(id='own', num=2, workers=1), seed=1, stream=TRAIN, make=make)\n"
        "    print(world.reset().obs.shape)\n    world.close()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout == "(2, 3)\n", done.stderr


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from qfleet.testing.toys import Traced\nclass Mine(Traced):\n    pass\n")
    (tmp_path / "script.py").write_text(
        "print('run')\nimport gymnasium\n"
        "from qfleet.envs import TRAIN, make_world\nfrom qfleet.plan.schema import Env\n"
        "gymnasium.register('Mine-v0', entry_point='mine:Mine')\n"
        "for name in ('mine.py:Mine', 'Mine-v0'):\n"
        "    world = make_world(Env(id=name, num=2, workers=2), seed=1, stream=TRAIN)\n"
        "    print(world.reset().obs.shape)\n    world.close()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout == "run\n(2, 3)\n(2, 3)\n", done.stderr


def test_a_function_inside_a_function_is_sent() -> None:
    with closing(make_world(Env(id="x", num=2, workers=2), seed=1, stream=TRAIN, make=lambda: Traced())) as world:
        assert len(world.reset().obs) == 2


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    held = threading.Lock()

    def make() -> Traced:
        with held:
            return Traced()

    with pytest.raises(UsageError, match="cannot be sent to another process") as caught:
        make_world(Env(id="x", workers=2), seed=1, stream=TRAIN, make=make)
    assert "env.workers=2" in caught.value.what
    assert "lock" in caught.value.why
    assert "no open files, locks or generators" in caught.value.fix


@pytest.mark.parametrize("name", ["CartPole-v1", "ALE/Pong-v5"])
def test_native_worlds_refuse_workers(name: str) -> None:
    with pytest.raises(UsageError, match=r"env\.workers=2 has no effect"):
        make_world(Env(id=name, workers=2), seed=1, stream=TRAIN)


@pytest.mark.parametrize(
    ("env", "kind", "message"),
    [
        (Env(id="Nothing-v0", workers=1), UsageError, "is not a known environment"),
        (Env(id="qfleet.testing.toys:toys/Random-v0", workers=1, bins=3), UsageError, "env.bins=3 has no effect"),
        (
            Env(id="qfleet.testing.toys:toys/Random-v0", workers=1, options={"colour": 3}),
            UsageError,
            "env.options={'colour': 3} was refused",
        ),
        (
            Env(id="qfleet.testing.toys:toys/Breaking-v0", workers=1, options={"at": 0}),
            EnvError,
            r"reset\(\) raised ZeroDivisionError",
        ),
        (
            Env(id="qfleet.testing.toys:toys/Crashing-v0", workers=1, options={"at": 0}),
            EnvError,
            "was ended by SIGSEGV when the first copy",
        ),
    ],
)
def test_an_environment_that_cannot_start_raises_at_once(env: Env, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        make_world(env, seed=1, stream=TRAIN)
    if kind is EnvError:
        assert "in _fail" in str(caught.value.__cause__)


def test_an_environment_that_exits_in_its_first_reset_raises_at_once(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(
        "import os\nfrom qfleet.testing.toys import Traced\nclass Leaving(Traced):\n"
        "    def reset(self, *, seed=None, options=None):\n        os._exit(0)\n"
    )
    env = Env(id=f"{tmp_path / 'leaving.py'}:Leaving", workers=1)
    with pytest.raises(EnvError, match="ended with exit code 0 when the first copy was made and reset") as caught:
        make_world(env, seed=1, stream=TRAIN)
    assert caught.value.exit_code == 4


def test_workers_do_not_load_torch() -> None:
    code = "import sys, qfleet.envs.workers.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_a_world_with_rendering_stays_in_this_process() -> None:
    env = Env(id="MountainCar-v0", num=1, workers=2)
    world = make_world(env, seed=1, stream=TRAIN, render_mode="rgb_array")
    assert not isinstance(world, ProcessVectorEnv)
    world.close()
