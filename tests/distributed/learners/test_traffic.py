"""Bytes per update, wherever they go."""

from qfleet.distributed.learners.traffic import Traffic


class Connection:
    sent_bytes = 1_000  # for forming the group


def test_bytes_of_an_update_are_counted_and_those_before_it_are_not() -> None:
    traffic, connections = Traffic(), [Connection(), Connection()]
    assert traffic.take() is None
    for sent in (10, 20):
        traffic.begin(connections)
        connections[0].sent_bytes += sent
        connections[1].sent_bytes += sent
        traffic.end()
    traffic.begin([])  # alone
    traffic.end()
    assert traffic.take() == 20.0
    assert traffic.take() is None


def test_a_failed_try_counts_with_the_update_that_follows() -> None:
    traffic, lost, connection = Traffic(), Connection(), Connection()
    traffic.begin([lost])
    lost.sent_bytes += 5
    traffic.begin([connection])
    connection.sent_bytes += 7
    traffic.end()
    assert traffic.take() == 12.0
