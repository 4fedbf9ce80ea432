"""Where a run's time goes and what its learner is doing, as fields of rows and of status.json."""

from typing import Any

from qfleet.build.components import Components
from qfleet.learn import ReplaySource
from qfleet.system.cores import usable_cores
from qfleet.system.timers import Stopwatch
from qfleet.training.log.energy import EnergyMeter
from qfleet.watch import profile_of, rounded, shares_of, times_between, with_other

ACTOR_TIMES = ("env_ns", "infer_ns", "sync_ns", "wait_ns")  # what actors count; `wait` is for room in the queue
WAITING_SHARE = 0.5  # of the time idle, and the learner counts as waiting


class RunTimes:
    """The stopwatch of this process, the times of remote actors, and the marks that shares are counted from."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.stopwatch = Stopwatch()
        self.meter = EnergyMeter()
        self.first = (components.steps, components.learner.updates)
        self.mark = self.stopwatch.read()
        self.actor_mark = self.actor_times()

    def actor_times(self) -> dict[str, int]:
        """Nanoseconds of remote actors, by stage."""
        actors = self.components.remote_actors
        if actors is None:
            return {}
        counts = actors.counts()
        return {name.removesuffix("_ns"): counts[name] for name in ACTOR_TIMES}

    def savings(self) -> dict[str, dict[str, float]]:
        """What compression has saved and cost, where there is any: `rollouts` in flight, frames in the `replay`."""
        found: dict[str, dict[str, float]] = {}
        actors = self.components.remote_actors
        counts = {} if actors is None else actors.counts()
        if counts.get("raw_bytes"):
            found["rollouts"] = saving(counts["raw_bytes"], counts["sent_bytes"], counts["pack_ns"] / 1e9)
        if (kept := self.components.batch_source.replay.store.compression_savings()) is not None:
            seconds = kept.pack_seconds + kept.unpack_seconds
            found["replay"] = saving(kept.raw_bytes, kept.packed_bytes, seconds)
        return found

    def state(self) -> dict[str, str]:
        """What the learner is doing, and how many actors work, of all: 2/2."""
        actors = self.components.remote_actors
        working = "1/1" if actors is None else f"{actors.num_working()}/{actors.workers}"
        return {"gate": self.learner_state(), "actors": working}

    def learner_state(self) -> str:
        """`filling` before there is enough to learn from, `waiting` for experience, or `learning`."""
        batch_source = self.components.batch_source
        if not self.components.learner.updates or (isinstance(batch_source, ReplaySource) and batch_source.refill):
            return "filling"
        spent = times_between(self.stopwatch.read(), self.mark)
        return "waiting" if spent["idle"] > WAITING_SHARE * spent["wall"] else "learning"

    def take_shares(self) -> dict[str, dict[str, float]]:
        """Each stage's share of the time since the last call."""
        now = self.stopwatch.read()
        actor_times = self.actor_times()
        spent = with_other(times_between(now, self.mark))
        there = times_between(actor_times, self.actor_mark)
        self.mark = now
        self.actor_mark = actor_times
        elsewhere = {"actor_stages": rounded(shares_of(there))} if there else {}
        return {"stages": rounded(shares_of(spent)), **elsewhere}

    def profile(self) -> dict[str, Any]:
        """The whole time so far, and what it means."""
        steps, updates = self.first
        actors = self.components.remote_actors
        lost = 0 if actors is None else actors.num_given_up()
        found = profile_of(
            self.stopwatch.read(),
            self.actor_times(),
            self.components.plan,
            env_steps=max(0, self.components.steps - steps),
            updates=max(0, self.components.learner.updates - updates),
            cores=usable_cores(),
            joules=self.meter.joules(),
            savings=self.savings(),
        )
        return {**found, "actors_lost": lost} if lost else found


def saving(raw_bytes: int, packed_bytes: int, seconds: float) -> dict[str, float]:
    """The fields of a profile."""
    return {"raw_bytes": raw_bytes, "packed_bytes": packed_bytes, "seconds": round(seconds, 3)}
