"""Shared memory between ranks: the results of the reference, in chunks and every dtype; no endless waits."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.shared_memory_comm import SharedComm, region_bytes, slot_bytes_for
from qfleet.system.shared_memory import SharedMemory
from tests.sync.parts import ThreadComm, ThreadExchange

SLOT = 64


def shared(size: int, slot: int = SLOT, timeout_seconds: float = 10.0) -> list[SharedComm]:
    region, pairs = SharedMemory(region_bytes(size, slot)), [socket.socketpair() for _ in range(size - 1)]
    sockets = [[own for own, _ in pairs], *([other] for _, other in pairs)]
    return [
        SharedComm(region, own, rank, size, slot_bytes=slot, timeout_seconds=timeout_seconds)
        for rank, own in enumerate(sockets)
    ]


def on_all_ranks(comms: list[Any], act: Callable[[Comm], Any]) -> list[Any]:
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
            comm.broadcast(shown, comm.world_size - 1)
            right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
            found += [total, shown, *comm.gather(values), comm.swap(values, right, left)]
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_equal_those_between_threads(size: int) -> None:
    exchange = ThreadExchange(size)
    expected = on_all_ranks([ThreadComm(exchange, rank) for rank in range(size)], operations)
    for own, other in zip(on_all_ranks(list(shared(size)), operations), expected, strict=True):
        assert len(own) == len(other)
        assert all(torch.equal(one, two) for one, two in zip(own, other, strict=True))


def test_matrices_that_are_not_contiguous_are_summed() -> None:
    def act(comm: Comm) -> torch.Tensor:
        values = torch.arange(12.0).view(3, 4).t() * (comm.rank + 1)
        comm.sum(values)
        return values

    for found in on_all_ranks(list(shared(2)), act):
        assert torch.equal(found, torch.arange(12.0).view(3, 4).t() * 3)


def test_a_closed_rank_is_noticed_by_all() -> None:
    comms = shared(3)
    comms[2].close()
    assert all(isinstance(found, CommLost) for found in on_all_ranks(comms[:1], lambda comm: comm.sum(torch.ones(3))))
    comms[0].close()
    assert all(isinstance(found, CommLost) for found in on_all_ranks(comms[1:2], lambda comm: comm.sum(torch.ones(3))))


def test_a_missing_rank_is_a_timeout() -> None:
    comms = shared(2, timeout_seconds=0.5)
    started = time.monotonic()
    assert isinstance(on_all_ranks(comms[:1], lambda comm: comm.sum(torch.ones(3)))[0], CommLost)
    assert 0.4 < time.monotonic() - started < 5


def test_bytes_are_counted_and_slot_sizes_are_bounded() -> None:
    comms = shared(2)
    on_all_ranks(list(comms), lambda comm: comm.sum(torch.ones(100)))
    assert [comm.sent_bytes for comm in comms] == [400, 400]
    assert slot_bytes_for(10) == 4096
    assert slot_bytes_for(1 << 40) == 1 << 24
    assert slot_bytes_for(100_001) % 64 == 0
