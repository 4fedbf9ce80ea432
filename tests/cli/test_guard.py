"""Supervision of the training process, with restarts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from qfleet.cli import guard
from qfleet.cli.guard import run_with_restarts
from qfleet.heartbeat import Heartbeat
from qfleet.watch import read_rows

ROOT = Path(__file__).parents[2]
RUN = ("train", "CartPole-v1")


class Children:
    """Fake children that end with the given codes, one after the other; each leaves a run behind."""

    def __init__(self, out: Path, codes: Sequence[int], asked: bool = False) -> None:
        self.out, self.codes, self.commands = out, list(codes), list[list[str]]()
        self.asked = asked

    def __call__(self, command: Sequence[str]) -> tuple[int, int, bool]:
        self.commands.append(list(command))
        pid = 1000 + len(self.commands)
        (self.out / "a-run").mkdir(exist_ok=True)
        (self.out / "a-run" / "status.json").write_text(json.dumps({"pid": pid}))
        return self.codes.pop(0), pid, self.asked


def watch_over(out: Path, codes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[list[str]]]:
    children = Children(out, codes)
    monkeypatch.setattr(guard, "run_child", children)
    code = run_with_restarts(RUN, str(out), lambda folder: ["resume", folder.name], clock=lambda: 0.0)
    return code, children.commands


@pytest.mark.parametrize("code", [0, 3, 130, 143])
def test_a_child_that_exits_is_not_restarted(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch_over(tmp_path, [code], monkeypatch) == (code, [list(RUN)])


def test_a_killed_child_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch_over(tmp_path, [-9, -11, 0], monkeypatch) == (0, [list(RUN), ["resume", "a-run"], ["resume", "a-run"]])
    output = capsys.readouterr().out
    assert "ended by SIGKILL: going on with" in output
    assert "ended by SIGSEGV" in output


def test_restarts_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, commands = watch_over(tmp_path, [-9] * 9, monkeypatch)
    assert code == 137
    assert len(commands) == 1 + guard.RESTARTS


def test_a_child_that_was_asked_to_stop_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(tmp_path, [-9], asked=True)
    monkeypatch.setattr(guard, "run_child", children)
    assert run_with_restarts(RUN, str(tmp_path), lambda folder: []) == 137
    assert len(children.commands) == 1


def test_a_child_without_a_run_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "run_child", lambda command: (-9, 4711, False))
    assert run_with_restarts(RUN, str(tmp_path), lambda folder: []) == 137


@pytest.mark.slow
@pytest.mark.chaos
def test_a_killed_learner_loses_only_steps_after_the_last_checkpoint(tmp_path: Path) -> None:
    settings = [
        "runtime.type=processes",
        "runtime.inference=local",
        "actors.num=2",
        "eval.episodes=0",
        "until.score=none",
        "save.every_steps=500",
    ]
    arguments = [*RUN, "--steps", "6000", *settings, "save.max_share=1", "log.every_steps=200", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "qfleet", *arguments], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    )
    limit = time.monotonic() + 90
    while time.monotonic() < limit and len(list(tmp_path.glob("*/checkpoints/step_*"))) < 2:
        time.sleep(0.1)
    (status,) = tmp_path.glob("*/status.json")
    os.kill(json.loads(status.read_text())["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "going on with" in output
    rows = read_rows(status.parent / "metrics.jsonl")
    assert [row["env_steps"] for row in rows] == sorted(row["env_steps"] for row in rows)
    end = json.loads(status.read_text())
    assert end["state"] == "done"
    assert end["updates"] == (end["env_steps"] - 1_000) // 4


GUARD = """
import sys
from qfleet.cli import guard
guard.CHILD_CODE = "import os, time; os.write(1, b'%d\\\\n' % os.getpid()); time.sleep(0.5); os._exit(7)"
code, pid, asked = guard.run_child([])
print(code, asked)
"""


def test_ctrl_z_stops_the_supervised_process_too() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", GUARD], cwd=ROOT, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGTSTP)
        time.sleep(0.3)
        states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in (process.pid, child)]
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "7 False\n"
    assert states == ["T", "T"]


def test_ignored_signals_are_not_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    try:
        with guard.forward_stop_signals(subprocess.Popen(["sleep", "9"]), Heartbeat()) as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        assert asked == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
