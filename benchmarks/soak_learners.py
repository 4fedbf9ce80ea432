"""A soak of learners: learners and shards are killed or stopped at random; no update is lost or made twice."""

import argparse
import contextlib
import multiprocessing
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
from qfleet import Run, train
from qfleet.audit.checks import check_history
from qfleet.data import Batch, Report, Sequences
from qfleet.distributed.learners.group import LearnerGroup
from qfleet.plan import make_plan, updates_per_step
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import ServerSync
from qfleet.sync.strategies import Local
from qfleet.watch import read_rows

LONGEST_SECONDS = 30.0  # that an update may take, whatever is lost meanwhile
LIMIT_SECONDS = 4.0  # after which one that is stopped counts as lost
WAYS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "allreduce by gloo": {"learners.backend": "gloo"},
    "server": {"sync.type": "server", "sync.shards": 2},
    "server, at most 2 steps stale": {"sync.type": "server", "sync.shards": 2, "sync.max_staleness": 2},
    "server, asynchronous": {"sync.type": "server", "sync.shards": 2, "sync.max_staleness": None},
    "window of 2 gradients": {"sync.type": "window", "sync.shards": 2},
    "local": {"sync.type": "local", "sync.every_updates": 2},
    "allreduce, top_k": {"sync.codec.type": "top_k"},
}
# What all learners have in common at the end. Moments live in a server's shards; local learners' targets follow weights
# of their own; asynchronous ones have the weights of their last pull; with top_k each adds its own residual.
EQUAL = {"allreduce": "all", "allreduce by gloo": "all", "server": "targets", "local": "weights"}
SETTINGS: dict[str, Any] = {
    "learners.num": 3,
    "learners.timeout_seconds": LIMIT_SECONDS,
    "learners.restarts": 100_000,
    "runtime.threads": 1,
    "runtime.compile": False,
    "algo.learn_start_steps": 200,
    "net.torso.type": "mlp",
    "net.torso.sizes": (32,),
    "log.every_steps": 200,
    "log.history": True,
    "eval.episodes": 0,
    "eval.test_episodes": 0,
    "until.steps": 10**9,
}


@dataclass
class Outcome:
    """What a soak did and what it found; everything in `wrong` breaks a promise."""

    way: str
    blows: Counter[str] = field(default_factory=Counter)
    made: int = 0  # updates, as they were seen to be made
    updates: int = 0  # as the run counts them
    longest_seconds: float = 0.0
    lost: int = 0
    groups: int = 0
    stalest: int | None = None  # by how many steps a gradient was behind that was taken in
    seconds: float = 0.0
    checked: bool = False  # were all learners' weights compared after the last blow?
    wrong: list[str] = field(default_factory=list)


def victims() -> dict[str, list[int]]:
    """Processes that may be hit, by role."""
    found: dict[str, list[int]] = {"learner": [], "shard": []}
    for child in multiprocessing.active_children():
        for role, pids in found.items():
            if child.name.startswith(f"qfleet-{role}") and child.pid is not None and is_up(child.pid):
                pids.append(child.pid)
    return {role: pids for role, pids in found.items() if pids}


def is_up(pid: int) -> bool:
    """Is it neither stopped nor dead already? A blow without effect does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX"
    except OSError:
        return False


def strike(blows: int, seed: int, outcome: Outcome, over: threading.Event) -> None:
    """Hit a process now and then until there were enough blows; before half of them the run has learned again.

    The others fall while it recovers. If all did, an update would last as long as there are blows.
    """
    rng, num_blows = random.Random(seed), 0
    while not outcome.made and not over.wait(0.05):
        pass  # it has not begun to learn
    while num_blows < blows and not over.wait(rng.uniform(0.5, 3.0)):
        made, limit = outcome.made, time.monotonic() + (2 * LONGEST_SECONDS if rng.random() < 0.5 else 0.0)
        while outcome.made == made and time.monotonic() < limit and not over.wait(0.05):
            pass
        if found := victims():
            role, number = rng.choice(sorted(found)), rng.choice([signal.SIGKILL, signal.SIGSTOP])
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(found[role]), number)
                outcome.blows[f"{number.name} {role}"] += 1
                num_blows += 1
    over.set()


@contextlib.contextmanager
def watched(outcome: Outcome, over: threading.Event) -> Iterator[None]:
    """Time every update and quiesce; check the group when all blows were made and all learners are back."""
    update, quiesce = LearnerGroup.update, LearnerGroup.quiesce

    def timed_update(group: LearnerGroup, batch: Batch | Sequences) -> Report:
        before = group.learner.updates
        with timing(outcome):
            found = update(group, batch)
        outcome.made += 1
        if group.learner.updates != before + 1:
            outcome.wrong.append(f"an update counted {group.learner.updates - before} times")
        if (
            over.is_set()
            and not outcome.checked
            and len(group.process_group.members) == group.num_learners - 1
            and has_synchronised(group)
        ):
            outcome.checked = True
            check_group(group, outcome)
        return found

    def timed_quiesce(group: LearnerGroup) -> None:
        with timing(outcome):
            quiesce(group)

    LearnerGroup.update, LearnerGroup.quiesce = timed_update, timed_quiesce  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        LearnerGroup.update, LearnerGroup.quiesce = update, quiesce  # type: ignore[method-assign]


@contextlib.contextmanager
def timing(outcome: Outcome) -> Iterator[None]:
    """No call to the group may take long, whatever is lost meanwhile."""
    begun = time.monotonic()
    yield
    outcome.longest_seconds = max(outcome.longest_seconds, time.monotonic() - begun)


def soak(way: str, blows: int, seed: int, out: Path) -> Outcome:
    """One run under random blows; when all learners are back, check it."""
    outcome, over, begun = Outcome(way), threading.Event(), time.monotonic()
    plan = make_plan("CartPole-v1", overrides={**SETTINGS, **WAYS[way], "seed": seed})
    thread = threading.Thread(target=strike, args=(blows, seed, outcome, over), daemon=True)
    with watched(outcome, over):
        thread.start()
        try:
            run = train(plan, out=out, callbacks=[lambda row: outcome.checked])
        finally:
            over.set()
            thread.join(10)
    outcome.seconds = time.monotonic() - begun
    check_outcome(run, plan, outcome)
    return outcome


def has_synchronised(group: LearnerGroup) -> bool:
    """Did all learners synchronise in the last update? Local ones do so in every second."""
    return (
        not isinstance(group.process_group.sync, Local)
        or group.process_group.sync.steps % group.process_group.sync.every == 0
    )


def check_group(group: LearnerGroup, outcome: Outcome) -> None:
    """Are all weights equal, and was every step made once? Called when all learners are there."""
    if outcome.way in EQUAL and not group.states_equal(EQUAL[outcome.way]):
        outcome.wrong.append("weights differ at the end")
    if outcome.way.startswith("allreduce") and not outcome.way.endswith("top_k"):
        made = int(group.learner.optimizer.moments["step"][0])
        if made != group.learner.updates:
            outcome.wrong.append(f"{made} steps of the optimiser for {group.learner.updates} updates")


def check_outcome(run: Run, plan: Plan, outcome: Outcome) -> None:
    """Compare what the run says with what it promised."""
    status, events = run.status, read_rows(run.path / "events.jsonl")
    outcome.updates = status["updates"]
    outcome.lost = sum(row["kind"] == "learner_lost" for row in events)
    outcome.groups = sum(row["kind"] == "group_formed" for row in events)
    ages = [int(age) for row in events if row["kind"] == "server" for age in row["staleness"]]
    outcome.stalest = max(ages, default=None)
    bound = plan.sync.max_staleness if isinstance(plan.sync, ServerSync) else None
    if bound is not None and (outcome.stalest is None or outcome.stalest > bound):
        outcome.wrong.append(f"a gradient was {outcome.stalest} steps old, not {bound} at most")
    if status["state"] != "stopped":
        outcome.wrong.append(f"the run ended as {status['state']}: {status['reason']}")
    allowed = int((status["env_steps"] - plan.algo.learn_start_steps) * updates_per_step(plan))
    if outcome.updates != allowed:
        outcome.wrong.append(f"{outcome.updates} updates, not {allowed}")
    outcome.wrong += [f"{found.rule}: {found.text}" for found in check_history(run.path / "history")]
    if outcome.made != outcome.updates:
        outcome.wrong.append(f"{outcome.made} updates were made, {outcome.updates} counted")
    if outcome.longest_seconds > LONGEST_SECONDS:
        outcome.wrong.append(f"an update took {outcome.longest_seconds:.1f} s")
    if left := victims():
        outcome.wrong.append(f"processes are left: {left}")


def plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON takes it; `asdict` would count a counter's pairs."""
    return {**vars(outcome), "blows": dict(outcome.blows)}


def main() -> None:
    """A soak for every strategy, with an equal part of all blows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="processes to kill or stop in all")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = []
    for at, way in enumerate(WAYS):
        with tempfile.TemporaryDirectory() as folder:
            found.append(soak(way, -(-asked.kills // len(WAYS)), asked.seed + at, Path(folder)))
        print(found[-1], flush=True)
    heads = (
        "how they agree",
        "killed or stopped",
        "updates",
        "learners lost",
        "groups formed",
        "longest update, s",
        "stalest",
        "violations",
    )
    rows = [
        (
            each.way,
            ", ".join(f"{name} {num}" for name, num in sorted(each.blows.items())),
            each.updates,
            each.lost,
            each.groups,
            each.longest_seconds,
            each.stalest,
            len(each.wrong),
        )
        for each in found
    ]
    text = report.table(heads, rows)
    report.save("soak_learners", {"settings": vars(asked), "soaks": [plain(each) for each in found]}, text)
    if asked.kills >= 100:
        report.publish(
            "soak_learners",
            "Killed and stopped at random",
            "scripts/bench soak_learners",
            page=report.ROOT / "docs" / "sync.md",
        )
    print(text)
    if any(each.wrong for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
