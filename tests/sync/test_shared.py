"""Shared memory between ranks: the answers of the reference, in pieces and every kind of number; no endless waits."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qfleet.sync.comm import Comm, CommLost, ThreadComm, ThreadExchange
from qfleet.sync.shared_memory_comm import SharedComm, region_bytes, slot_bytes_for
from qfleet.system.shared_memory import SharedMemory

SLOT = 64


def shared(size: int, slot: int = SLOT, limit_seconds: float = 10.0) -> list[SharedComm]:
    region, pairs = SharedMemory(region_bytes(size, slot)), [socket.socketpair() for _ in range(size - 1)]
    lines = [[mine for mine, _ in pairs], *([theirs] for _, theirs in pairs)]
    return [
        SharedComm(region, own, rank, size, slot_bytes=slot, limit_seconds=limit_seconds)
        for rank, own in enumerate(lines)
    ]


def everywhere(comms: list[Any], act: Callable[[Comm], Any]) -> list[Any]:
    found: dict[int, Any] = {}

    def one(comm: Any) -> None:
        try:
            found[comm.rank] = act(comm)
        except CommLost as lost:
            found[comm.rank] = lost

    threads = [threading.Thread(target=one, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[comm.rank] for comm in comms]


def operations(comm: Comm) -> list[torch.Tensor]:
    seeds = torch.Generator().manual_seed(comm.rank)
    found: list[torch.Tensor] = []
    for num in (1, 5, 16, 100, 1_000):  # 1,000 doubles are 125 slots
        for kind in (torch.float32, torch.float64, torch.int8):
            values = (torch.randn(num, generator=seeds) * 10).to(kind)
            total, shown = values.clone(), values.clone()
            comm.sum(total)
            comm.broadcast(shown, comm.size - 1)
            right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            found += [total, shown, *comm.gather(values), comm.swap(values, right, left)]
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_same_answers_as_between_threads(size: int) -> None:
    meeting = ThreadExchange(size)
    expected = everywhere([ThreadComm(meeting, rank) for rank in range(size)], operations)
    for own, other in zip(everywhere(list(shared(size)), operations), expected, strict=True):
        assert len(own) == len(other)
        assert all(torch.equal(one, two) for one, two in zip(own, other, strict=True))


def test_matrices_and_what_does_not_lie_in_order() -> None:
    def act(comm: Comm) -> torch.Tensor:
        values = torch.arange(12.0).view(3, 4).t() * (comm.rank + 1)
        comm.sum(values)
        return values

    for found in everywhere(list(shared(2)), act):
        assert torch.equal(found, torch.arange(12.0).view(3, 4).t() * 3)


def test_who_leaves_is_noticed_by_all() -> None:
    comms = shared(3)
    comms[2].close()
    assert all(isinstance(found, CommLost) for found in everywhere(comms[:1], lambda comm: comm.sum(torch.ones(3))))
    comms[0].close()
    assert all(isinstance(found, CommLost) for found in everywhere(comms[1:2], lambda comm: comm.sum(torch.ones(3))))


def test_who_does_not_come_is_not_waited_for_for_ever() -> None:
    comms, begun = shared(2, limit_seconds=0.5), time.monotonic()
    assert isinstance(everywhere(comms[:1], lambda comm: comm.sum(torch.ones(3)))[0], CommLost)
    assert 0.4 < time.monotonic() - begun < 5


def test_bytes_are_counted_and_slots_are_of_a_sensible_size() -> None:
    comms = shared(2)
    everywhere(list(comms), lambda comm: comm.sum(torch.ones(100)))
    assert [comm.sent_bytes for comm in comms] == [400, 400]
    assert slot_bytes_for(10) == 4096
    assert slot_bytes_for(1 << 40) == 1 << 24
    assert slot_bytes_for(100_001) % 64 == 0
