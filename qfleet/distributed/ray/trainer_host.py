"""The process of Ray in which the course of a run goes on, and what its driver tells it and hears from it."""

import traceback
from pathlib import Path
from typing import Any

import msgspec

from qfleet.distributed.local_run import Own, resume_here, train_here
from qfleet.distributed.ray.relay import WatcherRelay
from qfleet.distributed.ray.rpc import LearnerEndpoint, RolloutMessage
from qfleet.errors import QfleetError
from qfleet.plan.schema import Plan
from qfleet.training.process.signals import StopRequest


class TrainTask(msgspec.Struct):
    """What the course is to do."""

    plan: Plan
    path: str  # the run to go on with, or the folder that a new one is made in
    fresh: bool
    name: str | None = None
    weights_from: str | None = None
    command: list[str] | None = None
    notes: list[str] = []  # what was changed in the plan of a run that goes on
    strict: bool = False


class TrainResult(msgspec.Struct):
    """How a course ended: the run's folder, or the parts of an error."""

    path: str = ""
    error: tuple[str, str, str, str] | None = None  # class, what, why, fix
    trace: str = ""


class TrainerHost:
    """The process in which the course of a run goes on; many threads call."""

    def __init__(self) -> None:
        self.desk = LearnerEndpoint()
        self.asked = StopRequest()
        self.relay = WatcherRelay()

    def ready(self) -> bool:
        """Is it there?"""
        return True

    def run(self, task: bytes, own: Own) -> bytes:
        """The whole course; answers with a result."""
        try:
            result = TrainResult(str(self.complete(msgspec.json.decode(task, type=TrainTask), own)))
        except QfleetError as error:
            result = TrainResult(error=(type(error).__name__, error.what, error.why, error.fix))
        except BaseException as error:
            result = TrainResult(error=("", f"{type(error).__name__}: {error}", "", ""), trace=traceback.format_exc())
        return msgspec.json.encode(result)

    def complete(self, task: TrainTask, own: Own) -> Path:
        """Train or resume as in any other process; returns the run's folder."""
        here: dict[str, Any] = {"watcher": self.relay, "callbacks": [self.relay.call]}
        here |= {"desk": self.desk, "asked": self.asked}
        folder = Path(task.path)
        if not task.fresh:
            resume_here(task.plan, own, folder, notes=task.notes, strict=task.strict, **here)
            return folder
        source = None if task.weights_from is None else Path(task.weights_from)
        return train_here(task.plan, own, out=folder, name=task.name, source=source, command=task.command, **here)[0]

    def put(self, worker: int, incarnation: int, *message: Any) -> tuple[Any, ...]:
        """A call of an actor."""
        return tuple(self.desk.put(worker, incarnation, RolloutMessage(*message)))

    def weights(self, newer_than: int) -> Any:
        """The newest weights' version and where they are, if they are newer."""
        return self.desk.weights(newer_than)

    def ask(self, signal: str) -> None:
        """Somebody sent the driver a signal."""
        self.asked.name = self.asked.name or signal

    def halt(self) -> None:
        """A callback has had enough."""
        self.relay.stop_asked = True

    def fail(self, what: str) -> None:
        """A callback raised: the course ends as it would beside it."""
        self.relay.failure = what

    def news(self, heard: int) -> bytes:
        """What happened since the driver had heard so much."""
        return self.relay.since(heard)
