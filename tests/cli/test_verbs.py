import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import qfleet.api
from qfleet.cli import main, output
from qfleet.errors import DivergedError, EnvError, NoCheckpointError, StorageError
from qfleet.install import install_command
from qfleet.plan import Plan, compose, make_plan, write_plan

Captured = pytest.CaptureFixture[str]


class Ended:
    """A finished run, as `qfleet.train` returns it."""

    def __init__(self, path: Path, exit_code: int = 0) -> None:
        self.path, self.exit_code = path, exit_code


class Calls(list[tuple[Any, dict[str, Any]]]):
    """Stands in for a function of the run room: remembers its arguments, answers with an ended run."""

    def __init__(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code

    def __call__(self, subject: Any, **arguments: Any) -> Ended:
        self.append((subject, arguments))
        return Ended(Path("runs") / "my run", self.exit_code)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.chdir(tmp_path)
    calls = Calls()
    monkeypatch.setattr(qfleet.api, "train", calls)
    return calls


def make_run(name: str, plan: Plan | None = None) -> Path:
    path = Path("runs") / name
    path.mkdir(parents=True)
    write_plan(plan or make_plan("CartPole-v1"), path / "run.toml")
    return path


def test_train_passes_the_plan_and_prints_a_summary(train: Calls, capsys: Captured) -> None:
    command = ["train", "CartPole-v1", "algo.n_step=3", "--steps", "5_000", "--preset", "per", "seed=4", "--name", "x"]
    assert main(command) == 0
    plan, arguments = train[0]
    expected = {"algo.n_step": 3, "until.steps": 5000, "seed": 4}
    assert plan == make_plan("CartPole-v1", "per", expected)
    assert (arguments["out"], arguments["name"], arguments["weights_from"]) == ("runs", "x", None)
    assert arguments["command"] == ["qfleet", *command]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == (
        "CartPole-v1: Double DQN, prioritised replay, 3-step returns;"
        " cartpole defaults, preset per, algo.n_step=3, until.steps=5000, seed=4"
    )
    assert shown[-3:] == ["run    runs/my run", "next   qfleet plot 'runs/my run'", "       qfleet eval 'runs/my run'"]


def test_a_preset_names_the_run(train: Calls) -> None:
    assert main(["train", "CartPole-v1", "--preset", "rainbow-small"]) == 0
    assert main(["train", "CartPole-v1"]) == 0
    assert [arguments["name"] for _, arguments in train] == ["cartpole-rainbow-small-#", "cartpole-double-n5-#"]


def test_an_untuned_environment_is_noted(train: Calls, capsys: Captured) -> None:
    assert main(["train", "Taxi-v3"]) == 0
    assert capsys.readouterr().out.startswith(
        "Taxi-v3: Double DQN, 3-step returns; general defaults (none tuned for Taxi-v3)\n"
    )


def test_json_keeps_standard_output_for_rows(train: Calls, capsys: Captured) -> None:
    assert main(["train", "CartPole-v1", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "cartpole defaults" in shown.err


def test_quiet_prints_nothing_of_its_own(train: Calls, capsys: Captured) -> None:
    assert main(["train", "CartPole-v1", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_settings_may_come_before_and_between_options(train: Calls) -> None:
    Path("p.toml").write_text('[env]\nid = "Acrobot-v1"\n')
    assert main(["train", "seed=3", "--plan", "p.toml", "algo.n_step=2"]) == 0
    plan = train[0][0]
    assert (plan.env.id, plan.seed, plan.algo.n_step) == ("Acrobot-v1", 3, 2)


def test_the_exit_code_is_that_of_the_run(train: Calls, capsys: Captured) -> None:
    train.exit_code = 75
    assert main(["train", "CartPole-v1"]) == 75
    assert "qfleet plot 'runs/my run'" in capsys.readouterr().out


def test_weights_come_from_another_run(train: Calls) -> None:
    path = make_run("first")
    assert main(["train", "CartPole-v1", "--from", "fir"]) == 0
    assert Path(train[0][1]["weights_from"]) == path


def test_dry_run_shows_all_and_starts_nothing(train: Calls, capsys: Captured) -> None:
    arguments = ["train", "CartPole-v1", "--dry-run", "algo.n_step=3"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert train == []
    assert list(Path.cwd().iterdir()) == []
    line = next(line for line in shown.splitlines() if line.startswith("algo.n_step "))
    assert line.split() == ["algo.n_step", "3", "command", "line"]
    assert all(part in shown for part in ("replay ", "checkpoint ", "updates ", "Nothing was run"))
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"]["replay_bytes"] > 0


def test_resume_finds_the_run_and_extends_it(train: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = Calls()
    monkeypatch.setattr(qfleet.api, "resume", resume)
    path = make_run("cartpole-dqn-0001")
    assert main(["resume", "latest", "--steps", "1e5", "--strict", "--trust-env", "--quiet"]) == 0
    found, arguments = resume[0]
    assert Path(found) == path
    assert {key: arguments[key] for key in ("steps", "strict", "trust_env")} == {
        "steps": 100_000,
        "strict": True,
        "trust_env": True,
    }


def test_plan_show_is_a_plan_file(train: Calls, capsys: Captured) -> None:
    assert main(["plan", "show", "CartPole-v1", "algo.n_step=2", "net.torso=none"]) == 0
    Path("mine.toml").write_text(capsys.readouterr().out)
    expected = make_plan("CartPole-v1", overrides={"algo.n_step": 2, "net.torso": None})
    assert compose(file="mine.toml").plan == expected
    assert main(["plan", "show", "mine.toml", "--origin", "seed=9"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["seed", "9", "command line"] in rows
    assert ["algo.n_step", "2", "mine.toml"] in rows
    assert main(["plan", "check", "mine.toml"]) == 0
    assert "The plan is sound" in capsys.readouterr().out


def test_plan_schema_is_json(capsys: Captured) -> None:
    assert main(["plan", "schema"]) == 0
    assert "Plan" in json.loads(capsys.readouterr().out)["$defs"]


def test_presets(capsys: Captured) -> None:
    assert main(["presets"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:3]] == ["preset", "dqn", "double"]
    assert main(["presets", "per"]) == 0
    shown = capsys.readouterr().out
    assert "Source: Schaul" in shown
    assert "prioritized" in shown
    assert main(["presets", "--json"]) == 0
    assert {"per", "cartpole"} <= {each["name"] for each in json.loads(capsys.readouterr().out)}


def test_runs_are_listed_compared_and_removed(train: Calls, capsys: Captured) -> None:
    assert main(["runs"]) == 0
    assert "There is no run in runs yet" in capsys.readouterr().out
    make_run("a", make_plan("CartPole-v1", overrides={"seed": 1}))
    make_run("b", make_plan("CartPole-v1", overrides={"seed": 2}))
    assert main(["runs", "list", "--json"]) == 0
    assert {run["name"] for run in json.loads(capsys.readouterr().out)} == {"a", "b"}
    assert main(["runs", "diff", "a", "b"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["seed", "1", "2"]
    assert main(["runs", "show", "a"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out
    assert main(["runs", "rm", "a", "--yes"]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["b"]


def test_removing_needs_confirmation(train: Calls, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    path = make_run("a")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - lives as long as the test
    assert main(["runs", "rm", "a"]) == 2
    assert path.is_dir()
    assert "Add --yes" in capsys.readouterr().err


def test_terminal_codes_in_a_run_stay_visible(train: Calls, capsys: Captured) -> None:
    path = make_run("a")
    text = (path / "run.toml").read_text().replace('"CartPole-v1"', '"\\u001B[2Jhidden"')
    (path / "run.toml").write_text(text)
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b[2Jhidden" in shown


def test_verify_finds_damaged_checkpoints(train: Calls, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    import qfleet.save

    make_run("a")
    good, bad = ("step_1", True, "5 files"), ("step_2", False, "model.safetensors has another hash")
    for verdicts, code in (([good], 0), ([good, bad], 5), ([bad], 6)):
        monkeypatch.setattr(qfleet.save, "verify_run", lambda path, found=verdicts: found)
        assert main(["verify", "a"]) == code
        assert all(detail in capsys.readouterr().out for _, _, detail in verdicts[-1:])


def test_doctor_looks_at_the_disk(train: Calls, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    from qfleet.cli import doctor

    assert main(["doctor", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "devices", "cores", "memory", "disk", "writing", "atari"} <= found.keys()
    assert list(Path.cwd().iterdir()) == []
    monkeypatch.setattr(doctor, "LEAST_FREE_BYTES", 2**80)
    assert main(["doctor"]) == 5
    assert "1 problem: disk" in capsys.readouterr().out


def test_doctor_lists_every_extra_with_its_version(train: Calls, capsys: Captured) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {each["name"]: each["detail"] for each in json.loads(capsys.readouterr().out)}
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].keys() - {"all", "dev", "docs"}
    assert extras <= found.keys()
    for extra in ("lz4", "ray", "mpi"):
        package = {"mpi": "mpi4py"}.get(extra, extra)
        missing = importlib.util.find_spec(package) is None
        wanted = f"not installed: {install_command(extra)}" if missing else f"{package} {version(package)}"
        assert found[extra].startswith(wanted)


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False)])
def test_only_mpi_rank_0_prints(
    rank: int, speaks: bool, train: Calls, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    from qfleet.distributed import mpi

    world = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_rank=lambda: rank))
    monkeypatch.setattr(mpi, "mpi", lambda: world)
    assert main(["train", "CartPole-v1", "learners.num=2", "learners.backend=mpi"]) == 0
    assert ("cartpole defaults" in capsys.readouterr().out) == speaks


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_verbs(shell: str, train: Calls, capsys: Captured) -> None:
    assert main(["completion", "show", "--shell", shell]) == 0
    assert "resume" in capsys.readouterr().out
    assert main(["--install-completion", "--shell", shell, "--file", "script"]) == 0
    assert "resume" in Path("script").read_text()


def test_a_temporary_folder_with_too_long_a_name_is_reported(
    train: Calls, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(plan: Plan, **arguments: Any) -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(qfleet.api, "train", fail)
    assert main(["train", "CartPole-v1"]) == 2
    assert "export TMPDIR=/tmp" in capsys.readouterr().err


@pytest.mark.parametrize("error", [DivergedError, EnvError, StorageError, NoCheckpointError])
def test_errors_of_a_run_keep_their_exit_code(
    error: type[DivergedError], train: Calls, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(plan: Plan, **arguments: Any) -> None:
        raise error("it broke\nerror: forged", "Because.\nAnd so.", "Mend it.")

    monkeypatch.setattr(qfleet.api, "train", fail)
    assert main(["train", "CartPole-v1"]) == error.exit_code
    expected = "error: it broke\\nerror: forged\n  why: Because.\n       | And so.\n   do: Mend it.\n"
    assert capsys.readouterr().err == expected
    assert main(["train", "CartPole-v1", "--debug"]) == error.exit_code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("odd"), 1, "RuntimeError: odd"),
        (OSError(28, "No space left on device", "x"), 5, "No space left"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_other_errors(
    error: BaseException, code: int, message: str, train: Calls, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(plan: Plan, **arguments: Any) -> None:
        raise error

    monkeypatch.setattr(qfleet.api, "train", fail)
    monkeypatch.setattr(output.tempfile, "tempdir", str(Path.cwd()))
    assert main(["train", "CartPole-v1"]) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    logs = list(Path.cwd().glob("qfleet-bug-*.log"))
    assert len(logs) == (code == 1)
    assert all("RuntimeError: odd" in log.read_text() and str(log) in shown for log in logs)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m qfleet plan schema | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0 when everything fitted into the pipe
