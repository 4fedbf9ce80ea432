"""The replay benchmark's own arithmetic, and that our side does what is measured."""

import itertools

import numpy as np
import pytest

from benchmarks import replay, replay_cases


def test_a_rate_is_calls_per_second_of_the_clock():
    now = itertools.count()
    calls = []
    # The clock moves by one whenever it is asked, so each turn of 2 seconds makes two rounds of ten calls.
    assert replay_cases.cpu_rate(lambda: calls.append(0), 6.0, clock=lambda: float(next(now))) == 5.0
    assert len(calls) == 1 + 3 * 10


def test_the_best_turn_counts():
    moments = iter([0.0, 9.0, 9.0, 9.5, 10.0, 20.0, 29.0])
    assert replay_cases.cpu_rate(lambda: None, 3.0, clock=lambda: next(moments)) == pytest.approx(10 / 1.0)


@pytest.mark.parametrize("what", ["vector", "frames"])
def test_our_side_is_full_and_learns(what):
    part = replay.make(what, 300)
    batch = part.draw(32)
    assert batch.obs.shape == (32, *replay.SPECS[what].input_shape)
    assert part.insert_one() == 1
    assert part.insert_many() == 64
    part.learn(32)
    found = replay_cases.figures(part, 0.001)
    assert set(found) == {f"{word} {n}" for word, ns in WORDS.items() for n in ns}
    assert all(np.isfinite(value) and value > 0 for value in found.values())


WORDS = {"insert": (1, 64), "sample": (32, 256), "sample + update": (32, 256)}


def test_a_ratio_is_taken_within_a_round_and_held_to_its_bar():
    turns = {"qfleet": [{"insert 1": 10.0}, {"insert 1": 40.0}, {"insert 1": 9.0}]}
    turns["cpprb"] = [{"insert 1": 5.0}, {"insert 1": 10.0}, {"insert 1": 9.0}]
    row = replay.line("vector", 7, "insert 1", turns)
    assert (row["ratio"], row["bar"], row["met"]) == (2.0, 2.0, True)
    assert replay.line("frames", 7, "insert 1", turns)["bar"] is None
    draws = {side: [{"sample + update 256": value}] for side, value in (("qfleet", 14.0), ("cpprb", 10.0))}
    frames = replay.line("frames", 7, "sample + update 256", draws)
    assert (frames["ratio"], frames["bar"], frames["met"]) == (1.4, 1.5, False)
    alone = replay.line("vector", 7, "insert 1", {"qfleet": turns["qfleet"]})
    assert (alone["ratio"], alone["met"]) == (None, None)
    assert "| vector | 7 | insert 1 | 10 | 9 | 2.00 | >= 2 x | yes |" in replay.markdown([row])
    both = {"qfleet": [{"sample + update 256": 14.0}], "cpprb": [{"sample + update 256": 10.0}]}
    row = replay.line("frames", 7, "sample + update 256", both)
    assert (row["bar"], row["met"]) == (1.5, False)


def test_only_a_whole_run_is_shown():
    assert replay.whole(replay.parse(["--peers"]))
    for words in (["--peers", "--rounds", "1"], ["--peers", "--rows", "frames"], [], ["--peers", "--out", "x"]):
        assert not replay.whole(replay.parse(words))
