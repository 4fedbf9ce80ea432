"""Asked to stop by a signal: save, leave with the right code, and go on later as if nothing had been."""

import os
import pty
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qfleet import Plan, heartbeat
from qfleet.act import evaluate_policy as played
from qfleet.save import verify_run
from qfleet.training import evaluator
from qfleet.training.process.hang_warnings import HangWarnings
from qfleet.training.process.signals import StopRequest, listening
from tests.support.command_server import CommandProcess, CommandServer
from tests.support.run_fixtures import Reference
from tests.support.runs import (
    JUDGED,
    Settings,
    checkpoints,
    resumed,
    same,
    small,
    status,
    train_arguments,
    trained,
    until,
)

ENDINGS = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("preempted", 143), signal.SIGHUP: ("stopped", 75)}
TELLING = "toys/Random-v0"  # its returns tell any two policies apart
# Long enough to be caught in the middle.
LONG: Settings = {"until.steps": 1_000_000, "save.every_steps": 200, "log.every_steps": 200}


def at_row(number: int, do: Callable[[], object]) -> Callable[[dict[str, Any]], None]:
    """A callback that does something once, at one row."""
    seen: list[object] = []

    def callback(row: dict[str, Any]) -> None:
        seen.append(row)
        if len(seen) == number:
            do()

    return callback


def begun(child: CommandProcess, out: Path, num: int = 1) -> Path:
    """The run folder, once so many rows are in it."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit and child.code is None:
        for file in out.glob("*/metrics.jsonl"):
            if file.read_bytes().count(b"\n") >= num:
                return file.parent
        time.sleep(0.002)
    raise AssertionError(child.output())


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_saves_and_leaves_and_the_run_goes_on_exactly(
    number: signal.Signals, tmp_path: Path, reference: Reference, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained(small(JUDGED), tmp_path, callbacks=[at_row(4, lambda: signal.raise_signal(number))])
    state, code = ENDINGS[number]
    assert "saving... (once more to leave at once)" in capfd.readouterr().err
    assert (run.status["state"], run.exit_code, run.status["reason"]) == (state, code, f"stopped by {number.name}")
    assert run.result() is None
    assert run.metrics[-1]["kind"] == "end"
    assert run.metrics[-1]["exit_code"] == code
    assert 0 < run.status["env_steps"] < 300
    assert checkpoints(run.path)[-1].name == f"step_{run.status['env_steps']:012d}"
    assert same(resumed(run).path, reference(JUDGED).path)


def interrupting(monkeypatch: pytest.MonkeyPatch, call: int, late: bool) -> None:
    """Ctrl-C in one evaluation: before its first step, or just after its last."""
    count = [0]

    def play(*arguments: Any, **options: Any) -> list[float]:
        count[0] += 1
        if count[0] == call and not late:
            signal.raise_signal(signal.SIGINT)
        returns = played(*arguments, **options)
        if count[0] == call and late:
            signal.raise_signal(signal.SIGINT)
        return returns

    monkeypatch.setattr(evaluator, "evaluate_policy", play)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("call", [1, 2])
def test_ctrl_c_during_an_evaluation_is_exact_too(
    call: int, late: bool, tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reference(JUDGED, TELLING)
    interrupting(monkeypatch, call, late)
    run = trained(small(JUDGED, TELLING), tmp_path)
    assert run.exit_code == 130
    assert sum(row["kind"] == "eval" for row in run.metrics) == call - 1
    assert same(resumed(run).path, whole.path)


@pytest.mark.parametrize("plan", [small(JUDGED, TELLING), small({**JUDGED, "eval.every_steps": 270}, TELLING)])
def test_ctrl_c_while_the_final_score_is_measured(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(plan, tmp_path / "whole")
    calls = sum(row["kind"] == "eval" for row in whole.metrics)
    for call in (calls - 1, calls):
        with monkeypatch.context() as patch:
            interrupting(patch, call, late=False)
            run = trained(plan, tmp_path / str(call))
        assert run.exit_code == 130
        assert run.result() is None
        ended = resumed(run)
        assert same(ended.path, whole.path)
        assert ended.result() == whole.result()


def test_signal_handlers_are_restored_afterwards(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        trained(until(small(), 40), tmp_path)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_is_ignored_does_not_end_the_run() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    try:
        with listening() as stop_request:
            signal.raise_signal(signal.SIGHUP)
            assert not stop_request
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("requests", "second", "leaves"),
    [
        (None, signal.SIGTERM, True),  # without a supervisor every signal is a request
        (1, signal.SIGTERM, False),  # of a signal to all processes, once directly and once from the supervisor
        (2, signal.SIGTERM, True),
        (0, signal.SIGTERM, True),  # sent to this process alone, twice
        (0, signal.SIGHUP, False),
    ],
)
def test_only_a_second_request_leaves_at_once(
    requests: int | None, second: signal.Signals, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(heartbeat, "num_stop_requests", lambda: requests)
    monkeypatch.setattr(heartbeat, "exit_at_once", left.append)
    stop_request = StopRequest()
    stop_request.receive(signal.SIGTERM, None)
    stop_request.receive(second, None)
    assert bool(left) == leaves


@pytest.mark.parametrize(("kind", "limit"), [(heartbeat.STEP, 30.0), (heartbeat.MAKE, 60.0)])
def test_a_run_from_python_is_not_left_before_a_call_has_had_its_time(
    kind: int, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    stop_request = StopRequest()
    stop_request.name = "SIGTERM"
    hangs = HangWarnings(stop_request, 30.0, tmp_path, lambda text: None, threading.get_ident())
    monkeypatch.setattr(hangs, "leave", left.append)
    with heartbeat.env_call(kind):
        for now in range(1, int(limit) + 2):
            hangs.poll(float(now))
        assert not left
        hangs.poll(limit + 2)
    assert len(left) == 1


@pytest.mark.chaos
def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path, command_server: CommandServer) -> None:
    # The first one is heard in the middle of a step that takes longer than anybody waits.
    code = (
        "import time, gymnasium as gym\nfrom qfleet.testing.toys import Random\nclass Slow(Random):\n    done = 0\n"
        "    def step(self, action):\n        Slow.done += 1\n        time.sleep(30 if Slow.done > 500 else 0)\n"
        "        return super().step(action)\n"
    )
    (tmp_path / "slow.py").write_text(code)
    child = command_server.start(*train_arguments(tmp_path / "out", LONG, f"{tmp_path}/slow.py:Slow"))
    run = begun(child, tmp_path / "out", 2)
    time.sleep(0.5)
    child.send(signal.SIGINT)
    time.sleep(0.2)
    assert child.code is None
    sent = time.monotonic()
    child.send(signal.SIGINT)
    assert child.wait(5) == 130
    assert time.monotonic() - sent <= 1.0
    assert "Traceback" not in child.output()
    assert child.output().count("saving...") == 1
    assert all(verdict.ok for verdict in verify_run(run))


@pytest.mark.slow  # the environment is given five seconds
@pytest.mark.chaos
def test_sigterm_is_obeyed_although_an_environment_hangs(tmp_path: Path, command_server: CommandServer) -> None:
    code = (
        "import time\nfrom qfleet.testing.toys import Random\nclass Stuck(Random):\n    done = 0\n"
        "    def step(self, action):\n        Stuck.done += 1\n        time.sleep(60 if Stuck.done > 500 else 0)\n"
        "        return super().step(action)\n"
    )
    (tmp_path / "stuck.py").write_text(code)
    settings = {**LONG, "env.step_timeout_seconds": 0.5}
    child = command_server.start(*train_arguments(tmp_path / "out", settings, f"{tmp_path}/stuck.py:Stuck"))
    run = begun(child, tmp_path / "out", 2)
    limit = time.monotonic() + 10
    while "has not returned" not in child.output() and time.monotonic() < limit:
        time.sleep(0.05)
    assert "stuck.py:7 in step" in child.output()
    child.send(signal.SIGTERM)
    assert child.wait(10) == 143
    assert "stopped by SIGTERM; environment" in child.output()
    assert status(run)["state"] == "preempted"
    assert status(run)["exit_code"] == 143
    assert all(verdict.ok for verdict in verify_run(run))


def test_a_closed_terminal_stops_the_run_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    os.close(leader)  # from here on every write to the terminal fails
    with open(follower, "w", buffering=1, encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "__stderr__", terminal)
        run = trained(small(), tmp_path, callbacks=[at_row(3, lambda: signal.raise_signal(signal.SIGHUP))])
    assert (run.status["state"], run.exit_code) == ("stopped", 75)


def test_a_supervised_run_answers_a_signal_on_its_own_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()  # descriptor 2 is for what environments print, and bounded
    with open(ours, "rb", buffering=0) as said, open(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(heartbeat, "_streams", ((stream, stream), (sys.stdout, sys.stdout)))
        StopRequest().receive(signal.SIGTERM, None)
        os.set_blocking(ours, False)
        assert said.read(99) == b"\nsaving... (once more to leave at once)\n"


@pytest.mark.chaos
def test_sigterm_saves_in_time(tmp_path: Path, command_server: CommandServer) -> None:
    child = command_server.start(*train_arguments(tmp_path, LONG))
    run = begun(child, tmp_path, 3)
    sent = time.monotonic()
    child.send(signal.SIGTERM)
    assert child.wait(25) == 143
    assert time.monotonic() - sent < 25
    found = status(run)
    assert (found["state"], found["exit_code"]) == ("preempted", 143)
    assert found["resume"] == f"qfleet resume {run}"
    assert checkpoints(run)[-1].name == f"step_{found['env_steps']:012d}"
