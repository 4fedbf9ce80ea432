"""Bytes per update, wherever they go."""

from qfleet.distributed.learners.traffic import Traffic


class Way:
    sent_bytes = 1_000  # for forming the group


def test_bytes_of_an_update_are_counted_and_those_before_it_are_not() -> None:
    traffic, ways = Traffic(), [Way(), Way()]
    assert traffic.take() is None
    for sent in (10, 20):
        traffic.begin(ways)
        ways[0].sent_bytes += sent
        ways[1].sent_bytes += sent
        traffic.end()
    traffic.begin([])  # alone
    traffic.end()
    assert traffic.take() == 20.0
    assert traffic.take() is None


def test_a_try_that_failed_counts_with_the_update_that_was_made_in_the_end() -> None:
    traffic, lost, way = Traffic(), Way(), Way()
    traffic.begin([lost])
    lost.sent_bytes += 5
    traffic.begin([way])
    way.sent_bytes += 7
    traffic.end()
    assert traffic.take() == 12.0
