"""A soak: processes of a run are killed or stopped at random moments; it must go on, and every count must be exact."""

import argparse
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.witness import Witness, untrue
from qfleet import Run, train
from qfleet.audit.checks import check_history
from qfleet.data import Batch
from qfleet.learn import ReplaySource
from qfleet.plan import make_plan
from qfleet.watch import read_rows

N_STEP, DISCOUNT = 3, 0.9
HUNG_SECONDS, STEP_SECONDS = 3.0, 1.5
REPLACED_SECONDS = 5.0
BATCHES_BETWEEN, LEARNED_SECONDS = 20, 60.0  # a run that learns makes that many within this time
MANY_BLOWS = 30  # of which every role gets some
ROLES = ("actor", "env", "replay")
SETTINGS: dict[str, Any] = {
    "runtime.type": "processes",
    "runtime.threads": 1,
    "runtime.inference": "local",
    "runtime.inference_device": "cpu",
    "runtime.replay_process": True,
    "runtime.hung_seconds": HUNG_SECONDS,
    "runtime.restarts": 100_000,
    "actors.num": 2,
    "env.num": 4,
    "env.workers": 1,
    "env.step_timeout_seconds": STEP_SECONDS,
    "env.rebuilds": 100_000,
    "algo.n_step": N_STEP,
    "algo.discount": DISCOUNT,
    "algo.batch_size": 16,
    "algo.learn_start_steps": 200,
    "replay.capacity": 5_000,
    "replay.samples_per_insert": 2,
    "net.torso.type": "mlp",
    "net.torso.sizes": (16,),
    "save.every_steps": 1_000,
    "save.max_share": 1,
    "log.every_steps": 500,
    "log.history": True,
    "eval.episodes": 0,
    "eval.test_episodes": 0,
}


@dataclass
class Outcome:
    """The result of a soak; every entry of `wrong` is a broken promise."""

    blows: Counter[str] = field(default_factory=Counter)
    env_steps: int = 0
    updates: int = 0
    batches: int = 0
    slowest_seconds: float = 0.0  # until a lost actor was replaced
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def processes_by_parent(pid: int) -> dict[int, list[int]]:
    """Every process by its parent."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    return children


def victims() -> dict[str, list[int]]:
    """The processes that may be hit: actors, their environment workers, the replay."""
    import multiprocessing

    named = {child.pid: child.name for child in multiprocessing.active_children() if child.pid is not None}
    family = processes_by_parent(os.getpid())
    actors = [pid for pid, name in named.items() if name.startswith("qfleet-actor")]
    # An environment's process is a child of a fork server that an actor started.
    envs = [pid for actor in actors for server in family.get(actor, []) for pid in family.get(server, [])]
    return {"actor": actors, "env": envs, "replay": [pid for pid, name in named.items() if name == "qfleet-replay"]}


class Chaos:
    """Kills or stops random processes from a thread of its own."""

    def __init__(
        self, blows: int, seed: int, outcome: Outcome, pause_seconds: tuple[float, float] = (0.3, 3.0)
    ) -> None:
        self.left, self.rng, self.outcome, self.pause_seconds = blows, random.Random(seed), outcome, pause_seconds
        self.over = threading.Event()

    def wait_for_learning(self) -> None:
        """Wait until the run has learned from some more batches, at most LEARNED_SECONDS."""
        until, enough = time.monotonic() + LEARNED_SECONDS, self.outcome.batches + BATCHES_BETWEEN
        while self.outcome.batches < enough and time.monotonic() < until and not self.over.wait(0.05):
            pass

    def run(self) -> None:
        """Make all kills: every second one, on average, only after the run has recovered."""
        self.wait_for_learning()
        while self.left and not self.over.wait(self.rng.uniform(*self.pause_seconds)):
            if self.rng.random() < 0.5:
                self.wait_for_learning()
            found = {role: pids for role, pids in victims().items() if pids}
            role = self.rng.choice([role for role in ROLES if role in found] or [""])
            if role:
                number = self.rng.choice([signal.SIGKILL, signal.SIGSTOP])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.rng.choice(found[role]), number)
                    self.outcome.blows[f"{number.name} {role}"] += 1
                    self.left -= 1

    def still_on(self, row: dict[str, Any]) -> bool:
        """A callback that ends the run when all kills are made."""
        return not self.left


@contextlib.contextmanager
def witnessed(outcome: Outcome) -> Iterator[None]:
    """Check every batch that is learned from."""
    after_update = ReplaySource.after_update

    def checked(self: ReplaySource, batch: Any, priority: Any) -> None:
        if isinstance(batch, Batch):
            outcome.batches += 1
            outcome.wrong.extend(untrue(batch, N_STEP, DISCOUNT)[:3])
        after_update(self, batch, priority)

    ReplaySource.after_update = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        ReplaySource.after_update = after_update  # type: ignore[method-assign]


def soak(blows: int, seed: int, out: Path, pause_seconds: tuple[float, float] = (0.3, 3.0)) -> Outcome:
    """One run under this many kills."""
    outcome, begin = Outcome(), time.monotonic()
    plan = make_plan("witness", overrides={**SETTINGS, "until.steps": 10**9, "seed": seed})
    chaos = Chaos(blows, seed, outcome, pause_seconds)
    thread = threading.Thread(target=chaos.run, daemon=True)
    with witnessed(outcome):
        thread.start()
        try:
            run = train(plan, out=out, env=Witness, callbacks=[chaos.still_on])
        finally:
            chaos.over.set()
            thread.join(10)
    outcome.seconds = time.monotonic() - begin
    check_run(run, outcome)
    return outcome


def check_run(run: Run, outcome: Outcome) -> None:
    """Compare the run with its promises."""
    status, events = run.status, read_rows(run.path / "events.jsonl")
    outcome.env_steps, outcome.updates = status["env_steps"], status["updates"]
    outcome.wrong += [f"{found.rule}: {found.text}" for found in check_history(run.path / "history")]
    if status["state"] != "stopped":  # by the callback, when all kills were made
        outcome.wrong.append(f"the run ended as {status['state']}: {status['reason']}")
    allowed = (outcome.env_steps - 200) * 2 // 16
    if outcome.updates != allowed:
        outcome.wrong.append(f"{outcome.updates} updates, not {allowed}")
    outcome.slowest_seconds = max((row["seconds"] for row in events if row["kind"] == "actor_back"), default=0.0)
    if outcome.slowest_seconds > REPLACED_SECONDS:
        outcome.wrong.append(f"an actor was back only after {outcome.slowest_seconds:.1f} s")
    total, hit = sum(outcome.blows.values()), {blow.split()[1] for blow in outcome.blows}
    if total >= MANY_BLOWS and hit != set(ROLES):
        outcome.wrong.append(f"only {sorted(hit)} were hit")
    if outcome.batches < total:
        outcome.wrong.append(f"{outcome.batches} batches between {total} blows")
    left = [pid for pids in victims().values() for pid in pids]
    if left:
        outcome.wrong.append(f"{len(left)} processes are left")


def main() -> None:
    """Run a soak and save its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="processes to kill or stop in all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = soak(arguments.kills, arguments.seed, Path(folder))
    text = report.table(("blow", "times"), sorted(outcome.blows.items())) + "\n"
    text += (
        f"{outcome.env_steps:,} steps, {outcome.updates:,} updates, {outcome.batches:,} batches checked, "
        f"{outcome.seconds:.0f} s; an actor was back {outcome.slowest_seconds:.1f} s at most after its loss was found "
        f"(until its first rollout); violations: {len(outcome.wrong)}.\n"
    )
    report.save("soak", {"settings": vars(arguments), **vars(outcome), "blows": dict(outcome.blows)}, text)
    if arguments.kills >= 200:
        report.publish("soak", "Killed and stopped at random", "scripts/bench soak")
    print(text, *outcome.wrong[:20], sep="\n")
    if outcome.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
