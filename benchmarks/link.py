"""Agreeing over slow links: ranks in network namespaces, joined at 1 Gbit/s and 100 Mbit/s (`tc tbf`); needs root.

Ours is compared with torch's own all-reduce on the same link, codecs with float32, and all of it with the usual model:
a message of n bytes takes alpha + n / beta, and a ring all-reduce of p ranks 2 (p - 1) messages of n / p.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from benchmarks import report
from benchmarks.learners import SPEC, batch_of, plan_of
from qfleet.build.custom_parts import NO_CUSTOM_PARTS
from qfleet.distributed.learners.worker import build_learner
from qfleet.plan.sync_schema import (
    AllreduceSync,
    Codec,
    Fp16Codec,
    Int8Codec,
    NoCodec,
    PowerSgdCodec,
    SignCodec,
    TopKCodec,
)
from qfleet.sync.buckets import Buckets
from qfleet.sync.make import make_average
from qfleet.sync.process_groups import ProcessGroupComm, make_gloo

BRIDGE, NET, PORT, LIMIT_SECONDS = "qfbr0", "10.77.0", 29_877, 120.0
RATES = {"1 Gbit/s": 1_000, "100 Mbit/s": 100}
CODECS: dict[str, Codec] = {
    "none": NoCodec(),
    "fp16": Fp16Codec(),
    "int8": Int8Codec(),
    "sign": SignCodec(),
    "top_k 1 %": TopKCodec(sampled=True),
    "power_sgd 2": PowerSgdCodec(),
}
# The network of Mnih et al. 2015 with 512 units, and one of 100 MB.
NETS: dict[str, list[tuple[int, ...]]] = {
    "6.7 MB": [(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,), (512, 3136), (512,), (6, 512), (6,)],
    "100 MB": [(5_000, 5_000), (5_000,)],
}
PAGE = report.ROOT / "docs" / "sync.md"


def run(*command: str, check: bool = True) -> None:
    """A command that must work, or may fail."""
    subprocess.run(command, check=check, capture_output=True, text=True)  # noqa: S603  the command is ours


@contextlib.contextmanager
def linked(ranks: int, megabits: int) -> Iterator[None]:
    """Network namespaces on one bridge, each reached at this rate in both directions."""
    try:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "link", "set", BRIDGE, "up")
        for rank in range(ranks):
            name, inside, outside = f"qf{rank}", f"qfi{rank}", f"qfo{rank}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
            run("ip", "link", "set", outside, "master", BRIDGE, "up")
            run("ip", "link", "set", inside, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{NET}.{rank + 1}/24", "dev", inside)
            run("ip", "-n", name, "link", "set", inside, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "200ms")
            run("tc", "-n", name, "qdisc", "add", "dev", inside, *shape)
            run("tc", "qdisc", "add", "dev", outside, *shape)
        yield
    finally:
        for rank in range(ranks):
            run("ip", "netns", "del", f"qf{rank}", check=False)
            run("ip", "link", "del", f"qfo{rank}", check=False)
        run("ip", "link", "del", BRIDGE, check=False)


def measure(ranks: int, net: str, rounds: int) -> dict[str, float]:
    """Seconds of every operation, as rank 0 saw it."""
    command = [sys.executable, "-m", "benchmarks.link", "--ranks", str(ranks), "--net", net, "--rounds", str(rounds)]
    children = [
        subprocess.Popen(  # noqa: S603  the command is ours
            [str(shutil.which("ip")), "netns", "exec", f"qf{rank}", *command, "--rank", str(rank)],
            cwd=report.ROOT,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said, _ = children[0].communicate(timeout=1_800)
        found: dict[str, float] = json.loads(said.splitlines()[-1])
        return found
    finally:
        for child in children:
            child.kill()
            child.wait(10)


def live(rank: int, ranks: int, net: str, rounds: int) -> None:
    """One rank's part: everything once to warm up, then in rounds."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    first = f"{NET}.1"
    store: Any = (
        dist.TCPStore(first, PORT, None, True, timedelta(seconds=60), wait_for_workers=False) if rank == 0 else None  # type: ignore[attr-defined]
    )
    comm = make_gloo(first, PORT, rank, ranks, number=0, timeout_seconds=LIMIT_SECONDS, own=f"{NET}.{rank + 1}")
    found = {name: timed(act, comm, rounds) for name, act in acts(comm, NETS[net]).items()}
    if rank == 0:
        print(json.dumps(found), flush=True)
        del store


def acts(comm: ProcessGroupComm, shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """What is timed: a small message, torch's all-reduce, and ours with every codec."""
    values = torch.randn(sum(torch.Size(shape).numel() for shape in shapes), generator=torch.Generator().manual_seed(1))
    small, raw = torch.zeros(1), values.clone()
    averages = {
        name: make_average(AllreduceSync(codec=codec, check_every_rounds=0), comm, shapes, 0, silent)
        for name, codec in CODECS.items()
    }
    found: dict[str, Callable[[], object]] = {
        "small": lambda: comm.sum(small),
        "raw": lambda: comm.group.allreduce([raw]).wait(),
    }
    if shapes == NETS["6.7 MB"]:
        found["update, in buckets"] = in_buckets(comm)
    compute = computing(shapes)
    for name, average in averages.items():
        found[name] = lambda average=average: average(values)  # type: ignore[misc]
        found[f"update, {name}"] = lambda average=average: (compute(), average(values))  # type: ignore[misc]
    return found


def computing(shapes: list[tuple[int, ...]]) -> Callable[[], object]:
    """What an update computes before anybody agrees: gradients of 32 items by networks of this size."""
    if shapes == NETS["6.7 MB"]:
        learner, batch = build_learner(plan_of(2, 64, 1), SPEC, SPEC, NO_CUSTOM_PARTS), batch_of(32)
        return lambda: learner.prepare_shared_update(batch)
    weight, values = torch.randn(shapes[0], requires_grad=True), torch.randn(32, shapes[0][1])
    return lambda: torch.autograd.grad((values @ weight.T).square().mean(), weight)


def in_buckets(comm: ProcessGroupComm) -> Callable[[], object]:
    """An update whose sums are begun while it computes."""
    learner, batch = build_learner(plan_of(2, 64, 1), SPEC, SPEC, NO_CUSTOM_PARTS), batch_of(32)
    buckets = Buckets(comm, learner.parameters, AllreduceSync().bucket_bytes)
    return lambda: buckets.sums(learner.prepare_shared_update(batch, 1.0, buckets.add).gradients)


def silent(kind: str, **fields: Any) -> None:
    """Ignore the gradient."""


def timed(act: Callable[[], object], comm: ProcessGroupComm, rounds: int) -> float:
    """Median seconds, begun together each time."""
    act()
    spent, barrier = [], torch.zeros(1)
    for _ in range(rounds):
        comm.sum(barrier)
        begun = time.perf_counter()
        act()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


def predicted(ranks: int, num_bytes: float, megabits: int, alpha: float) -> float:
    """A ring all-reduce by the model."""
    beta = megabits * 1e6 / 8
    return 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * num_bytes / beta


def table_row(link: str, megabits: int, ranks: int, net: str, found: dict[str, float]) -> tuple[Any, ...]:
    """A row of the table."""
    num_bytes = 4.0 * sum(torch.Size(shape).numel() for shape in NETS[net])
    model = predicted(ranks, num_bytes, megabits, found["small"] / (2 * (ranks - 1)))
    codecs = {name: found[name] for name in CODECS if name != "none"}
    best = min(codecs, key=lambda name: found[f"update, {name}"])
    updates = {name: 1.0 / found[f"update, {name}"] for name in ("none", best)}
    return (
        link,
        ranks,
        net,
        f"{found['raw'] * 1e3:,.0f}",
        found["none"] / found["raw"],
        f"{model * 1e3:,.0f} ({found['none'] / model - 1:+.0%})",
        ", ".join(f"{name} {seconds * 1e3:,.0f}" for name, seconds in codecs.items()),
        f"{updates['none']:.2f}",
        f"{1.0 / found['update, in buckets']:.2f}" if "update, in buckets" in found else "",
        f"{updates[best]:.2f} ({best})",
        updates[best] / updates["none"],
    )


def main() -> None:
    """Every link, number of ranks and size; or, with --rank, one rank's part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--net", choices=sorted(NETS), default=None)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.rank is not None:
        live(given.rank, given.ranks, given.net, given.rounds)
        return
    if not (shutil.which("ip") and shutil.which("tc")):
        print("skipped: ip and tc (iproute2) are not installed")
        return
    rows, record = [], []
    for link, megabits in RATES.items():
        for ranks in (2, 4) if given.ranks is None else (given.ranks,):
            for net in NETS if given.net is None else (given.net,):
                with linked(ranks, megabits):
                    found = measure(ranks, net, given.rounds)
                record.append({"link": link, "ranks": ranks, "net": net, **found})
                rows.append(table_row(link, megabits, ranks, net, found))
                print(*rows[-1], sep=" | ", flush=True)
    heads = (
        "link",
        "ranks",
        "network",
        "torch's all-reduce, ms",
        "ours / it",
        "model, ms (ours beside it)",
        "codecs, ms",
        "updates/s in float32",
        "in buckets",
        "updates/s by the best codec",
        "ratio",
    )
    table = report.table(heads, rows)
    if given.ranks is None and given.net is None:
        report.save("link", {"lines": record, "command": "scripts/bench link"}, table)
        report.publish("link", "Over slow links", "scripts/bench link", page=PAGE)
    print(table)


if __name__ == "__main__":
    main()
