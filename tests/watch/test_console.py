import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qfleet.errors import UsageError
from qfleet.training.process.signals import listening
from qfleet.watch import Watcher, auto_mode, make_watcher
from qfleet.watch.console import SafeStream
from qfleet.watch.live_screen import LiveWatcher, Screen, Trend
from qfleet.watch.text import LEAVING, duration, end_lines, number, seconds_left, sparkline

INFO = {
    "run": "runs/cartpole-dqn-0007",
    "env": "CartPole-v1",
    "algorithm": "cartpole",
    "device": "cpu",
    "threads": 2,
    "notes": ["tuned defaults for CartPole"],
}
EVAL: dict[str, Any] = {
    "kind": "eval",
    "env_steps": 30_000,
    "updates": 3_750,
    "episodes": 20,
    "mean": 498.1,
    "median": 500.0,
    "iqm": 500.0,
    "low": 491.0,
    "high": 500.0,
    "returns": [500.0],
}
SNAPSHOT: dict[str, Any] = {
    "env_steps": 31_000,
    "until_steps": 50_000,
    "updates": 3_875,
    "seconds": 14.2,
    "steps_per_second": 2_183.4,
    "updates_per_second": 272.9,
    "epsilon": 0.05,
    "loss": 0.0213,
    "return_mean": 487.2,
    "replay_size": 31_000,
    "replay_capacity": 100_000,
    "checkpoint_age_seconds": 4.2,
    "eval": None,
    "warnings": ["the loss rose tenfold"],
    "best": 498.1,
}
STATUS: dict[str, Any] = {
    "state": "stopped",
    "exit_code": 130,
    "reason": "Ctrl-C",
    "env_steps": 31_000,
    "updates": 3_875,
    "resume": "qfleet resume cartpole-dqn-0007",
    "score": None,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def run_through(watcher: Watcher) -> None:
    watcher.start(INFO)
    watcher.row({"kind": "progress", "return_mean": 1.0, "loss": 0.5})
    watcher.live(SNAPSHOT)
    watcher.row(EVAL)
    watcher.live(SNAPSHOT)
    watcher.stop(STATUS)


def draw(width: int, height: int, **options: Any) -> list[str]:
    screen = Screen()
    screen.info = INFO
    for index in range(60):
        screen.add_row({"kind": "progress", "return_mean": float(index), "loss": 1 / (index + 1)})
    screen.add_row(EVAL)
    screen.snapshot = SNAPSHOT
    options.setdefault("file", io.StringIO())
    console = Console(record=True, width=width, height=height, color_system=None, **options)
    console.print(screen)
    return console.export_text().rstrip("\n").split("\n")


def test_the_screens_evaluation_is_the_last_validation() -> None:
    screen = Screen()
    screen.add_row(EVAL)
    screen.add_row({**EVAL, "split": "test", "mean": -1.0, "checkpoint": 1})
    assert screen.evaluation == EVAL
    assert screen.scores.values == [EVAL["mean"]]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_the_screen_shows_everything_and_fits(width: int, height: int) -> None:
    lines = draw(width, height)
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for part in (
        "CartPole-v1 · cartpole · runs/cartpole-dqn-0007",
        "62%  31,000 / 50,000 steps",
        "487.2",
        "▁",
        "█",
        "0.0213",
        "498.1",
        "95 % [491.0, 500.0] · 20 episodes at 30,000 steps",
        "2,183 steps/s",
        "273 updates/s",
        "14 s",
        "about 9 s",
        "epsilon     0.05",
        "31% of 100,000",
        "4 s ago",
        "cpu, 2 threads",
        "! the loss rose tenfold",
        "Ctrl-C saves and leaves",
    ):
        assert part in text, part


def test_the_screen_fits_a_small_terminal() -> None:
    lines = draw(60, 14)
    assert len(lines) <= 13
    assert all(len(line) <= 60 for line in lines)


def test_the_screen_on_an_ascii_terminal() -> None:
    lines = draw(80, 24, file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert "\n".join(lines).isascii()
    assert "CartPole-v1 | cartpole" in lines[0]


def test_the_screen_before_the_first_number() -> None:
    console = Console(record=True, width=80, height=24, file=io.StringIO())
    console.print(Screen())
    text = console.export_text()
    assert "none yet" in text
    assert "nan" not in text


def test_strange_text_cannot_steer_the_terminal() -> None:
    out = io.StringIO()
    watcher = LiveWatcher(SafeStream(out), console=Console(file=out, force_terminal=True, width=80, height=24))
    watcher.start({**INFO, "env": "[red]x[/red]\x1b]0;title\x07", "notes": ["\x1b[2Jgone"]})
    watcher.live({**SNAPSHOT, "warnings": ["\x1b[31mred\x9b"]})
    watcher.stop({**STATUS, "reason": "\x1b[5m"})
    text = out.getvalue()
    for bad in ("\x1b]0;", "\x1b[2J", "\x1b[31mred", "\x9b", "\x1b[5m", "\x07"):
        assert bad not in text
    assert "[red]x[/red]" in text


def test_live_redraws_twice_a_second_at_most() -> None:
    clock, out = Clock(), io.StringIO()
    watcher = LiveWatcher(SafeStream(out), clock, Console(file=out, force_terminal=True, width=80, height=24))
    watcher.start(INFO)
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")  # a killed run leaves the cursor
    sizes = []
    for _ in range(100):
        watcher.live(SNAPSHOT)
        sizes.append(len(out.getvalue()))
        clock.now += 0.01
    assert len(set(sizes)) == 2
    watcher.stop(STATUS)
    text = out.getvalue()
    assert "stopped: Ctrl-C (31,000 steps, 3,875 updates)" in text
    assert "to go on: qfleet resume cartpole-dqn-0007" in text
    assert (
        "Ctrl-C saves" not in text[text.rfind("qfleet \x1b") :]
    )  # the last screen stands when nothing is left to stop


def test_live_gives_standard_output_back() -> None:
    out, before = io.StringIO(), (sys.stdout, sys.stderr)
    watcher = LiveWatcher(SafeStream(out), console=Console(file=out, force_terminal=True))
    run_through(watcher)
    assert (sys.stdout, sys.stderr) == before


def test_plain_lines_every_thirty_seconds_and_on_every_evaluation() -> None:
    clock, out = Clock(), io.StringIO()
    watcher = make_watcher("plain", out, clock=clock)
    watcher.start(INFO)
    for second in range(61):
        clock.now = 100.0 + second
        watcher.live(SNAPSHOT)
    watcher.row(EVAL)
    watcher.row({"kind": "progress", "env_steps": 5})
    watcher.stop({**STATUS, "state": "done", "exit_code": 0, "reason": "reached until.steps", "score": EVAL})
    line = (
        "31,000 / 50,000 steps · return 487.2 · loss 0.0213 · epsilon 0.05 · 2,183 steps/s · 272.9 updates/s · 9 s left"
    )
    assert out.getvalue().splitlines() == [
        "CartPole-v1 · cartpole · cpu, 2 threads · runs/cartpole-dqn-0007",
        "note: tuned defaults for CartPole",
        "warning: the loss rose tenfold",
        line,
        line,
        "evaluation at 30,000 steps: 498.1 [491.0, 500.0] · 20 episodes · iqm 500.0",
        "done: reached until.steps (31,000 steps, 3,875 updates)",
        "score 498.1 [491.0, 500.0] · mean and 95 % interval of 20 test episodes",
    ]


def test_json_lines_are_the_rows_and_nothing_else() -> None:
    out = io.StringIO()
    run_through(make_watcher("json", out))
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert rows == [{"kind": "progress", "return_mean": 1.0, "loss": 0.5}, EVAL]


def test_quiet_prints_only_how_it_ended() -> None:
    out = io.StringIO()
    run_through(make_watcher("quiet", out))
    assert out.getvalue() == (
        "stopped: Ctrl-C (31,000 steps, 3,875 updates) · to go on: qfleet resume cartpole-dqn-0007\n"
    )


@pytest.mark.parametrize("mode", ["live", "plain", "json", "quiet"])
def test_a_broken_pipe_never_raises(mode: Any) -> None:
    run_through(make_watcher(mode, Broken()))


@pytest.mark.parametrize("mode", ["live", "plain", "json", "quiet"])
def test_a_closed_stream_never_raises(mode: Any) -> None:
    out = io.StringIO()
    watcher = make_watcher(mode, out)
    watcher.start(INFO)
    out.close()
    watcher.row(EVAL)
    watcher.live(SNAPSHOT)
    watcher.stop(STATUS)


def test_a_broken_stream_stays_broken() -> None:
    stream = SafeStream(Broken())
    stream.write_line("a")
    assert stream.broken


@pytest.mark.parametrize("mode", ["live", "plain", "json"])
def test_the_process_continues_when_its_reader_closes_the_pipe(mode: str) -> None:
    program = (
        "import sys, time\n"
        "from qfleet.watch import make_watcher\n"
        f"w = make_watcher({mode!r})\n"
        "w.start({'env': 'x'})\n"
        "for step in range(2000):\n"
        "    w.row({'kind': 'eval', 'env_steps': step, 'updates': 0, 'mean': 1.0})\n"
        "    if step < 20: w.live({'env_steps': step})\n"
        "w.stop({'state': 'done', 'env_steps': 1, 'updates': 1})\n"
        "print('what others print afterwards', flush=True)\n"
        "print('trained to the end', file=sys.stderr)\n"
    )
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, timeout=60, env=env)
    os.close(write)
    assert done.stderr.decode() == "trained to the end\n"
    assert done.returncode == 0


def test_plain_lines_on_an_ascii_stream() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    make_watcher("plain", stream).start({**INFO, "run": "runs/größe"})
    assert raw.getvalue().splitlines()[0] == b"CartPole-v1 | cartpole | cpu, 2 threads | runs/gr??e"


def test_mode_by_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert auto_mode(Terminal()) == "live"
    assert auto_mode(io.StringIO()) == "plain"
    assert auto_mode(Terminal(), json=True) == "json"
    assert auto_mode(Terminal(), quiet=True) == "quiet"
    monkeypatch.setenv("TERM", "dumb")
    assert auto_mode(Terminal()) == "plain"


def test_an_unknown_mode() -> None:
    with pytest.raises(UsageError, match="'loud'"):
        make_watcher("loud")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (0.05, "0.05"),
        (3.14159, "3.14"),
        (487.25, "487.2"),
        (-1234.5, "-1,234"),
        (31_000, "31,000"),
        (2.5e8, "2.50e+08"),
        (0.00001, "1.00e-05"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (9.4, "9 s"), (59.9, "1:00"), (187, "3:07"), (7500, "2:05:00"), (356_400, "4 d 3 h")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_time_left_needs_a_speed() -> None:
    assert seconds_left({"env_steps": 50, "until_steps": 100, "steps_per_second": 10.0}) == 5.0
    assert seconds_left({"env_steps": 50, "until_steps": 100, "steps_per_second": 0.0}) is None
    assert seconds_left({"env_steps": 120, "until_steps": 100, "steps_per_second": 1.0}) == 0.0


def test_sparkline_shows_the_curve() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0, 1.0], 10) == "▅▅"
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 10) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(map(float, range(100))), 4) == "▁▃▆█"


def test_a_trend_stays_short_and_keeps_its_shape() -> None:
    trend = Trend()
    for index in range(20_000):
        trend.add(float(index))
    trend.add(None)
    trend.add(math.nan)
    assert len(trend.values) <= 2048
    assert trend.values == sorted(trend.values)
    assert trend.values[-1] > 19_900


def test_the_resume_command_is_for_runs_that_stopped_early() -> None:
    assert len(end_lines(STATUS)) == 2
    assert len(end_lines({**STATUS, "exit_code": 0})) == 1


@pytest.mark.parametrize("mode", ["json", "quiet"])
def test_warnings_are_printed_once_on_standard_error(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    watcher = make_watcher(mode, io.StringIO())
    watcher.live({**SNAPSHOT, "warnings": ["step_1 is damaged"]})
    watcher.live({**SNAPSHOT, "warnings": ["step_1 is damaged", "disk\x1b[2J"]})
    assert capsys.readouterr() == ("", "warning: step_1 is damaged\nwarning: disk\\x1b[2J\n")


@pytest.mark.parametrize("mode", ["live", "plain", "json", "quiet"])
def test_many_warnings_at_once_are_all_printed(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    live = LiveWatcher(SafeStream(out), console=Console(file=out, force_terminal=True, width=80, height=24))
    watcher = live if mode == "live" else make_watcher(mode, out)
    warnings = [f"warning number {index}" for index in range(7)]
    watcher.start(INFO)
    watcher.live({**SNAPSHOT, "warnings": warnings})
    watcher.stop(STATUS)
    text = out.getvalue() + capsys.readouterr().err
    assert [warning for warning in warnings if warning not in text] == []


def test_older_warnings_are_printed_once_above_the_panel() -> None:
    clock, out = Clock(), io.StringIO()
    watcher = LiveWatcher(SafeStream(out), clock, Console(file=out, force_terminal=True, width=80, height=24))
    watcher.start(INFO)
    for _ in range(5):
        watcher.live({**SNAPSHOT, "warnings": ["a first one", "two", "three", "four"]})
        clock.now += 1
    watcher.stop(STATUS)
    assert out.getvalue().count("! a first one") == 1
    assert out.getvalue().count("! four") >= 5


PROFILE: dict[str, Any] = {
    "wall_seconds": 10.0,
    "seconds": {"update": 8.7, "env": 1.25, "save": 0.05},
    "learner_busy": 0.87,
    "bottleneck": "learner",
    "advice": "updates take 87% of the time",
}
TIME = "time: update 8.7 s, env 1.2 s · learner busy 87% · learner-bound: updates take 87% of the time"


def test_where_the_time_went_is_printed_at_the_end() -> None:
    plain, live, quiet = io.StringIO(), io.StringIO(), io.StringIO()
    watcher = LiveWatcher(SafeStream(live), console=Console(file=live, force_terminal=True, width=80, height=24))
    for each in (make_watcher("plain", plain), watcher, make_watcher("quiet", quiet)):
        each.start(INFO)
        each.stop({**STATUS, "profile": PROFILE})
    assert plain.getvalue().splitlines()[-1] == TIME
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-z]", "", line) for line in live.getvalue().splitlines()]
    assert lines[-2:] == [TIME[:-16], "      " + TIME[-15:]]  # broken between words
    assert "time:" not in quiet.getvalue()


class Terminal(io.StringIO):
    """A small terminal: text that wraps at the edge, and the few commands that the screen uses."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.width, self.height = width, height
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, text: str) -> int:
        for mark, command in re.findall(r"(?s)\x1b\[[0-9;?]*([A-Za-z])|(.)", text):
            self.obey(mark) if mark else self.put(command)
        return len(text)

    def obey(self, command: str) -> None:
        if command == "A":
            self.row = max(self.row - 1, len(self.lines) - self.height, 0)
        elif command == "K":
            self.lines[self.row] = ""

    def put(self, mark: str) -> None:
        if mark == "\r":
            self.column = 0
            return
        if mark == "\n" or self.column == self.width:
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        if mark != "\n":
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + mark + line[self.column + 1 :]
            self.column += 1


@pytest.mark.parametrize("width", [60, 80, 120])
def test_ctrl_c_leaves_no_stale_lines_and_shows_saving(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(width, 24), Clock()
    console = Console(file=terminal, force_terminal=True, width=width, height=24)
    watcher = LiveWatcher(SafeStream(terminal), clock, console)
    monkeypatch.setattr(os, "write", lambda descriptor, text: terminal.write(text.decode()))
    watcher.start(INFO)
    watcher.live(SNAPSHOT)
    with listening(watcher) as asked:
        terminal.write("^C")  # as a terminal echoes it
        asked.receive(signal.SIGINT, None)
        assert terminal.lines[-1] == LEAVING
        watcher.live({**SNAPSHOT, "leaving": LEAVING})  # at once, though the last drawing is new
        assert terminal.lines[-1] == LEAVING
        watcher.stop(STATUS)
    text = "\n".join(terminal.lines)
    assert text.count("qfleet CartPole-v1") == text.count("╭") == text.count("╰") == 1
    assert "saving" not in text
    assert "^C" not in text


def test_no_value_is_truncated_at_sixty_columns() -> None:
    screen = Screen()
    screen.info = INFO
    screen.add_row(EVAL)
    screen.snapshot = {**SNAPSHOT, **LEARNING}
    console = Console(record=True, width=60, height=24, color_system=None, file=io.StringIO())
    console.print(screen)
    text = console.export_text()
    values = ("31% of 100,000", "cpu, 2 threads", "4 s ago", "waiting, 3/4 actors", "12.5 · 40,123", "273 updates/s")
    assert [value for value in (*values, "[491.0, 500.0] at 30,000 steps") if value not in text] == []


LEARNING = {"gate": "waiting", "actors": "3/4", "policy_lag": 12.5, "replay_age": 40_123.4}


def test_lag_age_and_learner_state_are_shown() -> None:
    clock, out = Clock(), io.StringIO()
    watcher = make_watcher("plain", out, clock=clock)
    watcher.start(INFO)
    clock.now += 31
    watcher.live({**SNAPSHOT, **LEARNING, "warnings": []})
    assert out.getvalue().splitlines()[-1].endswith("9 s left · waiting · lag 12.5 · age 40,123")
    screen = Screen()
    screen.snapshot = {**SNAPSHOT, **LEARNING}
    console = Console(record=True, width=80, height=24, color_system=None, file=io.StringIO())
    console.print(screen)
    text = console.export_text()
    assert "waiting, 3/4 actors" in text
    assert "lag · age   12.5 · 40,123" in text
    screen.snapshot = {**SNAPSHOT, **LEARNING, "actors": "1/1"}
    console.print(screen)
    assert "actors" not in console.export_text()
