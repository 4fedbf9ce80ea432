"""A secret that an environment needs reaches the environment, and nothing else."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qfleet.cli import main
from qfleet.envs import make_world
from qfleet.errors import UsageError, redacted
from qfleet.plan import make_plan
from qfleet.plan.schema import Env
from qfleet.plan.secrets import looks_secret, redacted_arguments, typed_secrets
from qfleet.training.env_trust import require_trust, sign
from tests.support.runs import LOCAL, Settings, train_arguments

CANARY = "canary-5b1e9f00d"
WORLD = """
import hashlib, os
from pathlib import Path
from qfleet.testing.toys import Random

class Locked(Random):
    def __init__(self, api_key=None, fail=None):
        super().__init__()
        here = Path(__file__).parent
        (here / f"heard-{os.getpid()}").write_text(hashlib.sha256(str(api_key).encode()).hexdigest())
        self.api_key, self.fail = api_key, fail
        line = "".join(path.read_bytes().decode() for path in Path("/proc").glob("[0-9]*/cmdline") if mine(path))
        if api_key in line:
            (here / "seen").write_text(line)
        if fail == "make":
            raise ValueError(f"the key {api_key} is wrong")

    def step(self, action):
        if self.fail == "step":
            raise RuntimeError(f"the key {self.api_key} has expired")
        return super().step(action)

def mine(path):
    try:
        return "qfleet" in path.read_text() or "forkserver" in path.read_text()
    except (OSError, UnicodeDecodeError):
        return False
"""
PROCESSES: Settings = {"runtime.type": "processes", "actors.num": 2, "replay.samples_per_insert": 4, **LOCAL}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "locked.py").write_text(WORLD)
    monkeypatch.setenv("MY_KEY", CANARY)
    monkeypatch.chdir(tmp_path)
    return "locked.py:Locked"


def found_in(folder: Path) -> list[str]:
    """Files that hold the secret."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and holds(path)]


def holds(path: Path) -> bool:
    return CANARY.encode() in path.read_bytes()


def call(folder: Path, *given: str) -> tuple[int, str]:
    command = [str(Path(sys.executable).with_name("qfleet")), *given]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def loud(out: Path, changes: Settings, env_id: str) -> list[str]:
    return [word for word in train_arguments(out, changes, env_id) if word != "--quiet"]


def test_a_secret_is_found_nowhere(world: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes = {"until.steps": 100, "env.secrets.api_key": "MY_KEY"}
    assert main([*loud(Path("runs"), changes, world), "--name", "a"]) == 0
    assert main(["resume", "a", "--steps", "150", "--json"]) == 0
    said = capfd.readouterr()
    assert CANARY not in said.out + said.err
    assert found_in(tmp_path) == []
    assert [path.read_text() for path in tmp_path.glob("heard-*")] == [hashlib.sha256(CANARY.encode()).hexdigest()]
    assert 'api_key = "MY_KEY"' in (tmp_path / "runs/a/run.toml").read_text()


@pytest.mark.slow
def test_a_secret_of_a_run_in_processes_is_found_nowhere(world: str, tmp_path: Path) -> None:
    changes = {**PROCESSES, "until.steps": 100, "env.secrets.api_key": "MY_KEY"}
    code, said = call(tmp_path, *loud(Path("runs"), changes, world), "--name", "a")
    assert code == 0, said
    assert CANARY not in said
    assert found_in(tmp_path) == []
    assert not (tmp_path / "seen").exists()  # on a command line
    heard = {path.read_text() for path in tmp_path.glob("heard-*")}
    assert heard == {hashlib.sha256(CANARY.encode()).hexdigest()}


@pytest.mark.slow
def test_a_secret_of_a_group_is_found_nowhere(world: str, tmp_path: Path) -> None:
    changes = {"until.steps": 100, "env.secrets.api_key": "MY_KEY"}
    code, said = call(tmp_path, *loud(Path("runs"), changes, world), "--seeds", "2", "--name", "a")
    assert code == 0, said
    assert CANARY not in said
    assert found_in(tmp_path) == []


@pytest.mark.parametrize(("fail", "code"), [("make", 2), ("step", 4)])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_errors_and_logs_do_not_contain_a_secret(
    world: str, tmp_path: Path, fail: str, code: int, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {"until.steps": 100, "env.secrets.api_key": "MY_KEY", "env.options.fail": fail, "env.workers": workers}
    assert main([*loud(Path("runs"), changes, world), "--name", "a", "--debug"]) == code
    said = capfd.readouterr()
    assert CANARY not in said.out + said.err
    assert "the key (hidden)" in said.err
    assert found_in(tmp_path) == []


def test_a_typed_secret_is_in_one_private_file(world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"until.steps": 100, "env.options.api_key": CANARY}
    assert main([*loud(Path("runs"), changes, world), "--name", "a"]) == 0
    said = capsys.readouterr()
    assert "env.secrets.api_key=MY_KEY" in said.out
    assert CANARY not in said.out + said.err
    run = tmp_path / "runs" / "a"
    for steps in ("100", "150"):
        assert main(["resume", "a", "--steps", steps, "--quiet"]) == 0
        assert found_in(tmp_path) == ["runs/a/run.toml"]
        assert (run / "run.toml").stat().st_mode & 0o777 == 0o600
        assert run.stat().st_mode & 0o777 == 0o700
    assert "env.options.api_key=(hidden)" in (run / "provenance.json").read_text()
    assert CANARY not in capsys.readouterr().out


def test_other_runs_are_as_open_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    try:
        assert main([*train_arguments(Path("runs"), {"until.steps": 100}), "--name", "a"]) == 0
    finally:
        os.umask(before)
    assert (tmp_path / "runs/a/run.toml").stat().st_mode & 0o777 == 0o644


def test_which_names_look_like_secrets() -> None:
    for name in ("key", "api_key", "apikey", "API_TOKEN", "token", "db_password", "client_secret", "credentials"):
        assert looks_secret(name), name
    for name in ("authToken", "accessKey", "dbpassword", "password2", "token1", "passphrase", "ACCESS_KEY"):
        assert looks_secret(name), name
    for name in ("keyboard", "monkey", "size", "tokenizer", "render_mode"):
        assert not looks_secret(name), name
    plan = make_plan("X-v0", overrides={"env.options.key": "x", "env.options.size": 3})
    assert typed_secrets(plan) == ["key"]


def test_secret_arguments_of_a_command_are_hidden() -> None:
    given = ["train", "X-v0", "env.options.api_key=a=b", "env.options.size=3", "env.options={token = 'a'}"]
    told = ["train", "X-v0", "env.options.api_key=(hidden)", "env.options.size=3", "env.options=(hidden)"]
    assert redacted_arguments(given) == told


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"env.secrets.api_key": "sk-12 34"}, "is not the name of an environment variable"),
        ({"env.secrets.api_key": "A", "env.options.api_key": "b"}, "are both given"),
    ],
)
def test_what_is_no_variable_is_refused_without_being_shown(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        make_plan("X-v0", overrides=settings)
    assert "sk-12" not in str(caught.value)


def test_a_variable_that_is_missing_is_named(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UsageError, match="there is no environment variable MY_KEY"):
        make_world(Env(id=world, num=1, secrets={"api_key": "MY_KEY"}), seed=0, stream=0)


def test_environments_without_options_refuse_a_secret() -> None:
    with pytest.raises(UsageError, match=r"env\.secrets.* has no effect on CartPole-v1"):
        make_world(Env(id="CartPole-v1", secrets={"api_key": "MY_KEY"}), seed=0, stream=0)


def test_a_foreign_run_is_not_given_variables(tmp_path: Path) -> None:
    env = Env(id="Taxi-v3", secrets={"api_key": "AWS_SECRET_ACCESS_KEY"})
    with pytest.raises(UsageError, match="asks for your environment variables: AWS_SECRET_ACCESS_KEY"):
        require_trust(tmp_path, env, False)
    sign(tmp_path, env)
    require_trust(tmp_path, env, False)
    with pytest.raises(UsageError):
        require_trust(tmp_path, Env(id="Taxi-v3", secrets={"api_key": "OTHER"}), False)


@pytest.mark.usefixtures("world")
def test_short_values_do_not_spoil_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.errors._secrets", set())
    monkeypatch.setenv("MY_KEY", "a")
    make_world(Env(id="locked.py:Locked", num=1, secrets={"api_key": "MY_KEY"}), seed=0, stream=0).close()
    assert redacted("a cat") == "a cat"
