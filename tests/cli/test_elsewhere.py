"""`eval --env`, `eval --variants`, `play`, `env list` and `env.wrappers` on the command line."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qfleet.cli import main
from qfleet.plan import read_plan
from tests.support.runs import small, train_arguments, trained

Captured = pytest.CaptureFixture[str]
CHILD = [sys.executable, "-P", "-c", "import sys; from qfleet.cli import main; sys.exit(main())"]
ROOT = Path(__file__).parents[2]
OWN = """
import os
import gymnasium as gym
import numpy as np


class Walk(gym.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, size=3, leave=False, render_mode=None):
        self.size, self.leave, self.render_mode = size, leave, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        if self.leave:
            os._exit(9)
        self.steps += 1
        return self.np_random.random(2, np.float32), 1.0, self.steps >= self.size, False, {}

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)


class Slow(gym.Wrapper):
    def step(self, action):
        import time
        time.sleep(0.05)
        return super().step(action)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run on CartPole, and the user's own environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "walk.py").write_text(OWN)
    return tmp_path


@pytest.fixture
def cartpole(place: Path) -> str:
    return trained(small({"until.steps": 120}), place / "runs").path.name


@pytest.fixture
def walk(place: Path) -> str:
    """A run in the user's own environment, by a command."""
    assert main(train_arguments(place / "runs", {"until.steps": 120}, "walk.py:Walk")) == 0
    return "latest"


def rows_of(capsys: Captured) -> Any:
    return json.loads(capsys.readouterr().out)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as a user types it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*CHILD, *arguments], capture_output=True, text=True, timeout=100, env=env)


def test_eval_says_where_it_was(cartpole: str, capsys: Captured) -> None:
    assert main(["eval", cartpole, "--episodes", "3", "env.options.max_episode_steps=4"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mean 4.00, 95 % interval 4.00 to 4.00\n")
    assert "in CartPole-v1, max_episode_steps=4; trained in CartPole-v1\n" in shown
    assert main(["eval", cartpole, "--episodes", "3", "--env", "CartPole-v0", "--json"]) == 0
    row = rows_of(capsys)
    assert (row["env"], row["options"], row["episodes"]) == ("CartPole-v0", {}, 3)


def test_eval_refuses_other_spaces_and_other_settings(cartpole: str, capsys: Captured) -> None:
    assert main(["eval", cartpole, "--env", "Acrobot-v1"]) == 2
    assert "the policy's are (4,)" in capsys.readouterr().err
    assert main(["eval", cartpole, "algo.n_step=3"]) == 2
    assert "cannot be changed for an evaluation" in capsys.readouterr().err
    assert main(["eval", cartpole, "Acrobot-v1"]) == 2
    assert "--env Acrobot-v1" in capsys.readouterr().err
    assert main(["eval", cartpole, "--trust-variants"]) == 2
    assert "--trust-variants has no effect" in capsys.readouterr().err


def test_code_that_is_typed_is_trusted(cartpole: str, place: Path, capsys: Captured) -> None:
    (place / "limits.py").write_text(
        "import gymnasium as gym\ndef one(env):\n    return gym.wrappers.TimeLimit(env, 1)\n"
    )
    assert main(["eval", cartpole, "--episodes", "2", "env.wrappers=[limits.py:one]", "--json"]) == 0
    row = rows_of(capsys)
    assert row["mean"] == 1.0
    assert row["wrappers"] == ["limits.py:one"]


def test_a_table_of_variants(cartpole: str, place: Path, capsys: Captured) -> None:
    (place / "v.toml").write_text('[short]\noptions = {max_episode_steps = 3}\n[old]\nenv = "CartPole-v0"\n')
    assert main(["eval", cartpole, "--episodes", "3", "--variants", "v.toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["variant", "mean", "95", "%", "interval", "episodes", "difference", "environment"]
    assert [line.split()[0] for line in lines[1:]] == ["training", "short", "old"]
    assert lines[2].split()[1:5] == ["3.00", "3.00", "to", "3.00"]
    assert lines[2].endswith("CartPole-v1, max_episode_steps=3")
    assert main(["eval", cartpole, "--episodes", "3", "--variants=v.toml", "--json"]) == 0
    rows = rows_of(capsys)
    assert [row["name"] for row in rows] == ["training", "short", "old"]
    assert rows[1]["difference"] == pytest.approx(3 - rows[0]["mean"])


def test_a_variant_that_fails_does_not_lose_the_others(cartpole: str, place: Path, capsys: Captured) -> None:
    (place / "v.toml").write_text('[wrong]\nenv = "Acrobot-v1"\n[none]\nenv = "No-v0"\n[old]\nenv = "CartPole-v0"\n')
    assert main(["eval", cartpole, "--episodes", "2", "--variants", "v.toml", "--json"]) == 2
    shown = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(shown.out)}
    assert "mean" in rows["old"]
    assert "other spaces" in rows["wrong"]["error"]
    assert "is not a known environment" in rows["none"]["error"]
    assert "error: wrong: Acrobot-v1" in shown.err


def test_variants_differ_from_the_environment_that_is_typed(cartpole: str, place: Path, capsys: Captured) -> None:
    (place / "v.toml").write_text("[short]\noptions = {max_episode_steps = 3}\n")
    arguments = ["--env", "CartPole-v0", "env.options.sutton_barto_reward=true", "--variants", "v.toml"]
    assert main(["eval", cartpole, "--episodes", "2", "--json", *arguments]) == 0
    rows = rows_of(capsys)
    assert rows[1]["env"] == "CartPole-v0"
    assert rows[1]["options"] == {"sutton_barto_reward": True, "max_episode_steps": 3}


def test_code_that_a_file_of_variants_names_is_not_imported(cartpole: str, place: Path, capsys: Captured) -> None:
    canary = place / "executed"
    (place / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\ndef W(env):\n    return env\n")
    for table in ('env = "evil.py:Env"', 'env = "evil:Env-v0"', 'wrappers = ["evil.py:W"]'):
        (place / "v.toml").write_text(f"[a]\n{table}\n")
        assert main(["eval", cartpole, "--episodes", "1", "--variants", "v.toml", "--trust-env"]) == 2
        assert "names code to run" in capsys.readouterr().err
    assert not canary.exists()
    assert main(["eval", cartpole, "--episodes", "1", "--variants", "v.toml", "--trust-variants"]) == 0
    assert canary.exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "has 0 variants"),
        ("a = 3", "is not a variant"),
        ("[training]", "is not a variant"),
        ("[a]\nnum = 3", "has no effect on an evaluation"),
        ("[a]\nunknown = 3", "is not a setting"),
        ("[a]\nenv = 3", "env= was given a int"),
        ("not toml = =", "is not TOML"),
        ('["\\u001b[31m"]', "is not a variant"),
    ],
)
def test_wrong_files_of_variants_are_refused(
    text: str, what: str, cartpole: str, place: Path, capsys: Captured
) -> None:
    (place / "v.toml").write_text(text)
    assert main(["eval", cartpole, "--episodes", "1", "--variants", "v.toml"]) == 2
    shown = capsys.readouterr().err
    assert what in shown
    assert "\x1b" not in shown


def test_a_missing_file_of_variants_is_named(cartpole: str, capsys: Captured) -> None:
    assert main(["eval", cartpole, "--variants", "gone.toml"]) == 2
    assert "there is no variants file gone.toml" in capsys.readouterr().err


def test_a_variant_that_ends_its_process_does_not_lose_the_others(walk: str, place: Path) -> None:
    (place / "v.toml").write_text(
        "[five]\noptions = {size = 5}\n[gone]\noptions = {leave = true}\n[two]\noptions = {size = 2}\n"
    )
    done = command("eval", walk, "--episodes", "2", "--variants", "v.toml", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert [rows[name]["mean"] for name in ("training", "five", "two")] == [3.0, 5.0, 2.0]
    assert "ended the process" in rows["gone"]["error"]
    assert "os._exit" in done.stderr
    assert done.returncode == 4


def test_a_run_that_cannot_be_loaded_has_no_table(cartpole: str, place: Path) -> None:
    (place / "v.toml").write_text('[old]\nenv = "CartPole-v0"\n')
    for path in (place / "runs" / cartpole / "checkpoints").glob("*/manifest.json"):
        path.write_text("{}")
    done = command("eval", cartpole, "--variants", "v.toml", "--json")
    assert done.returncode == 6
    assert done.stdout == ""
    assert done.stderr.count("error:") == 1


def test_wrappers_are_recorded_and_used_again(place: Path, capsys: Captured) -> None:
    (place / "limits.py").write_text("import gymnasium as gym\nclass Limit(gym.wrappers.TimeLimit):\n    pass\n")
    changes = {"until.steps": 120, "env.wrappers": "[limits.py:Limit(max_episode_steps=6)]"}
    assert main(train_arguments(place / "runs", changes)) == 0
    run = next((place / "runs").iterdir())
    assert read_plan(run / "run.toml").env.wrappers == (f"{place.resolve()}/limits.py:Limit(max_episode_steps=6)",)
    assert json.loads((run / "trust.json").read_text())["proof"]
    capsys.readouterr()
    assert main(["eval", "latest", "--episodes", "3", "--json"]) == 0
    assert rows_of(capsys)["mean"] == 6.0
    assert main(["resume", "latest", "--steps", "160", "--quiet"]) == 0
    assert main(["env", "check", "CartPole-v1", "env.wrappers=[limits.py:Limit(max_episode_steps=6)]"]) == 0
    assert "stepped one by one" in capsys.readouterr().out


def test_a_foreign_run_may_not_name_wrappers(place: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = place / "executed"
    (place / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\ndef W(env):\n    return env\n")
    assert main(train_arguments(place / "runs", {"until.steps": 120, "env.wrappers": "[evil.py:W]"})) == 0
    canary.unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "another"))
    for verb in (["eval", "latest"], ["play", "latest"], ["record", "latest"], ["resume", "latest", "--steps", "200"]):
        assert main([*verb]) == 2
        assert "names code to run: env.wrappers=" in capsys.readouterr().err
    assert main(["eval", "latest", "--env", "CartPole-v0", "env.wrappers=[]"]) == 2
    assert not canary.exists()
    assert main(["eval", "latest", "--trust-env", "--episodes", "1"]) == 0
    assert canary.exists()


# --- play ---


def test_play_through_a_pipe_prints_a_line_per_episode(walk: str, capsys: Captured) -> None:
    assert main(["play", walk, "--episodes", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "episode 1: return 3, 3 steps (terminated)",
        "episode 2: return 3, 3 steps (terminated)",
        "mean return 3 of 2 episodes",
    ]
    assert "latest weights" in shown.err
    assert main(["play", walk, "--episodes", "1", "env.options.size=5"]) == 0
    assert capsys.readouterr().out == "episode 1: return 5, 5 steps (terminated)\n"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--fps", "0"], "--fps 0 is not valid"),
        (["--fps", "500"], "--fps 500 is not valid"),
        (["--which", "worst"], "--which worst is not valid"),
        (["--env", "Acrobot-v1"], "Acrobot-v1 has other spaces"),
        (["algo.n_step=3"], "cannot be changed"),
    ],
)
def test_play_refuses_what_it_cannot_do(arguments: list[str], what: str, cartpole: str, capsys: Captured) -> None:
    assert main(["play", cartpole, *arguments]) == 2
    assert what in capsys.readouterr().err


def in_terminal(arguments: list[str], until: bytes, keys: bytes = b"") -> tuple[int, bytes]:
    """Run a command in a terminal; type the keys once it has printed `until`."""
    pid, terminal = pty.fork()
    if not pid:
        os.environ.update(PYTHONPATH=str(ROOT), TERM="xterm-256color", COLORTERM="truecolor", COLUMNS="60", LINES="20")
        os.environ.pop("DISPLAY", None)
        os.execv(CHILD[0], [*CHILD, *arguments])  # noqa: S606  our own program
    seen = b""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the terminal was closed
            break
        seen += data
        if keys and until in seen:
            os.write(terminal, keys)
            keys = b""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen


def test_play_draws_in_a_terminal(walk: str) -> None:
    code, seen = in_terminal(["play", walk, "--episodes", "1", "--fps", "60"], b"")
    assert code == 0
    assert "▀".encode() in seen
    assert b"episode 1: return 3, 3 steps (terminated)" in seen


def test_ctrl_c_ends_the_play_with_130_and_a_clean_terminal(walk: str) -> None:
    arguments = ["play", walk, "--episodes", "1", "--fps", "5", "env.options.size=100000"]
    code, seen = in_terminal(arguments, "▀".encode(), b"\x03")
    assert code == 130
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1
    assert b"Traceback" not in seen


# --- env list ---


def test_env_list_is_grouped(capsys: Captured) -> None:
    assert main(["env", "list", "*Car*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["id", "observation", "action", "trains", "note"]
    assert lines[1:3] == ["", "Gymnasium classic_control:"]
    assert lines[3].split()[:4] == ["CartPole-v1", "Box(4,)", "float32", "Discrete(2)"]
    assert "Gymnasium box2d:" in lines


def test_env_list_as_json_and_with_all_versions(capsys: Captured) -> None:
    assert main(["env", "list", "cartpole", "--all", "--json"]) == 0
    found = {row["id"]: row for row in rows_of(capsys)}
    assert found["CartPole-v0"]["trains"] == "yes"
    assert set(found["CartPole-v1"]) == {"id", "source", "observation", "action", "trains", "note"}


def test_env_list_without_a_match(capsys: Captured) -> None:
    assert main(["env", "list", "qqqq"]) == 2
    assert "no environment matches 'qqqq'" in capsys.readouterr().err
