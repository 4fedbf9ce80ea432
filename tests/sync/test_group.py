"""Gloo between real processes: the same results as between threads, and lost ranks are noticed."""

import multiprocessing
import os
import signal
import socket
import time
from typing import Any

import pytest
import torch

from qfleet.plan.sync_schema import (
    Bf16Codec,
    Fp16Codec,
    Int8Codec,
    NoCodec,
    PowerSgdCodec,
    SignCodec,
    TernaryCodec,
    TopKCodec,
)
from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.make import make_codec
from qfleet.sync.process_groups import ProcessGroupComm, make_gloo
from tests.sync.parts import run_ranks

pytestmark = pytest.mark.timeout(100)
CODECS = (
    NoCodec(),
    Fp16Codec(),
    Bf16Codec(),
    Int8Codec(chunk=32),
    SignCodec(chunk=32),
    TernaryCodec(chunk=32),
    TopKCodec(share=0.1),
    TopKCodec(share=0.1, sampled=True),
    PowerSgdCodec(rank=1),
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def operations(comm: ProcessGroupComm) -> dict[str, Any]:
    values = torch.arange(4).double() + comm.rank
    total, shown = values.clone(), values.clone()
    comm.sum(total)
    comm.broadcast(shown, 1)
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    return {
        "sum": total.tolist(),
        "broadcast": shown.tolist(),
        "gather": [each.tolist() for each in comm.gather(values)],
        "swap": comm.swap(values, right, left).tolist(),
        "coded": coded(comm),
    }


def coded(comm: Comm) -> list[list[float]]:
    """The mean over all ranks by every codec, twice, because some codecs keep state."""
    values = torch.randn(96, generator=torch.Generator().manual_seed(comm.rank))
    made = [make_codec(codec, [(8, 10), (16,)], comm.rank, 0) for codec in CODECS]
    return [codec.mean(values, comm)[1].tolist() for codec in made for _ in range(2)]


def run_rank(rank: int, size: int, port: int, hung: bool, results: Any) -> None:
    comm = make_gloo("127.0.0.1", port, rank, size, number=0, timeout_seconds=5.0)
    if not hung:
        results.send(operations(comm))
        time.sleep(1)
        return
    comm.sum(torch.zeros(1))
    results.send("joined")
    if rank == 1:
        time.sleep(60)  # until it is killed or stopped
    started = time.monotonic()
    try:
        comm.sum(torch.zeros(1 << 20))
    except CommLost:
        results.send(time.monotonic() - started)


def start(size: int, hung: bool) -> tuple[list[Any], list[Any], Any]:
    import torch.distributed as dist

    store: Any = dist.TCPStore("127.0.0.1", port := free_port(), None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    children = [context.Process(target=run_rank, args=(rank, size, port, hung, pipes[rank][1])) for rank in range(size)]
    for child in children:
        child.start()
    return children, [mine for mine, _ in pipes], store


def receive(pipe: Any) -> Any:
    assert pipe.poll(60)
    return pipe.recv()


def test_results_equal_those_between_threads() -> None:
    children, pipes, _ = start(3, hung=False)
    found = dict(enumerate(map(receive, pipes)))
    for child in children:
        child.join(10)
    expected = run_ranks(3, coded)
    for rank, result in found.items():
        assert result["sum"] == [3.0, 6.0, 9.0, 12.0]
        assert result["broadcast"] == [1.0, 2.0, 3.0, 4.0]
        assert result["gather"] == [[0.0 + r, 1.0 + r, 2.0 + r, 3.0 + r] for r in range(3)]
        left = (rank - 1) % 3
        assert result["swap"] == [left + 0.0, left + 1.0, left + 2.0, left + 3.0]
        assert result["coded"] == found[0]["coded"]  # the same bits on all ranks
        torch.testing.assert_close(torch.tensor(result["coded"]), torch.tensor(expected[rank]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_noticed_in_time(number: int) -> None:
    children, pipes, _ = start(2, hung=True)
    assert list(map(receive, pipes)) == ["joined", "joined"]
    os.kill(children[1].pid, number)
    seconds = receive(pipes[0])
    children[1].kill()
    for child in children:
        child.join(10)
    assert seconds < 10
