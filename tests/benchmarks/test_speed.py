"""The speed benchmark's own arithmetic, and that its plans, environments and commands are what they claim to be."""

import json
import re
import time

import pytest

from benchmarks import command, contests, pace, peers, report, slow_env, speed
from benchmarks.contests import CEILING, OURS, Contest, Contestant
from qfleet.plan import compose, updates_per_step

ALL = {contest.name: contest for contest in contests.contests("runs")}


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


def steps(name, times=1.0):
    return Contestant(name, (name, "{seconds}"), pace.steps_per_second, times)


def contest(**changes):
    beside = {
        "peers": (steps("A"), steps("B")),
        "ceiling": steps(CEILING, times=4),
        "peer_bar": 1.6,
        "ceiling_bar": 0.5,
    }
    return Contest("try", "a try", "env steps/s", steps(OURS), **{**beside, **changes})


def held(speeds, rounds=3, with_peers=True, **changes):
    """What a contest gives when contestants have these speeds, round after round, and who ran when."""
    left, ran = {name: list(values) for name, values in speeds.items()}, []

    def run(words, limit_seconds):
        ran.append(words[0])
        assert words[1] == "2.0"
        assert limit_seconds > 2.0
        value = left[words[0]].pop(0)
        if value is None:
            return finished(exit_code=1, errors="Traceback\nImportError: no such thing\n\n")
        return finished(progress(0.0, 0), progress(1.0, value))

    return speed.hold(contest(**changes), with_peers, 2.0, rounds, run), ran


def test_contestants_take_turns_there_and_back():
    found, ran = held({OURS: [9, 9], "A": [1, 1], "B": [1, 1], CEILING: [1, 1]}, rounds=2)
    assert ran == [OURS, "A", "B", CEILING, CEILING, "B", "A", OURS]
    assert found.figures[CEILING] == [4.0, 4.0]
    assert held({OURS: [9, 9], CEILING: [1, 1]}, rounds=2, with_peers=False)[1] == [OURS, CEILING, CEILING, OURS]


def test_whoever_fails_is_named_and_does_not_start_again():
    found, ran = held({OURS: [9, 9], "A": [None], "B": [1, 1], CEILING: [1, 1]}, rounds=2)
    assert ran.count("A") == 1
    assert found.errors == {"A": "ImportError: no such thing"}
    line = speed.judge(found)
    assert line["best_peer"] == "B"
    assert line["met"] is True
    assert "- try, A: ImportError: no such thing" in speed.markdown([line], {"try": found.contest})


def test_a_contest_may_begin_with_a_round_that_does_not_count():
    found, ran = held({OURS: [1, 9], CEILING: [1]}, rounds=1, with_peers=False, warm=True)
    assert ran == [OURS, OURS, CEILING]
    assert found.figures[OURS] == [9.0]


# --- verdicts ---


def test_ratios_are_taken_within_a_round():
    speeds = {OURS: [100, 10, 40], "A": [50, 5, 40], "B": [10, 10, 10], CEILING: [25, 2.5, 10]}
    line = speed.judge(held(speeds)[0])
    assert line["ratios"] == {"A": 2.0, "B": 4.0, CEILING: 1.0}
    assert line["best_peer"] == "A"
    assert line["medians"][OURS] == 40.0
    assert line["met"] is True


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [(16, True), (15.9, False)],  # A makes 10: 1.6 times that is the bar
)
def test_every_bar_has_to_be_met(ours, verdict):
    assert speed.judge(held({OURS: [ours], "A": [10], "B": [1], CEILING: [4]}, rounds=1)[0])["met"] is verdict
    assert speed.judge(held({OURS: [ours], "A": [10], "B": [1], CEILING: [9]}, rounds=1)[0])["met"] is False


def test_what_was_not_measured_is_not_met():
    assert speed.judge(held({OURS: [9], CEILING: [1]}, rounds=1, with_peers=False)[0])["met"] is None
    assert speed.judge(held({OURS: [1], CEILING: [1]}, rounds=1, with_peers=False)[0])["met"] is False
    alone = {"peers": (), "peer_bar": None}
    failed = speed.judge(held({OURS: [None], CEILING: [1]}, rounds=1, **alone)[0])
    assert failed["met"] is None
    assert speed.judge(held({OURS: [9], CEILING: [1]}, rounds=1, **alone)[0])["met"] is True


def test_for_some_less_is_better():
    small = {"peers": (), "ceiling": None, "peer_bar": None, "ceiling_bar": None, "limit": 7.4, "less": True}
    assert speed.judge(held({OURS: [7.4]}, rounds=1, **small)[0])["met"] is True
    found = held({OURS: [7.5]}, rounds=1, **small)[0]
    line = speed.judge(found)
    assert line["met"] is False
    assert "| <= 7.4 env steps/s | **no** |" in speed.markdown([line], {"try": found.contest})


def test_the_table_names_the_best_peer_and_lists_all():
    found = held({OURS: [32], "A": [10], "B": [1], CEILING: [4]}, rounds=1, ceiling_is="bare")[0]
    text = speed.markdown([speed.judge(found)], {"try": found.contest})
    row = "| a try | 32.0 env steps/s | 10.0 (A) | 3.20 | 16.0 (bare) | 2.00 | >= 1.6 x peer, >= 0.5 x ceiling | yes |"
    assert row in text.splitlines()
    assert "| a try | B | 1.00 | 32.0 |" in text.splitlines()


def test_only_a_whole_run_is_shown():
    assert speed.whole(speed.parse(["--peers"]))
    for partial in ([], ["--peers", "--rows", "pong"], ["--peers", "--seconds", "3"], ["--peers", "--rounds", "1"]):
        assert not speed.whole(speed.parse(partial))
    assert not speed.whole(speed.parse(["--peers", "--out", "x"]))


def test_the_page_takes_the_table(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(speed.PAGE.read_text("utf-8"), "utf-8")
    report.save("speed", {}, "| a table |\n", tmp_path)
    speed.publish(tmp_path, page)
    assert "| a table |" in page.read_text("utf-8")
    assert page.read_text("utf-8").startswith("# Speed\n")
    assert speed.COMMAND in page.read_text("utf-8")


# --- what is measured ---


def plan_of(name):
    words = list(ALL[name].ours.words)
    flags = words.index("--preset")
    env, preset, settings = words[flags - 1], words[flags + 1], words[flags + 4 :]
    return compose(env, preset, overrides=[(*word.split("=", 1), "command line") for word in settings]).plan


@pytest.mark.parametrize("name", ["pong", "prioritized", "cartpole", "minatar", "slow"])
def test_plans_make_one_update_per_four_steps(name):
    assert updates_per_step(plan_of(name)) == 0.25


def test_plans_have_the_settings_that_the_table_states():
    pong, prioritized, cartpole, pqn = (plan_of(name) for name in ("pong", "prioritized", "cartpole", "pqn"))
    assert (pong.algo.batch_size, pong.algo.n_step, pong.net.dueling) == (32, 1, False)
    assert (prioritized.algo.n_step, prioritized.net.dueling, prioritized.env.id) == (3, True, pong.env.id)
    assert (cartpole.algo.batch_size, cartpole.env.num, cartpole.net.torso.sizes) == (128, 8, (120, 84))
    assert (pqn.env.num, pqn.replay.rows, pqn.replay.epochs, pqn.replay.minibatches) == (8, 128, 4, 4)
    assert (plan_of("slow").env.num, plan_of("slow").env.workers) == (8, 2)


def test_every_peer_runs_a_contest_that_its_file_has():
    for each in ALL.values():
        for peer in each.peers:
            module, name = peer.words[2], peer.words[3]
            source = (report.ROOT / (module.replace(".", "/") + ".py")).read_text("utf-8")
            assert f'"{name}"' in source, peer.name


def test_constraints_pin_every_peer():
    pins = re.findall(r"^([\w.-]+)==", peers.CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    pinned = {name.lower().replace("_", "-") for name in pins}
    wanted = {name.split("==")[0].lower() for name in (*peers.NEEDED, *peers.LOOSE, *peers.PARTS)}
    assert wanted <= pinned


def test_the_slow_environment_is_slow(capsys):
    begin = time.monotonic()
    slow_env.alone(0.1)
    assert time.monotonic() - begin >= 0.1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert pace.steps_per_second(finished(*rows)) <= 1 / slow_env.STEP_SECONDS


def test_training_is_measured_in_a_process_of_its_own():
    """The real thing, as small as it gets: our CartPole contestant for a moment."""
    done = command.run(ALL["cartpole"].ours.command(0.2), limit_seconds=100)
    assert done.exit_code == 0, done.errors
    assert ALL["cartpole"].ours.read(done) > 0
