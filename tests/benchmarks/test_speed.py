"""The speed benchmark's own arithmetic: turns, verdicts, tables, and what is kept of an earlier run."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks import (
    command,
    contests,
    pace,
    processor,
    report,
    speed,
    speed_results,
    speed_table,
    turns,
    verdicts,
)
from benchmarks.contestants import ALONE, BUSY, CEILING, OURS, QUIET, Contest, Contestant, busy

ALL = {contest.name: contest for contest in contests.contests("runs")}
LOADED = {contest.name: busy(contest) for contest in ALL.values() if contest.can_be_busy}


def finished(*rows, exit_code=0, errors="", seconds=9.0):
    return command.Finished([], [(float(number), row) for number, row in enumerate(rows)], seconds, exit_code, errors)


def progress(seconds, env_steps, updates=1):
    return {"kind": "progress", "seconds": seconds, "env_steps": env_steps, "updates": updates}


# --- the meter, and reading what it says ---


def test_the_meter_starts_with_learning_and_stops_after_its_seconds():
    told, now = [], iter([1.0, 2.0, 3.0, 4.0, 6.0])
    meter = pace.Meter(2.5, warm_updates=10, clock=lambda: next(now), tell=told.append)
    calls = [(100, 0), (200, 9), (300, 10), (400, 20), (500, 30)]
    assert [meter(*call) for call in calls] == [False, False, False, False, True]
    assert told == [progress(0.0, 300, 10), progress(3.0, 500, 30)]
    assert pace.steps_per_second(finished(*told)) == pytest.approx(200 / 3)
    assert pace.updates_per_second(finished(*told)) == pytest.approx(20 / 3)


@pytest.mark.parametrize("rows", [(), (progress(0.0, 1),), (progress(1.0, 1), progress(1.0, 5))])
def test_a_pace_needs_two_moments(rows):
    assert pace.steps_per_second(finished(*rows)) is None


def test_the_start_ends_with_the_first_update():
    rows = [progress(0.1, 8, updates=0), progress(0.2, 16, updates=2), progress(0.3, 24, updates=4)]
    assert pace.first_update_seconds(finished(*rows)) == 1.0
    assert pace.first_update_seconds(finished(*rows[:1])) is None
    assert pace.whole_seconds(finished(seconds=4.0)) == 4.0
    assert pace.whole_seconds(finished(exit_code=1)) is None


def test_memory_counts_only_when_it_was_full():
    row = {"measured": 7_100.0, "full": True}
    assert pace.gigabytes_per_million(finished(row)) == pytest.approx(7.1)
    assert pace.gigabytes_per_million(finished({**row, "full": False})) is None


# --- rounds ---


def steps(name, times=1.0, **changes):
    return Contestant(name, (name, "{seconds}"), pace.steps_per_second, times, **changes)


def contest(**changes):
    beside = {
        "peers": (steps("A"), steps("B")),
        "ceiling": steps(CEILING, times=4),
        "peer_bar": 1.6,
        "ceiling_bar": 0.5,
    }
    return Contest("try", "a try", "env steps/s", steps(OURS), **{**beside, **changes})


def held(speeds, rounds=3, with_peers=True, shares=(), **changes):
    """What a contest gives when contestants have these speeds, round after round, and who ran when.

    On a busy machine the burner has these shares of a core, turn after turn.
    """
    left, ran = {name: list(values) for name, values in speeds.items()}, []
    ahead, burning = list(shares), []

    @contextmanager
    def burn(limit_seconds):
        assert limit_seconds > 2.0
        burning.append(True)
        yield Fire(ahead.pop(0))
        burning.pop()

    def run(words, limit_seconds):
        ran.append(f"{words[0]} beside a burner" if burning else words[0])
        assert words[1] == "2.0"
        assert limit_seconds > 2.0
        value = left[words[0]].pop(0)
        if value is None:
            return finished(exit_code=1, errors="Traceback\nImportError: no such thing\n\n")
        return finished(progress(0.0, 0), progress(1.0, value))

    return turns.hold(contest(**changes), with_peers, 2.0, rounds, run, burn), ran


class Fire:
    def __init__(self, share):
        self._share = share

    def share(self):
        return self._share


def test_contestants_take_turns_there_and_back():
    found, ran = held({OURS: [9, 9], "A": [1, 1], "B": [1, 1], CEILING: [1, 1]}, rounds=2)
    assert ran == [OURS, "A", "B", CEILING, CEILING, "B", "A", OURS]
    assert found.figures[CEILING] == [4.0, 4.0]
    assert held({OURS: [9, 9], CEILING: [1, 1]}, rounds=2, with_peers=False)[1] == [OURS, CEILING, CEILING, OURS]


def test_whoever_fails_is_named_and_does_not_start_again():
    found, ran = held({OURS: [9, 9], "A": [None], "B": [1, 1], CEILING: [1, 1]}, rounds=2)
    assert ran.count("A") == 1
    assert found.errors == {"A": "ImportError: no such thing"}
    line = verdicts.judge(found)
    assert line["best_peer"] == "B"
    assert line["met"] is True
    assert "- try, quiet, A: ImportError: no such thing" in speed_table.markdown([line])


@pytest.mark.parametrize("load", [QUIET, BUSY])
def test_a_contest_may_begin_with_a_quiet_turn_that_does_not_count(load):
    speeds = {OURS: [1, 9], CEILING: [1]}
    found, ran = held(speeds, rounds=1, with_peers=False, warm=steps(OURS), load=load, shares=[0.9, 0.9])
    beside = " beside a burner" * (load == BUSY)
    assert ran == [OURS, OURS + beside, CEILING + beside]
    assert found.figures[OURS] == [9.0]


def test_after_a_round_only_the_two_best_peers_go_on_each_with_its_best_number_of_threads():
    names = ("A, 1 thread", "A, 2 threads", "B, 1 thread", "B, 2 threads", "C")
    speeds = {OURS: [99] * 3, CEILING: [1] * 3}
    speeds |= dict(zip(names, ([9, 9, 9], [8], [2], [7, 7, 7], [3]), strict=True))
    found, ran = held(speeds, peers=tuple(steps(name) for name in names))
    assert ran[7:] == [CEILING, "B, 2 threads", "A, 1 thread", OURS, OURS, "A, 1 thread", "B, 2 threads", CEILING]
    line = verdicts.judge(found)
    assert line["best_peer"] == "A, 1 thread"
    assert "| try | quiet | A, 2 threads | 8.00 | 12.4 | 1 |" in speed_table.markdown([line]).splitlines()


def test_who_took_part_in_one_round_only_is_not_the_best_peer():
    speeds = {OURS: [9, 90, 90], "A": [3, 3, 3], "B": [4, 4, 4], "C": [2], CEILING: [1] * 3}
    line = verdicts.judge(held(speeds, peers=(steps("A"), steps("B"), steps("C")))[0])
    assert line["ratios"] == {"A": 30.0, "B": 22.5, "C": 4.5, CEILING: 22.5}
    assert line["best_peer"] == "B"


def test_two_numbers_of_threads_of_the_only_peer_both_go_on():
    names = ("A, 1 thread", "A, 2 threads")
    speeds = {OURS: [9, 9], CEILING: [1, 1], **{name: [3, 3] for name in names}}
    assert held(speeds, rounds=2, peers=tuple(steps(name) for name in names))[1].count("A, 2 threads") == 2


# --- a busy machine ---


def test_turns_on_a_busy_machine_have_a_burner_beside_them_and_note_its_share():
    speeds = {OURS: [9], "A": [1], "B": [1], CEILING: [1]}
    alone = steps(CEILING, always_quiet=True)
    found, ran = held(speeds, rounds=1, load=BUSY, shares=[0.9, 0.8, 0.7], ceiling=alone)
    assert ran == [f"{OURS} beside a burner", "A beside a burner", "B beside a burner", CEILING]
    conditions = verdicts.judge(found)["conditions"]
    assert [conditions[name]["burner_share"] for name in (OURS, "A", "B", CEILING)] == [[0.9], [0.8], [0.7], [None]]
    assert all(len(each["load_average"]) == 1 for each in conditions.values())


def test_a_turn_whose_burner_was_starved_does_not_count_and_is_named():
    speeds = {OURS: [9, 30, 9], "A": [3, 3, 3], "B": [1, 1, 1], CEILING: [1] * 3}
    shares = [0.9] * 4 + [0.9, 0.9, 0.9, 0.2] + [0.9] * 4
    found, _ = held(speeds, load=BUSY, shares=shares)
    line = verdicts.judge(found)
    assert line["rounds"][OURS] == [9.0, None, 9.0]
    assert line["ratios"]["A"] == 3.0
    note = "- try, qfleet: 1 turns do not count, because the burner had too little of a core"
    assert note in speed_table.markdown([line]).splitlines()


def test_a_busy_row_without_a_true_burner_has_no_verdict():
    speeds = {OURS: [9], "A": [1], "B": [1], CEILING: [1]}
    assert verdicts.judge(held(speeds, rounds=1, load=BUSY, shares=[0.1] * 4)[0])["met"] is None


def test_settings_are_what_a_contestant_said_or_what_its_run_has_or_what_it_was_told(tmp_path):
    told = steps("A", precision="float32", threads=2)
    said = finished({"kind": "settings", "threads": 1, "precision": "bfloat16"})
    assert turns.settings(told, finished()) == {"threads": 2, "precision": "float32"}
    assert turns.settings(told, said) == {"threads": 1, "precision": "bfloat16"}
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text('[runtime]\nthreads = 1\nprecision = "float32"\ncompile = true\n')
    found = turns.settings(steps(OURS, runs=str(tmp_path)), finished())
    assert found == {"threads": 1, "precision": "float32", "parallel": None, "compile": True}


def test_the_table_says_how_a_line_was_measured():
    found = held({OURS: [9], "A": [1], "B": [1], CEILING: [1]}, rounds=1, load=BUSY, shares=[0.9, 0.8, 0.9, 0.9])[0]
    settings = {"threads": 2, "precision": "bfloat16"}
    found.turns[OURS] = [replace(found.turns[OURS][0], settings=settings, load_average=0.5)]
    found.turns["A"] = [replace(found.turns["A"][0], settings={"threads": 1, "precision": "float32"}, load_average=2)]
    for name in ("B", CEILING):
        found.turns[name] = [replace(found.turns[name][0], load_average=1.0)]
    line = {**verdicts.judge(found), "date": "2026-01-02"}
    row = "| try | busy | bfloat16, 2 threads | float32, 1 thread | 0.50 to 2.00 | 0.80 to 0.90 | 2026-01-02 |"
    assert row in speed_table.markdown([line]).splitlines()


# --- verdicts ---


def test_ratios_are_taken_within_a_round():
    speeds = {OURS: [100, 10, 40], "A": [50, 5, 40], "B": [10, 10, 10], CEILING: [25, 2.5, 10]}
    line = verdicts.judge(held(speeds)[0])
    assert line["ratios"] == {"A": 2.0, "B": 4.0, CEILING: 1.0}
    assert line["best_peer"] == "A"
    assert line["medians"][OURS] == 40.0
    assert line["met"] is True


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [(16, True), (15.9, False)],  # A makes 10: 1.6 times that is the bar
)
def test_every_bar_has_to_be_met(ours, verdict):
    assert verdicts.judge(held({OURS: [ours], "A": [10], "B": [1], CEILING: [4]}, rounds=1)[0])["met"] is verdict
    assert verdicts.judge(held({OURS: [ours], "A": [10], "B": [1], CEILING: [9]}, rounds=1)[0])["met"] is False


def test_what_was_not_measured_is_not_met():
    assert verdicts.judge(held({OURS: [9], CEILING: [1]}, rounds=1, with_peers=False)[0])["met"] is None
    assert verdicts.judge(held({OURS: [1], CEILING: [1]}, rounds=1, with_peers=False)[0])["met"] is False
    alone = {"peers": (), "peer_bar": None}
    failed = verdicts.judge(held({OURS: [None], CEILING: [1]}, rounds=1, **alone)[0])
    assert failed["met"] is None
    assert verdicts.judge(held({OURS: [9], CEILING: [1]}, rounds=1, **alone)[0])["met"] is True


def test_for_some_less_is_better():
    small = {"peers": (), "ceiling": None, "peer_bar": None, "ceiling_bar": None, "limit": 7.4, "less": True}
    assert verdicts.judge(held({OURS: [7.4]}, rounds=1, **small)[0])["met"] is True
    found = held({OURS: [7.5]}, rounds=1, **small)[0]
    line = verdicts.judge(found)
    assert line["met"] is False
    assert "| <= 7.4 env steps/s | **no** |" in speed_table.markdown([line])


def test_the_table_names_the_best_peer_and_lists_all():
    found = held({OURS: [32], "A": [10], "B": [1], CEILING: [4]}, rounds=1, ceiling_is="bare")[0]
    lines = speed_table.markdown([verdicts.judge(found)]).splitlines()
    row = "| try | a try | 32.0 env steps/s | 10.0 (A) | 3.20 | 16.0 (bare) | 2.00 |"
    assert f"{row} >= 1.6 x peer, >= 0.5 x ceiling | yes |" in lines
    assert "| try | quiet | B | 1.00 | 32.0 | 1 |" in lines


def test_beside_itself_alone_the_bar_says_so():
    found = held({OURS: [9], CEILING: [9]}, rounds=1, with_peers=False, ceiling_is=ALONE, peer_bar=None)[0]
    assert ">= 0.5 x itself" in speed_table.markdown([verdicts.judge(found)])


# --- what is asked for, and what is kept ---


def test_rows_and_loads_are_chosen():
    known = list(ALL.values())
    keys = [each.key for each in speed.chosen(speed.parse(["--rows", "pqn", "memory"]), known)]
    assert keys == [("pqn", QUIET), ("pqn", BUSY), ("memory", QUIET)]
    assert [each.load for each in speed.chosen(speed.parse(["--rows", "pqn", "--load", "busy"]), known)] == [BUSY]
    assert len(speed.chosen(speed.parse([]), known)) == len(ALL) + len(LOADED)


def test_only_usual_settings_are_shown():
    assert speed.usual(speed.parse(["--peers"]))
    assert speed.usual(speed.parse(["--peers", "--rows", "pong", "--load", "busy"]))
    for other in ([], ["--peers", "--seconds", "3"], ["--peers", "--rounds", "1"], ["--peers", "--out", "x"]):
        assert not speed.usual(speed.parse(other))


def test_a_whole_run_is_expected_to_take_three_quarters_of_an_hour_on_two_cores(monkeypatch):
    monkeypatch.setattr(processor, "cores", lambda: 2)
    known = contests.contests("runs")
    given = speed.parse(["--peers"])
    seconds = [speed.expected_seconds(each, True, given.seconds, given.rounds) for each in speed.chosen(given, known)]
    assert 30 * 60 < sum(seconds) < 46 * 60


def test_a_run_goes_on_with_the_contests_that_are_missing(tmp_path, monkeypatch):
    made = []

    def hold(contest, with_peers, seconds, rounds, run):
        made.append(contest.key)
        figures = {OURS: [turns.Turn(9.0)] * rounds, CEILING: [turns.Turn(1.0)] * rounds}
        return turns.Measured(contest, figures)

    monkeypatch.setattr(speed, "hold", hold)
    known = [contest(), replace(contest(), name="other", can_be_busy=False)]
    words = ["--rounds", "2", "--out", str(tmp_path)]
    given = speed.parse(words)
    given.load = [QUIET]
    assert list(speed.measure(given, known)) == [("try", QUIET), ("other", QUIET)]
    lines = speed.measure(speed.parse(words), known)
    assert made == [("try", QUIET), ("other", QUIET), ("try", BUSY)]
    assert list(lines) == [("try", QUIET), ("try", BUSY), ("other", QUIET)]
    record = json.loads((tmp_path / f"speed-{processor.kind()}.json").read_text())
    assert [speed_results.key_of(row) for row in record["rows"]] == [("try", QUIET), ("other", QUIET), ("try", BUSY)]
    for row in record["rows"]:
        assert row["machine"]["kind"] == processor.kind()
        assert row["machine"]["cores"] >= 1
        assert isinstance(row["machine"]["flags"], list)
    speed.measure(speed.parse([*words, "--again"]), known)
    assert len(made) == 6


def test_a_line_is_kept_only_if_code_and_settings_are_the_same():
    asked = {"rounds": 5}
    line = speed_results.stamped({"medians": {OURS: 1.0}}, asked)
    assert speed_results.is_kept(line, asked)
    assert not speed_results.is_kept(None, asked)
    assert not speed_results.is_kept(line, {"rounds": 6})
    assert not speed_results.is_kept({**line, "code": "another"}, asked)
    assert not speed_results.is_kept({**line, "medians": {OURS: None}}, asked)


def test_a_name_for_code_changes_with_the_code(tmp_path):
    for name in ("qfleet/nets/one.py", "benchmarks/two.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    before = speed_results.code(tmp_path)
    (tmp_path / "README.md").write_text("other\n")
    assert speed_results.code(tmp_path) == before
    (tmp_path / "qfleet/nets/one.py").write_text("two\n")
    assert speed_results.code(tmp_path) != before


@pytest.mark.parametrize("kind", ["avx2", "avx512-bf16"])
def test_the_page_takes_the_table_of_each_kind_of_machine(tmp_path, kind):
    page = tmp_path / "page.md"
    page.write_text(speed_results.PAGE.read_text("utf-8"), "utf-8")
    others = page.read_text("utf-8").count("<!-- bench:")
    report.save(f"speed-{kind}", {}, "| a table |\n", tmp_path)
    speed_results.publish(kind, tmp_path, page)
    text = page.read_text("utf-8")
    assert "| a table |" in text.partition(f"<!-- bench:speed-{kind} -->")[2].partition("<!-- /bench:")[0]
    assert text.startswith("# Speed\n")
    assert f"## One machine: {kind}\n\n`{speed_results.COMMAND}`" in text
    assert text.count("<!-- bench:") == others


def test_the_saved_lines_make_the_saved_table():
    for path in report.RESULTS.glob("speed-*.json"):
        record = json.loads(path.read_text("utf-8"))
        assert speed_table.markdown(record["rows"]) in path.with_suffix(".md").read_text("utf-8")
