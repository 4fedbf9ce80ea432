"""Faults of environments, actors and learners: an event for each, a warning where the user should know."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qfleet.build.components import Components
from qfleet.plan.validate.placement import num_senders
from qfleet.training.train_state import TrainState
from qfleet.watch import EventLog

# Events among learners after which no seed decides this run.
INEXACT_EVENTS = {
    "learner_lost": "a learner was lost",
    "group_failed": "the group of learners was formed anew",
    "bundle_inexact": "a learner's own environments or replay did not come back",
}

Row = dict[str, Any]


@dataclass
class FaultLog:
    """Records faults; `warn` shows a text on the screen and in the events, once."""

    components: Components
    train_state: TrainState
    events: EventLog
    warn: Callable[[str], object]

    def env_fault(self, fault: Row) -> None:
        """Record that an environment failed and is made anew; warn if it is given up."""
        fields = {"fault" if name == "kind" else name: value for name, value in fault.items()}
        self.events.event("env_fault", env_steps=self.components.steps, **fields)
        if fault["quarantined"]:
            lanes = ", ".join(map(str, fault["quarantined"]))
            actor = f"actor {fault['actor']}, " if "actor" in fault else ""  # each counts its own environments
            cause = f"failed more often than env.rebuilds and is given up: {fault['what']}"
            self.warn(f"{actor}environment {lanes} {cause}")

    def actor_event(self, kind: str, **fields: Any) -> None:
        """Record that an actor was lost, came back or is slow; warn of what only the user can mend."""
        self.events.event(kind, **fields)
        if kind == "actor_slow":
            self.warn(f"actor {fields['worker']} brings in {fields['share']:.0%} of what the others do")
        if kind == "actor_waiting":
            self.warn(f"actor {fields['worker']} waits for a node with free CPUs (runtime.actor_cpus); the run goes on")
        if kind == "actor_lost" and fields["restart_seconds"] is None:
            self.given_up(
                f"actor {fields['worker']}", num_senders(self.components.plan), "runtime.restarts", fields["words"]
            )

    def learner_event(self, event: Row) -> None:
        """Record that a learner joined, left or was lost; warn of what is lost."""
        kind = event["kind"]
        fields = {name: value for name, value in event.items() if name != "kind"}
        self.events.event(kind, env_steps=self.components.steps, **fields)
        if kind == "learner_lost":
            self.learner_lost(event)
        if kind == "learner_slow":
            self.warn(f"learner {event['learner']} is much slower than the fastest one (learners.balance)")
        if kind == "codec_given_up":
            found = f"what comes through points elsewhere (cosine {event['cosine']:g})"
            self.warn(f"sync.codec is given up, nothing is compressed any more: {found}")
        if kind == "group_failed":
            self.warn(f"the group of learners is formed anew: {event['what']}")
        if kind == "bundle_inexact":
            self.warn(f"not exact: learner {event['learner']}: {event['what']}")

    def learner_lost(self, event: Row) -> None:
        """Warn that a learner was lost; whether another one replaces it depends on the restart budget."""
        name = f"learner {event['learner']}"
        if event["replaced"]:
            self.warn(f"{name} is lost: {event['what']}; another one is started")
        else:
            self.given_up(name, self.components.plan.learners.num, "learners.restarts", event["what"])

    def given_up(self, name: str, num: int, limit: str, cause: str) -> None:
        """Warn that a worker failed more often than `limit` allows, and keep it for the final status."""
        cause = cause or "it did not say why"
        text = f"{name} (of {num}) was lost for good at step {self.components.steps}: {cause}"
        self.train_state.add_lost(text)
        self.warn(f"{text}; it is not started again ({limit}), and the run goes on without it")

    def drain_learner_events(self) -> None:
        """Record what happened to learners since the last call; a run that lost one is not exact."""
        if error := getattr(self.components.learner, "not_compiled", ""):
            reason = f"the update could not be compiled and is made step by step, with other last digits ({error})"
            self.warn(f"not exact: {reason}")
            self.train_state.mark_inexact(reason)
        peers = self.components.peers
        for event in peers.take_events() if peers is not None else ():
            self.learner_event(event)
            if event["kind"] in INEXACT_EVENTS:
                self.train_state.mark_inexact(f"{INEXACT_EVENTS[event['kind']]}: {event['what']}")
