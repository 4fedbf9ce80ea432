"""The protocols of channel, rate limiter, ledger, replay and supervision under simulated faults.

A failure names its seed; `failures(seed)` repeats it.
"""

import time
from collections import Counter

import pytest

from tests.sim.bugs import BUGS
from tests.sim.simulation import Simulation, failures

SEEDS, MANY_SEEDS, BUG_SEEDS = 300, 10_000, 400


def failing(seeds: range) -> dict[int, tuple[str | None, list[str]]]:
    """The seeds that break a promise, and how."""
    found = {seed: failures(seed) for seed in seeds}
    return {seed: wrong for seed, wrong in found.items() if wrong != (None, [])}


def test_promises_hold_under_faults() -> None:
    assert failing(range(SEEDS)) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_promises_hold_under_faults_many_times() -> None:
    begin = time.monotonic()
    assert failing(range(SEEDS, SEEDS + MANY_SEEDS)) == {}
    print(f"{MANY_SEEDS} seeds in {time.monotonic() - begin:.0f} s")


def test_the_same_seed_is_the_same_run() -> None:
    first, again = (Simulation(7).run() for _ in range(2))
    assert first == again


def test_every_kind_of_fault_occurs() -> None:
    seen: Counter[str] = Counter()
    evicted = 0
    for seed in range(100):
        sim = Simulation(seed)
        records = sim.run()
        seen.update({record["op"] for record in records})
        seen.update({"restarted": sim.life > 0, "wire": sim.settings.wire, "rescued": any(map(rescued, records))})
        evicted += sim.driver.memory.replay.tail > 0
    rare = {op: num for op, num in seen.items() if num < 5}
    assert not rare
    assert {"duplicate", "refused", "sealed", "dead", "hung", "quarantined", "committed", "acked"} <= seen.keys()
    assert evicted >= 10


def rescued(record: dict[str, object]) -> bool:
    return bool(record.get("rescued"))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """The simulation finds what breaks a promise; the audit finds, from the history alone, what leaves traces."""
    bug = BUGS[name]
    missing = {"simulation", "audit"} if bug.rules else {"simulation"}
    for seed in range(BUG_SEEDS):
        broken, found = failures(seed, bug.parts, bug.flags)
        if broken is not None:
            assert broken.split()[0] in bug.promises.split(), f"seed {seed}: {broken}"
            missing.discard("simulation")
        rules = {line.split(":")[0] for line in found}
        if rules & set(bug.rules.split()):
            missing.discard("audit")
        if not missing:
            return
    pytest.fail(f"{missing} did not find it")
