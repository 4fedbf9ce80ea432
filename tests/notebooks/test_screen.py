"""What `train` shows if nobody chose a watcher, and what a cell of a notebook shows."""

import io
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qfleet import train, train_group
from qfleet.training.process.signals import LeftAtOnce, StopRequest
from qfleet.watch.console import PlainWatcher, default_watcher, in_notebook
from qfleet.watch.live_screen import LiveWatcher
from qfleet.watch.notebook.screen import CellScreen, NotebookGroup, NotebookWatcher
from qfleet.watch.sweep_console import LiveGroup, PlainGroup, default_group_watcher
from tests.support.runs import SMALL, small, status, until


class Cell:
    """Keeps the bundles that a cell was asked to show."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def show(self, bundle: dict[str, str]) -> "Cell":
        self.shown.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(bundle)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def be_notebook(monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]


# What is chosen


def test_a_kernel_is_a_notebook_whatever_its_shell_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook()
    be_notebook(monkeypatch, None)  # IPython is imported, but this is no session of it
    assert not in_notebook()
    be_notebook(monkeypatch, SimpleNamespace())  # IPython in a terminal
    assert not in_notebook()
    be_notebook(monkeypatch, SimpleNamespace(kernel=object()))
    assert in_notebook()
    assert isinstance(default_watcher(), NotebookWatcher)
    assert isinstance(default_group_watcher(), NotebookGroup)


def test_a_terminal_gets_a_screen_and_a_script_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(default_watcher(), PlainWatcher)
    assert isinstance(default_group_watcher(), PlainGroup)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(default_watcher(), LiveWatcher)
    assert isinstance(default_group_watcher(), LiveGroup)
    assert default_watcher(progress=False) is None
    assert default_group_watcher(progress=False) is None


def test_a_process_without_standard_streams_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert default_watcher() is None
    assert default_group_watcher() is None


def test_a_script_shows_few_lines_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train("CartPole-v1", overrides=SMALL, out=tmp_path)
    shown = capsys.readouterr()
    assert shown.out == ""  # which may be the data of a script
    assert shown.err.startswith(f"CartPole-v1 · double-n5 · cpu, 1 thread · {run.path}")
    assert "done: reached until.steps=300" in shown.err
    assert len(shown.err.splitlines()) < 6
    train("CartPole-v1", overrides=SMALL, out=tmp_path, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_group_in_a_script_is_silent_if_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train_group(until(small(), 20), 1, out=tmp_path, progress=False).exit_code == 0
    assert capfd.readouterr() == ("", "")


# What a cell shows


def test_a_run_in_a_cell(tmp_path: Path) -> None:
    cell = Cell()
    watcher = NotebookWatcher(cell=CellScreen(cell.show))
    run = train("CartPole-v1", overrides=SMALL, out=tmp_path, watcher=watcher)
    first = cell.shown[0]["text/html"]
    last = cell.shown[-1]
    assert "interrupting the cell saves and returns the run" in first
    assert "interrupting" not in last["text/html"]
    assert "100%" in last["text/html"]
    assert str(run.path) in last["text/html"]
    assert last["text/plain"].startswith("done: reached until.steps=300")


def test_a_cell_is_redrawn_once_a_second() -> None:
    now = [0.0]
    cell = Cell()
    watcher = NotebookWatcher(clock=lambda: now[0], cell=CellScreen(cell.show))
    watcher.start({"run": "r", "env": "E", "notes": ["a note"]})
    for step in range(100):
        now[0] += 0.1
        watcher.live({"env_steps": step, "until_steps": 100})
    assert 10 <= len(cell.shown) <= 12
    watcher.live({"env_steps": 100, "leaving": "saving... now"})
    assert "saving... now" in cell.shown[-1]["text/html"]
    assert "a note" in cell.shown[-1]["text/html"]


def test_what_a_cell_shows_is_escaped() -> None:
    cell = Cell()
    watcher = NotebookWatcher(cell=CellScreen(cell.show))
    evil = "<script>alert(1)</script>\x1b[2J"
    watcher.note(evil)
    watcher.start({"run": evil, "env": evil, "algorithm": evil, "notes": [evil]})
    watcher.live({"warnings": [evil]})
    watcher.row({"kind": "change", "text": evil, "env_steps": 1})
    watcher.stop({"state": evil, "reason": evil})
    shown = "".join(bundle["text/html"] for bundle in cell.shown)
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown
    assert "\x1b" not in "".join(text for bundle in cell.shown for text in bundle.values())


def test_a_front_end_that_fails_does_not_stop_a_run() -> None:
    def fail(bundle: dict[str, str]) -> Any:
        raise RuntimeError("no connection")

    watcher = NotebookWatcher(cell=CellScreen(fail))
    watcher.start({})
    watcher.stop({"state": "done"})


def test_a_group_in_a_cell(tmp_path: Path) -> None:
    cell = Cell()
    watcher = NotebookGroup(cell=CellScreen(cell.show))
    train_group(until(small(), 20), 1, out=tmp_path, name="g", watcher=watcher)
    assert "1 seed, 1 at once" in cell.shown[0]["text/html"]
    assert any("seed-0" in bundle["text/html"] and "running" in bundle["text/html"] for bundle in cell.shown)
    assert "seed-0 done" in cell.shown[-1]["text/plain"]
    assert "done: all 1 members are done" in cell.shown[-1]["text/plain"]


# Interrupts


def test_a_second_interrupt_raises_in_an_interactive_session_only(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr("qfleet.heartbeat.exit_at_once", left.append)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    request = StopRequest()
    request.receive(signal.SIGINT, None)
    assert request.name == "SIGINT"
    with pytest.raises(LeftAtOnce):
        request.receive(signal.SIGINT, None)
    assert left == []
    request.receive(signal.SIGTERM, None)  # the process itself is to end
    assert left == [143]
    monkeypatch.delattr(sys, "ps1")
    request.receive(signal.SIGINT, None)
    assert left == [143, 130]


def test_a_run_that_is_left_at_once_says_so_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qfleet import resume

    def twice(row: dict[str, Any]) -> None:
        if row["env_steps"] > 100:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(small(), out=tmp_path, name="left", callbacks=[twice])
    assert signal.getsignal(signal.SIGINT) is before
    found = status(tmp_path / "left")
    assert (found["state"], found["exit_code"], found["reason"]) == ("interrupted", 130, "left at once, by SIGINT")
    assert resume(tmp_path / "left").status["state"] == "done"


def test_a_run_outside_the_main_thread_says_that_it_hears_no_signals(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    thread = threading.Thread(target=lambda: train(until(small(), 20), out=tmp_path))
    thread.start()
    thread.join(60)
    assert "note: this is not the main thread" in capfd.readouterr().err
    train(until(small(), 20), out=tmp_path)
    assert "main thread" not in capfd.readouterr().err
