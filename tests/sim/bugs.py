"""Planted bugs: each breaks one promise; the simulation must find it, and the audit where it leaves traces."""

from dataclasses import dataclass, replace
from typing import Any

from qfleet.data import State
from qfleet.distributed.worker.ledger import Ledger, Source, Verdict
from qfleet.distributed.worker.supervisor import FaultKind, Supervisor, WorkerFault
from qfleet.learn.rate_limiter import RateLimiter
from qfleet.system.restart_budget import RestartBudget
from tests.sim.driver import Parts


class AcceptsTwice(Ledger):
    """No de-duplication."""

    def admit(self, source: Source, steps: int = 0) -> Verdict:
        verdict = super().admit(source, steps)
        if verdict == "duplicate":
            self.steps[source[0]] += steps
            return "accept"
        return verdict


class AcceptsOldIncarnations(Ledger):
    """Accepts rollouts of old incarnations."""

    def admit(self, source: Source, steps: int = 0) -> Verdict:
        worker, incarnation, _ = source
        if 0 <= incarnation < self.incarnations[worker]:
            self.steps[worker] += steps
            return "accept"
        return super().admit(source, steps)


class SkipsGaps(Ledger):
    """Accepts a rollout after a gap, so that the missing one is lost."""

    def admit(self, source: Source, steps: int = 0) -> Verdict:
        worker, incarnation, sequence = source
        if self.is_current(worker, incarnation):
            self.sequences[worker] = max(self.sequences[worker], sequence)
        return super().admit(source, steps)


class ForgetsAtRestart(Ledger):
    """Forgets the accepted rollouts at a restart."""

    def load_state_dict(self, state: State) -> None:
        pass


class CountsHalf(RateLimiter):
    """Every second update is not counted, so twice as many are made."""

    def count_update(self) -> None:
        self.skip = not getattr(self, "skip", False)
        self.updates += not self.skip


class IgnoresTheStart(RateLimiter):
    """Learns from the first step on."""

    def allowed_updates(self, steps: int) -> int:
        return int(self.ratio * steps)


class NeverHung(Supervisor):
    """Finds no hung worker."""

    def check(self, worker: int, now: float, *, alive: bool, progress: int) -> WorkerFault | None:
        return super().check(worker, now, alive=alive, progress=self.records[worker].progress + 1)


class NeverDead(Supervisor):
    """Finds no dead worker."""

    def check(self, worker: int, now: float, *, alive: bool, progress: int) -> WorkerFault | None:
        return None


class Hasty(Supervisor):
    """Takes slow workers for hung."""

    def check(self, worker: int, now: float, *, alive: bool, progress: int) -> WorkerFault | None:
        self.hung_seconds = self.start_seconds = 0.3
        return super().check(worker, now, alive=alive, progress=progress)


class NoBudget(Supervisor):
    """Restarts without a limit."""

    def record_fault(self, worker: int, now: float, kind: FaultKind) -> WorkerFault:
        self.records[worker].budget = RestartBudget(self.restarts)
        return super().record_fault(worker, now, kind)


class Slow(Supervisor):
    """Waits far too long before a restart."""

    def record_fault(self, worker: int, now: float, kind: FaultKind) -> WorkerFault:
        fault = super().record_fault(worker, now, kind)
        self.records[worker].due_at = now + 40.0
        return replace(fault, delay_seconds=None if fault.delay_seconds is None else 40.0)


@dataclass(frozen=True)
class Bug:
    """What is planted; the promises whose breach the simulation may report, and the rules the audit may."""

    promises: str
    rules: str
    parts: Parts | None = None
    flags: frozenset[str] = frozenset()


def flag(name: str) -> dict[str, Any]:
    """A bug in the simulated code itself."""
    return {"flags": frozenset({name})}


# No rules: it leaves no traces in the history.
BUGS = {
    "no de-duplication": Bug("I3", "twice", Parts(ledger=AcceptsTwice)),
    "accepts old incarnations": Bug("I3 I4", "incarnation", Parts(ledger=AcceptsOldIncarnations)),
    "accepts lost workers": Bug("I4", "incarnation", **flag("open channels")),
    "skips gaps": Bug("I4", "gap", Parts(ledger=SkipsGaps)),
    "a restart forgets the ledger": Bug("I3", "", Parts(ledger=ForgetsAtRestart)),
    "no seal": Bug("I4", "seal", **flag("no seal")),
    "a seal that does nothing": Bug("I4", "", **flag("seal only noted")),
    "the rate limiter counts half": Bug("I7", "ratio", Parts(limiter=CountsHalf)),
    "the rate limiter ignores the start": Bug("I7", "ratio", Parts(limiter=IgnoresTheStart)),
    "no band": Bug("I7", "band", **flag("no band")),
    "a lost reply makes a new id": Bug("I3 I8", "", **flag("new id")),
    "never hung": Bug("I8 I9", "silent", Parts(supervisor=NeverHung)),
    "never dead": Bug("I8 I9", "silent", Parts(supervisor=NeverDead)),
    "hasty": Bug("I9", "", Parts(supervisor=Hasty)),
    "no budget": Bug("I8", "budget", Parts(supervisor=NoBudget)),
    "replaced late": Bug("I9", "late", Parts(supervisor=Slow)),
    "an actor takes an old version": Bug("I6", "version", **flag("old version")),
    "a version is published twice": Bug("I6", "version", **flag("published twice")),
}
