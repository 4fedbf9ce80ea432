"""Silence is measured by an observer that may have been stopped."""

import pytest

from qfleet.system.silence import MAX_GAP_SECONDS, SilenceTimer


def test_seconds_between_looks_add_up_until_a_sign_of_life() -> None:
    timer = SilenceTimer(10.0)
    assert [timer.elapsed(now) for now in (10.5, 11.0, 12.5)] == [0.5, 1.0, 2.5]
    assert timer.seconds == 2.5
    timer.reset(13.0)
    assert timer.seconds == 0.0
    assert timer.elapsed(13.25) == 0.25


def test_a_gap_counts_two_seconds_at_most() -> None:
    timer = SilenceTimer(0.0)
    assert timer.elapsed(1.0) == 1.0
    assert timer.elapsed(3_600.0) == 1.0 + MAX_GAP_SECONDS
    assert timer.elapsed(3_601.0) == 2.0 + MAX_GAP_SECONDS


def test_a_sign_of_life_may_be_older_than_this_look() -> None:
    timer = SilenceTimer(0.0)
    timer.elapsed(5.0)
    timer.reset(4.0)
    assert timer.elapsed(5.5) == pytest.approx(1.5)
