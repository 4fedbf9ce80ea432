import io
import json
from typing import Any

import pytest

from qfleet.watch.console import Mode, SafeStream
from qfleet.watch.sweep_console import GroupWatcher, LiveGroup, PlainGroup, make_group_watcher

INFO = {
    "group": "runs/g",
    "env": "CartPole-v1",
    "members": ["seed-0", "seed-1", "seed-2"],
    "jobs": 2,
    "threads": 1,
    "notes": ["memory for 2 at once, not for 3"],
}
DONE: dict[str, Any] = {
    "name": "seed-0",
    "state": "done",
    "exit_code": 0,
    "reason": "solved",
    "env_steps": 12_000,
    "until_steps": 50_000,
    "seconds": 9.0,
    "score": {"mean": 498.1, "low": 491.0, "high": 500.0},
}
FAILED = {"name": "seed-1", "state": "failed", "exit_code": 4, "reason": "the world is flat"}
RUNNING = {
    "name": "seed-2",
    "state": "running",
    "exit_code": None,
    "reason": "",
    "env_steps": 3000,
    "return_mean": 21.5,
}
END = {"kind": "end", "group": "runs/g", "state": "failed", "exit_code": 4, "reason": "1 of 3 members are done"}


def watched(watcher: GroupWatcher) -> None:
    watcher.start(INFO)
    watcher.row("seed-0", {"kind": "progress", "env_steps": 1000})
    watcher.live([DONE, FAILED, RUNNING])
    watcher.finished(DONE)
    watcher.finished(FAILED)
    watcher.stop(END)


def shown(mode: Mode) -> list[str]:
    out = io.StringIO()
    watched(make_group_watcher(mode, out))
    return out.getvalue().splitlines()


def test_plain_lines() -> None:
    assert shown("plain") == [
        "CartPole-v1 · 3 seeds, 2 at once, 1 thread each · runs/g",
        "note: memory for 2 at once, not for 3",
        "seed-0 done: score 498.1 [491.0, 500.0] · 12,000 steps · 9 s",
        "seed-1 failed: the world is flat · 0 steps",
    ]


def test_a_line_of_running_members_every_30_seconds() -> None:
    now = [0.0]
    out = io.StringIO()
    watcher = PlainGroup(SafeStream(out), lambda: now[0])
    for now[0] in (10.0, 29.9, 30.0, 45.0):
        watcher.live([DONE, FAILED, RUNNING])
    assert out.getvalue() == "2 of 3 ended · seed-2 3,000 steps, return 21.5\n"


def test_json_names_the_member_and_ends_with_the_group() -> None:
    rows = [json.loads(line) for line in shown("json")]
    assert rows == [{"member": "seed-0", "kind": "progress", "env_steps": 1000}, END]


def test_quiet_prints_only_how_it_ended() -> None:
    assert shown("quiet") == ["failed: 1 of 3 members are done (runs/g)"]


def test_a_live_table_keeps_the_lines_of_ended_members(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    now = [0.0]
    watcher = LiveGroup(SafeStream(out), lambda: now[0])
    watched(watcher)
    text = out.getvalue()
    assert "seed-0 done: score 498.1 [491.0, 500.0]" in text
    assert "seed-1 failed: the world is flat" in text
    assert "3,000 / –" in text
    assert text.count("evaluation") >= 1
    before = len(text)
    watcher.live([DONE])  # less than half a second later
    assert len(out.getvalue()) == before


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_member_warns(mode: Any) -> None:
    out = io.StringIO()
    watcher = make_group_watcher(mode, out)
    watcher.warn("seed-1", "step_1 is damaged")
    assert out.getvalue() == "seed-1 warning: step_1 is damaged\n"


@pytest.mark.parametrize("mode", ["json", "quiet"])
def test_a_member_warns_beside_rows(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    make_group_watcher(mode, out).warn("seed-1", "step_1 is damaged")
    assert (out.getvalue(), capsys.readouterr().err) == ("", "warning: seed-1: step_1 is damaged\n")
