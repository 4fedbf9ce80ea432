"""Where a run's time goes, and what its learner is doing: the fields of rows and of status.json that tell."""

from typing import Any

from qfleet.build.components import Components
from qfleet.learn import ReplaySource
from qfleet.system.timers import Stopwatch
from qfleet.watch import Meter, cores, profile_of, rounded, shares_of, since, with_other

ACTOR_TIMES = ("env_ns", "infer_ns", "sync_ns", "wait_ns")  # what actors count; `wait` is for room
WAITING = 0.5  # of the time without anything to learn from, and the learner counts as waiting


class RunTimes:
    """The stopwatch of this process, the gauges of actors elsewhere, and the marks that shares are counted from."""

    def __init__(self, line: Components) -> None:
        self.line = line
        self.watch = Stopwatch()
        self.meter = Meter()
        self.first = (line.steps, line.learner.updates)
        self.mark, self.actor_mark = self.watch.read(), self.actors()

    def actors(self) -> dict[str, int]:
        """Nanoseconds of actors that live elsewhere."""
        actors = self.line.remote_actors
        if actors is None:
            return {}
        counts = actors.counts()
        return {name.removesuffix("_ns"): counts[name] for name in ACTOR_TIMES}

    def savings(self) -> dict[str, dict[str, float]]:
        """What compression has saved and cost, where there is any: `rollouts` in flight, frames in the `replay`."""
        found: dict[str, dict[str, float]] = {}
        actors = self.line.remote_actors
        freight = {} if actors is None else actors.counts()
        if freight.get("raw_bytes"):
            found["rollouts"] = saving(freight["raw_bytes"], freight["sent_bytes"], freight["pack_ns"] / 1e9)
        if (kept := self.line.batch_source.replay.store.saving()) is not None:
            seconds = kept.pack_seconds + kept.unpack_seconds
            found["replay"] = saving(kept.raw_bytes, kept.packed_bytes, seconds)
        return found

    def state(self) -> dict[str, str]:
        """What the gate lets the learner do, and how many actors work."""
        return {"gate": self.limiter(), "actors": self.working()}

    def limiter(self) -> str:
        """`filling` before there is enough to learn from, `waiting` for experience, or `learning`."""
        batch_source = self.line.batch_source
        if not self.line.learner.updates or (isinstance(batch_source, ReplaySource) and batch_source.refill):
            return "filling"
        spent = since(self.watch.read(), self.mark)
        return "waiting" if spent["idle"] > WAITING * spent["wall"] else "learning"

    def working(self) -> str:
        """Actors at work, of all: 2/2."""
        actors = self.line.remote_actors
        return "1/1" if actors is None else f"{actors.num_working()}/{actors.workers}"

    def take_shares(self) -> dict[str, dict[str, float]]:
        """Each stage's share of the time since this was last asked."""
        now = self.watch.read()
        theirs = self.actors()
        spent = with_other(since(now, self.mark))
        there = since(theirs, self.actor_mark)
        self.mark = now
        self.actor_mark = theirs
        elsewhere = {"actor_stages": rounded(shares_of(there))} if there else {}
        return {"stages": rounded(shares_of(spent)), **elsewhere}

    def profile(self) -> dict[str, Any]:
        """The whole time so far, and what it means."""
        steps, updates = self.first
        actors = self.line.remote_actors
        lost = 0 if actors is None else actors.num_given_up()
        found = profile_of(
            self.watch.read(),
            self.actors(),
            self.line.plan,
            env_steps=max(0, self.line.steps - steps),
            updates=max(0, self.line.learner.updates - updates),
            cores=cores(),
            joules=self.meter.joules(),
            savings=self.savings(),
        )
        return {**found, "actors_lost": lost} if lost else found


def saving(raw_bytes: int, packed_bytes: int, seconds: float) -> dict[str, float]:
    """As profiles have it."""
    return {"raw_bytes": raw_bytes, "packed_bytes": packed_bytes, "seconds": round(seconds, 3)}
