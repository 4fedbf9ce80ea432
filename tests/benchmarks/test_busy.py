"""The burner, the group of two and the recovery of speed: their arithmetic, and the burner at work."""

import itertools
import json
import subprocess
import sys
import time

import pytest

from benchmarks import burner, command, recovery_of_speed, side_by_side
from benchmarks.recovery_of_speed import Round, judge_round, markdown, summary
from benchmarks.side_by_side import Overlap, together


def test_a_burner_ends_by_itself_and_tells_its_processor_time():
    now = itertools.count()
    told = []
    burner.burn(5.0, wall=lambda: float(next(now)), cpu=lambda: 7.0, tell=told.append)
    assert len(told) >= 2
    assert all(row["kind"] == "burner" and row["cpu_seconds"] == 0.0 for row in told)


@pytest.mark.parametrize(
    ("rows", "now", "share"),
    [
        ([(1.0, 0.0), (3.0, 1.5)], 3.0, 0.75),
        ([(1.0, 0.5), (3.0, 2.5)], 5.0, 0.5),  # it ended in the middle
        ([(1.0, 0.5)], 5.0, 0.0),
        ([], 5.0, 0.0),
    ],
)
def test_a_share_is_processor_time_by_time(rows, now, share):
    assert burner.share([(moment, {"cpu_seconds": used}) for moment, used in rows], now) == share


def test_a_burner_burns_while_it_is_needed_and_not_after():
    with burner.Burner(30.0) as burning:
        time.sleep(0.5)
        assert burning.share() > 0.05  # others want the machine too
        assert burning.process.poll() is None
    assert burning.process.poll() is not None


def test_a_burner_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(command, "here", lambda *words: (sys.executable, "-c", "raise SystemExit('no fuel')"))
    with pytest.raises(RuntimeError, match="no fuel"), burner.Burner(5.0):
        pass


def test_a_burner_is_in_the_session_of_those_it_competes_with():
    """Linux may share time among sessions first."""
    code = "import json, os; print(json.dumps({'session': os.getsid(0), 'group': os.getpgid(0), 'pid': os.getpid()}))"
    row = command.run([sys.executable, "-c", code], 30.0).rows[0][1]
    mine = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=30)
    assert row["session"] == json.loads(mine.stdout)["session"]
    assert row["group"] == row["pid"]


def test_rows_can_be_read_while_a_command_runs():
    rows = []
    done = command.run([sys.executable, "-c", "print('{}'); print('[]')"], 30.0, rows=rows)
    assert done.rows is rows
    assert [row for _, row in rows] == [{}]


# --- two seeds side by side ---


def test_speeds_are_added_up_while_both_learn():
    one = [(1.0, 100), (2.0, 200), (3.0, 300), (4.0, 400)]
    other = [(2.0, 50), (3.0, 250), (5.0, 900)]
    assert together({"a": one, "b": other}) == (100.0 + 200.0, 2.0)


@pytest.mark.parametrize("other", [[], [(9.0, 1), (10.0, 2)], [(3.5, 1), (5.0, 2)]])
def test_two_that_never_learned_together_have_no_speed(other):
    points = {"a": [(1.0, 100), (4.0, 400)]} | ({"b": other} if other else {})
    assert together(points) is None


def test_a_member_counts_from_its_first_updates():
    now = itertools.count()
    overlap = Overlap(clock=lambda: float(next(now)))
    for updates in (0, 9, side_by_side.WARM_UPDATES, 20):
        overlap.row("a", {"kind": "progress", "updates": updates, "env_steps": 10 * updates})
    overlap.row("a", {"kind": "eval"})
    assert overlap.points == {"a": [(0.0, 10 * side_by_side.WARM_UPDATES), (1.0, 200)]}


# --- back to full speed ---


def drive(*stretches):
    """Points every 0.1 s: each stretch lasts so many seconds at so many steps per second."""
    moment, steps, points = 0.0, 0.0, [(0.0, 0)]
    for seconds, pace in stretches:
        for _ in range(round(seconds * 10)):
            moment += 0.1
            steps += pace / 10
            points.append((moment, round(steps)))
    return points


def judged(*stretches, share=0.9):
    return judge_round(drive(*stretches), (10.0, 22.0), share, {})


def test_a_run_is_back_when_a_whole_window_is_as_fast_as_before():
    found = judged((10, 400), (12, 200), (3, 300), (15, 400))
    assert (found.before, found.during) == (pytest.approx(400, rel=0.01), pytest.approx(200, rel=0.01))
    # After 3 s it is fast, and a window of 2 s holds the speed about as much later.
    assert 4.0 <= found.back_seconds <= 5.5
    assert found.after == pytest.approx(400, rel=0.01)


def test_a_run_that_was_never_slow_is_back_after_one_window():
    assert judged((40, 400)).back_seconds == recovery_of_speed.WINDOW_SECONDS


def test_a_run_that_stays_slow_is_not_back():
    found = judged((10, 400), (30, 200))
    assert found.back_seconds is None
    assert summary([found])["met"] is False
    assert "| **no** |" in markdown(summary([found]), [found])


def rounds(*backs, share=0.9):
    return [Round(400.0, 200.0, 400.0, back, share, [], {}) for back in backs]


@pytest.mark.parametrize(
    ("backs", "middle", "met"),
    [((4.0, 9.0, 30.0), 9.0, True), ((4.0, 10.5, 11.0), 10.5, False), ((4.0, None, None), None, False)],
)
def test_the_median_of_rounds_has_to_be_back_in_time(backs, middle, met):
    found = summary(rounds(*backs))
    assert (found["back_seconds"], found["met"]) == (middle, met)


def test_a_starved_burner_proves_nothing():
    assert summary(rounds(2.0, share=0.1))["met"] is None
