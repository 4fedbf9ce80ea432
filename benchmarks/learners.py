"""What agreeing costs on one machine: two learners beside one with two threads, and a server's push and pull."""

import argparse
import statistics
import time
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks import report
from qfleet.build.custom_parts import NO_CUSTOM_PARTS
from qfleet.data import Batch, Spec
from qfleet.distributed.actors.process import fork_server
from qfleet.distributed.learners.group import LearnerGroup
from qfleet.distributed.learners.launcher import LocalLearnerLauncher
from qfleet.distributed.learners.worker import build_learner
from qfleet.distributed.parameter_server.driver import ShardProcesses
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import ServerSync
from qfleet.replay import make_cut

SPEC = Spec((84, 84), "uint8", (6,), stack=4)
PAGE = report.ROOT / "docs" / "sync.md"
LEARNERS_BAR, SERVER_BAR = 0.9, 4.0


def plan_of(learners: int, batch: int, threads: int, **more: Any) -> Plan:
    """Plain DQN on Pong's shape with the network of Mnih et al. 2015, in float32."""
    settings = {
        "algo.batch_size": batch,
        "learners.num": learners,
        "runtime.threads": threads,
        "runtime.precision": "float32",
        "runtime.compile": False,
        "net.torso.type": "nature",
    }
    plan = make_plan("ALE/Pong-v5", overrides={**settings, **more})
    return msgspec.structs.replace(plan, runtime=msgspec.structs.replace(plan.runtime, device="cpu"))


def batch_of(num: int) -> Batch:
    """Noise in the shape of frames."""
    rng, ones = np.random.default_rng(0), np.ones(num, np.float32)
    looks = [rng.integers(0, 256, (num, *SPEC.input_shape)).astype(np.uint8) for _ in range(2)]
    return Batch(looks[0], rng.integers(0, 6, num), ones, ones * 0.99, looks[1], ones, np.arange(num))


def samples_per_second(learners: int, seconds: float) -> float:
    """Items learned from per second: by one learner with two threads, or by two with one each; 64 in a batch."""
    plan = plan_of(learners, 64, threads=2 if learners == 1 else 1)
    torch.set_num_threads(plan.runtime.threads or 1)
    learner, batch = build_learner(plan, SPEC, SPEC, NO_CUSTOM_PARTS), batch_of(64)
    group = (
        LearnerGroup(plan, learner, LocalLearnerLauncher(plan, SPEC, SPEC, make_cut(plan.algo)))
        if learners > 1
        else None
    )
    try:
        step = learner.update if group is None else group.update
        for _ in range(3):
            step(batch)
        num, begun = 0, time.monotonic()
        while time.monotonic() - begun < seconds:
            step(batch)
            num += 1
        return 64 * num / (time.monotonic() - begun)
    finally:
        if group is not None:
            group.close()


def push_pull(rounds: int) -> tuple[float, float]:
    """Median seconds of a push and pull of 6.7 MB (2 shards, 2 workers in turn); and of two copies and a step."""
    torch.set_num_threads(1)
    plan = plan_of(2, 64, 1)
    learner = build_learner(plan, SPEC, SPEC, NO_CUSTOM_PARTS)
    sync = ServerSync(shards=2, max_staleness=None)
    servers = ShardProcesses(fork_server(), plan, sync, learner)
    try:
        workers = [[*servers.connect(rank)][-2:] for rank in range(2)]
        spent = []
        for at in range(rounds):
            begun = time.perf_counter()
            exchange(workers[at % 2], at)
            spent.append(time.perf_counter() - begun)
    finally:
        servers.close()
    return statistics.median(spent), limit_seconds(learner, rounds)


def exchange(ports: list[Any], sequence: int) -> None:
    """Push a gradient to all shards, pull all weights."""
    for port in ports:
        port.push(torch.full((port.gradient.numel(),), 1e-4), sequence + 1, 0, 1e-4)
    for port in ports:
        port.weights.clone() if port.reply() else None


def limit_seconds(learner: Any, rounds: int) -> float:
    """Median seconds of two memory copies of all weights and the optimiser's step on them."""
    num = sum(weight.numel() for weight in learner.parameters)
    source, into, gradients = (
        torch.randn(num),
        torch.empty(num),
        [torch.full_like(each, 1e-4) for each in learner.parameters],
    )
    spent = []
    for _ in range(rounds):
        begun = time.perf_counter()
        into.copy_(source)
        source.copy_(into)
        learner.optimizer.step(gradients)
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


def main() -> None:
    """Both comparisons, taking turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    ratios, figures = [], []
    for _ in range(given.rounds):
        one, two = (samples_per_second(learners, given.seconds) for learners in (1, 2))
        ratios.append(two / one)
        figures.append((one, two))
        print(f"one learner, 2 threads: {one:,.0f} samples/s; two learners: {two:,.0f}; {two / one:.2f}", flush=True)
    exchanged, limit = push_pull(200)
    print(f"push and pull: {exchanged * 1e3:.1f} ms; two copies and a step: {limit * 1e3:.1f} ms", flush=True)
    one, two = (statistics.median(column) for column in zip(*figures, strict=True))
    rows = [
        (
            "2 learners x 32 / 1 learner x 64 with 2 threads, Nature network, samples/s",
            f"{two:,.0f} / {one:,.0f}",
            statistics.median(ratios),
            f">= {LEARNERS_BAR}",
        ),
        (
            "server, 2 shards, 6.7 MB: push + pull / (two copies + the optimiser's step), ms",
            f"{exchanged * 1e3:.1f} / {limit * 1e3:.1f}",
            exchanged / limit,
            f"<= {SERVER_BAR:g}",
        ),
    ]
    table = report.table(("what", "figures", "ratio", "bar"), rows)
    record = {
        "ratios": ratios,
        "figures": figures,
        "exchange_seconds": exchanged,
        "limit_seconds": limit,
        "command": "scripts/bench learners",
    }
    report.save("learners", record, table)
    report.publish("learners", "Cost on one machine", "scripts/bench learners", page=PAGE)
    print(table)


if __name__ == "__main__":
    main()
