"""The learners beside the driver's: started, polled, drained of outstanding replies, and restarted when lost."""

import secrets
import time
from collections.abc import Callable
from typing import Any

from qfleet.distributed.learners.env_reports import EnvReports
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.learners.launcher import LearnerLauncher
from qfleet.plan.schema import Plan
from qfleet.sync.comm import CommLost
from qfleet.system.restart_budget import RestartBudget

WINDOW_SECONDS = 600.0
START_SECONDS = 120.0
GRACE_SECONDS = 5.0


class LearnerPool:
    """Learner workers 1, 2, ... of a run; the driver's own learner is number 0 and not among them."""

    def __init__(
        self,
        plan: Plan,
        launcher: LearnerLauncher,
        env_reports: EnvReports,
        on_removed: Callable[[LearnerHandle], None],
    ) -> None:
        self.timeout_seconds = plan.learners.timeout_seconds
        self.launcher = launcher
        self.env_reports = env_reports
        self.on_removed = on_removed
        self.budget = RestartBudget(plan.learners.restarts, WINDOW_SECONDS)
        self.handles: dict[int, LearnerHandle] = {}
        self.num_learners = 1  # the driver's included
        self.num_lost = 0
        self.started = False  # is the first set of learners ready?
        self.events: list[dict[str, Any]] = []
        self.inexact: set[tuple[int, str]] = set()  # `actor_learner_inexact` events that were logged

    @property
    def reply_timeout_seconds(self) -> float:
        """How long a reply may take from a learner that itself waits for others."""
        return self.timeout_seconds + GRACE_SECONDS

    def ready(self) -> list[LearnerHandle]:
        """Handles of the learners that have started."""
        return [handle for handle in self.handles.values() if handle.ready]

    def log_event(self, kind: str, **fields: Any) -> None:
        """Keep an event for the run's log."""
        self.events.append({"kind": kind, **fields})

    def log_inexact(self, handle: LearnerHandle, reason: str) -> None:
        """Log once why the seed does not determine what this actor-learner does."""
        if (handle.number, reason) not in self.inexact:
            self.inexact.add((handle.number, reason))
            self.log_event("bundle_inexact", learner=handle.number, what=reason)

    def resize(self, num: int) -> None:
        """Set the number of learners: start missing ones, stop surplus ones at once."""
        for number in range(num, self.num_learners):
            if (handle := self.handles.pop(number, None)) is not None:
                self.on_removed(handle)
                handle.control.stop()
                self.log_event("learner_left", learner=number)
        for number in range(self.num_learners, num):
            self.start(number)
        self.num_learners = num

    def start(self, number: int) -> None:
        """Start a learner; it joins when it is ready. Restarted ones are not seeded: each incarnation is random."""
        incarnation = 1 + secrets.randbelow(2**31) if self.started else 0
        self.handles[number] = self.launcher.launch(number, incarnation)

    def poll(self) -> None:
        """Note which learners are ready, and restart lost ones."""
        for handle in list(self.handles.values()):
            try:
                handle.poll(time.monotonic())
            except CommLost as cause:
                self.lose(handle, str(cause))

    def await_ready(self) -> None:
        """Wait until every learner has started: a run begins with as many learners as its plan asks for."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and len(self.ready()) < len(self.handles):
            for handle in list(self.handles.values()):
                if not handle.ready:
                    handle.transport.poll(0.05)
            self.poll()

    def drain(self, handles: list[LearnerHandle], cause: str = "", since: float | None = None) -> None:
        """Receive outstanding replies to requests sent until `since`; a learner that does not reply in time is lost."""
        now = time.monotonic()
        until = max((now if since is None else since) + self.reply_timeout_seconds, now + GRACE_SECONDS)
        for handle in handles:
            try:
                for facts, _ in handle.drain(max(0.0, until - time.monotonic())):
                    if "instance_id" in facts:
                        self.env_reports.add(facts)
            except CommLost as silence:
                self.lose(handle, f"{cause}; {silence}" if cause else str(silence))

    def lose(self, handle: LearnerHandle, cause: str, *, restart: bool = True) -> None:
        """Stop a lost learner, and start another in its place if the budget allows."""
        number = handle.number
        if self.handles.get(number) is not handle:
            return
        self.num_lost += 1
        cause = handle.cause_of_loss(cause)  # before the process is stopped here
        handle.control.stop()
        del self.handles[number]
        self.on_removed(handle)
        restart = restart and self.launcher.replaces and self.budget.charge(time.monotonic())
        self.log_event("learner_lost", learner=number, what=cause, replaced=restart)
        if restart:
            self.start(number)

    def give_up(self, cause: str) -> None:
        """Stop all learners for good: their group failed too often."""
        self.log_event("learners_given_up", what=cause)
        for handle in list(self.handles.values()):
            self.lose(handle, cause, restart=False)

    def close(self) -> None:
        """Stop all learners."""
        for handle in self.handles.values():
            handle.control.stop()
        self.handles.clear()
