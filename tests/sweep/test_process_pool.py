"""Processes side by side, with stand-ins that need no torch."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from qfleet.sweep import member_process, process_pool
from qfleet.sweep.member_process import MemberMessage, MemberRow, MemberSetup
from qfleet.sweep.process_pool import ProcessPool, outcome
from qfleet.system.worker_errors import FinalError
from qfleet.training.process.signals import StopRequest
from tests.sweep import stand_ins


class Watch:
    """Runs a pool of stand-ins and records its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stop_request = StopRequest()
        self.started: list[str] = []
        self.rows: list[tuple[str, Any]] = []
        self.codes: dict[str, int] = {}
        self.polls = 0

    def pool(self, at_once: int, **acts: list[str]) -> ProcessPool:
        (self.folder / "acts.json").write_text(json.dumps(acts))
        return ProcessPool(
            [MemberSetup(self.folder, name, self.folder / f"{name}.log", seed=0) for name in acts],
            at_once,
            3,
            2,
            self.stop_request,
            on_start=self.started.append,
            on_message=self.receive,
            on_end=self.codes.__setitem__,
            on_poll=self.poll,
        )

    def receive(self, name: str, message: MemberMessage) -> None:
        assert isinstance(message, MemberRow)
        self.rows.append((name, message.row))

    def poll(self) -> None:
        self.polls += 1

    def notes(self) -> list[tuple[float, str, str, int]]:
        lines = [line.split() for line in (self.folder / "notes").read_text().splitlines()]
        return [(float(at), what, name, int(pid)) for at, what, name, pid in lines]

    def gone(self) -> bool:
        return not any(Path(f"/proc/{pid}").exists() for _, _, _, pid in self.notes())


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(member_process, "run_member", stand_ins.act)
    monkeypatch.setattr(process_pool, "POLL_SECONDS", 0.02)
    return Watch(tmp_path)


def test_never_more_at_once_than_there_is_room_for(watch: Watch) -> None:
    watch.pool(2, **{name: ["sleep=0.2"] for name in "abcde"}).run()
    assert watch.codes == dict.fromkeys("abcde", 0)
    level, most = 0, 0
    for _, what, _, _ in sorted(watch.notes()):
        level += 1 if what == "begin" else -1
        most = max(most, level)
    assert most == 2
    assert watch.polls > 0


def test_rows_are_read_and_other_output_goes_to_the_log(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    watch.pool(1, a=["row=1", "say=hello {", 'say=["kind"]', "row=2", "threads=1"]).run()
    assert watch.rows == [
        ("a", {"kind": "progress", "env_steps": 1}),
        ("a", {"kind": "progress", "env_steps": 2}),
        ("a", {"kind": "threads", "threads": "3", "cores": 2, "light": True}),
    ]
    assert (watch.folder / "a.log").read_text() == 'hello {\n["kind"]\n'


def test_the_last_rows_of_a_short_life_are_not_lost(watch: Watch) -> None:
    watch.pool(1, a=[f"row={number}" for number in range(2_000)]).run()
    assert [row["env_steps"] for _, row in watch.rows] == list(range(2_000))


def test_a_row_may_be_longer_than_the_buffers_between_processes(watch: Watch) -> None:
    watch.pool(1, a=["row=1", "long=500000", "row=2"]).run()
    assert [len(row.get("returns", ())) for _, row in watch.rows] == [0, 500_000, 0]


def test_one_that_fails_does_not_stop_the_others(watch: Watch) -> None:
    watch.pool(1, a=["exit=4"], b=["die=1"], c=["row=1"]).run()
    assert watch.codes == {"a": 4, "b": -signal.SIGKILL, "c": 0}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_is_passed_on_once_and_nothing_more_begins(watch: Watch, name: str) -> None:
    pool = watch.pool(2, a=["sleep=30"], b=["row=1", "sleep=30"], c=[])

    def on_poll() -> None:
        if len((watch.folder / "notes").read_text().splitlines() if (watch.folder / "notes").exists() else []) >= 2:
            watch.stop_request.name = name

    pool.on_poll = on_poll
    began = time.monotonic()
    pool.run()
    assert time.monotonic() - began < 20
    number = getattr(signal, name)
    assert watch.codes == {"a": 128 + number, "b": 128 + number}
    assert [what for _, what, _, _ in watch.notes()].count(name) == 2
    assert watch.started == ["a", "b"]


def test_ctrl_c_in_a_terminal_reaches_the_parent_only(watch: Watch) -> None:
    # A terminal sends it to the whole process group; heard twice it would mean: leave at once, without saving.
    watch.pool(1, a=["leads=1"]).run()
    assert watch.rows == [("a", {"kind": "leads", "leads": True})]


def test_a_process_that_does_not_stop_is_killed(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "STOP_TIMEOUT_SECONDS", 0.5)
    pool = watch.pool(1, a=["sleep=60", "stubborn"])
    pool.on_poll = lambda: setattr(watch.stop_request, "name", "SIGINT" if (watch.folder / "notes").exists() else None)
    pool.run()
    assert watch.codes == {"a": -signal.SIGKILL}
    assert [what for _, what, _, _ in watch.notes()] == ["begin", "SIGINT"]


def test_descendants_are_killed_with_a_process(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "STOP_TIMEOUT_SECONDS", 0.3)
    mark = f"9{os.getpid()}{time.monotonic_ns()}"
    pool = watch.pool(1, a=[f"start={mark}", "row=1", "sleep=60", "stubborn"])
    pool.on_poll = lambda: setattr(watch.stop_request, "name", "SIGINT" if watch.rows else None)
    pool.run()
    limit = time.monotonic() + 2
    while started(mark) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not started(mark)


def started(mark: str) -> list[int]:
    """Processes with this in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark in path.read_text(errors="replace"):
                found.append(int(path.parent.name))
    return found


def test_an_error_in_the_parent_leaves_no_process(watch: Watch) -> None:
    pool = watch.pool(2, a=["row=1", "sleep=60"], b=["row=1", "sleep=60"])

    def on_poll() -> None:
        if len(watch.rows) == 2:
            raise RuntimeError("the disk is full")

    pool.on_poll = on_poll
    with pytest.raises(RuntimeError):
        pool.run()
    assert watch.gone()
    assert [what for _, what, _, _ in watch.notes()].count("SIGTERM") == 2


def test_a_child_finds_modules_where_its_parent_does(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "from qfleet.sweep.member_process import MemberRow, send\n"
        "def main(given):\n    send(given[1], MemberRow({'kind': 'found'}))\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(member_process, "run_member", import_module("only_here").main)
    watch.pool(1, a=[]).run()
    assert watch.rows == [("a", {"kind": "found"})]


NOT_DONE = "its process left with exit code 0, but its run is not done"


@pytest.mark.parametrize(
    ("code", "status", "error", "expected"),
    [
        (0, {"state": "done", "exit_code": 0, "reason": "solved"}, None, ("done", 0, "solved")),
        (0, {"state": "running", "exit_code": None}, None, ("failed", 4, NOT_DONE)),
        (0, {"state": "failed", "exit_code": 0}, None, ("failed", 4, NOT_DONE)),
        (0, {}, None, ("failed", 4, NOT_DONE)),
        (3, {"state": "diverged", "exit_code": 3, "reason": "NaN"}, None, ("diverged", 3, "NaN")),
        (4, {}, FinalError("no such world"), ("failed", 4, "no such world")),
        (4, {"state": "running", "exit_code": None}, None, ("failed", 4, "it left with exit code 4")),
        (-9, {"state": "running", "exit_code": None}, None, ("killed", 75, "killed by SIGKILL")),
        (137, {"state": "running", "exit_code": None}, None, ("killed", 75, "killed by SIGKILL")),
        (-2, {}, None, ("interrupted", 130, "killed by SIGINT")),
        (143, {"state": "running", "exit_code": None}, None, ("preempted", 143, "left at once, by SIGTERM")),
    ],
)
def test_how_a_process_ended(
    code: int, status: dict[str, Any], error: FinalError | None, expected: tuple[str, int, str]
) -> None:
    assert outcome(code, status, error) == expected


def test_the_shell_of_the_tests_is_the_parent() -> None:
    # /proc is what `gone` looks at: on a system without it the test above would say nothing.
    assert Path(f"/proc/{os.getpid()}").exists()
