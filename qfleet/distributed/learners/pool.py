"""The learners beside the driver's: started, polled, drained of outstanding replies, and restarted when lost."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qfleet.distributed.learners.env_reports import EnvReports
from qfleet.distributed.learners.launcher import LearnerLauncher
from qfleet.distributed.learners.messages import GroupJoined, Learned
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.plan.schema import Plan
from qfleet.system.restart_budget import RestartBudget
from qfleet.system.worker_errors import WorkerFailed, WorkerLost, raise_usage_error

WINDOW_SECONDS = 600.0
START_SECONDS = 120.0
GRACE_SECONDS = 5.0


@dataclass(eq=False)
class LearnerPool:
    """Learner workers 1, 2, ... of a run; the driver's own learner is number 0 and not among them."""

    plan: Plan
    launcher: LearnerLauncher
    env_reports: EnvReports
    on_removed: Callable[[WorkerHandle], None]
    handles: dict[int, WorkerHandle] = field(default_factory=dict)
    num_learners: int = 1  # the driver's included
    num_lost: int = 0
    started: bool = False  # is the first set of learners ready?
    events: list[dict[str, Any]] = field(default_factory=list)
    inexact: set[tuple[int, str]] = field(default_factory=set)  # `bundle_inexact` events that were logged

    def __post_init__(self) -> None:
        self.budget = RestartBudget(self.plan.learners.restarts, WINDOW_SECONDS)
        # How long a reply may take from a learner that itself waits for others.
        self.reply_timeout_seconds = self.plan.learners.timeout_seconds + GRACE_SECONDS

    def ready(self) -> list[WorkerHandle]:
        """Handles of the learners that have started."""
        return [handle for handle in self.handles.values() if handle.ready]

    def log_event(self, kind: str, **fields: Any) -> None:
        """Keep an event for the run's log."""
        self.events.append({"kind": kind, **fields})

    def log_inexact(self, handle: WorkerHandle, reason: str) -> None:
        """Log once why the seed does not determine what this actor-learner does."""
        if (handle.number, reason) not in self.inexact:
            self.inexact.add((handle.number, reason))
            self.log_event("bundle_inexact", learner=handle.number, what=reason)

    def resize(self, num: int) -> None:
        """Set the number of learners: start missing ones, stop surplus ones at once."""
        for number in range(num, self.num_learners):
            if (handle := self.handles.pop(number, None)) is not None:
                self.on_removed(handle)
                handle.stop()
                self.log_event("learner_left", learner=number)
        for number in range(self.num_learners, num):
            self.start(number)
        self.num_learners = num

    def start(self, number: int) -> None:
        """Start a learner; it joins when it is ready. Restarted ones are not seeded: each incarnation is random."""
        incarnation = 1 + secrets.randbelow(2**31) if self.started else 0
        self.handles[number] = self.launcher.launch(number, incarnation)

    def check(self) -> None:
        """Note which learners are ready, and restart lost ones."""
        for handle in list(self.handles.values()):
            try:
                handle.check()
            except WorkerLost as cause:
                self.lose(handle, cause)

    def await_ready(self) -> None:
        """Wait until every learner has started, at most START_SECONDS; one that comes later joins later."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and len(self.ready()) < len(self.handles):
            for handle in list(self.handles.values()):
                if not handle.ready:
                    handle.transport.poll(0.05)
            self.check()

    def drain(self, handles: list[WorkerHandle], observed: str = "", since: float | None = None) -> None:
        """Receive outstanding replies to requests sent until `since`; a learner that does not reply in time is lost.

        `observed` is what the failed operation of the group said.
        """
        now = time.monotonic()
        until = max((now if since is None else since) + self.reply_timeout_seconds, now + GRACE_SECONDS)
        for handle in handles:
            try:
                for reply, _ in handle.drain(max(0.0, until - time.monotonic())):
                    if isinstance(reply, GroupJoined | Learned) and reply.report is not None:
                        self.env_reports.add(reply.report)
            except WorkerLost as cause:
                self.lose(handle, cause, observed)

    def lose(self, handle: WorkerHandle, cause: WorkerLost, observed: str = "", *, restart: bool = True) -> None:
        """Stop a lost learner, and start another in its place if the budget allows."""
        number = handle.number
        if self.handles.get(number) is not handle:
            return
        self.num_lost += 1
        handle.stop()
        del self.handles[number]
        self.on_removed(handle)
        if isinstance(cause, WorkerFailed):
            raise_usage_error(cause.report)
        restart = restart and self.launcher.replaces and self.budget.charge(time.monotonic())
        what = f"{observed}; {cause}" if observed else str(cause)
        self.log_event("learner_lost", learner=number, what=what, replaced=restart)
        if restart:
            self.start(number)

    def give_up(self, cause: WorkerLost) -> None:
        """Stop all learners for good: their group failed too often."""
        self.log_event("learners_given_up", what=str(cause))
        for handle in list(self.handles.values()):
            self.lose(handle, cause, restart=False)

    def close(self) -> None:
        """Stop all learners."""
        for handle in self.handles.values():
            handle.stop()
        self.handles.clear()
