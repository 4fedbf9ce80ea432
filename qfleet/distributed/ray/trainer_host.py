"""The Ray actor in which the trainer of a run lives, and its messages from and to the driver."""

import traceback
from pathlib import Path
from typing import Any

import msgspec

from qfleet.build.make import UserParts
from qfleet.distributed.local_run import resume_here, train_here
from qfleet.distributed.ray.relay import WatcherRelay
from qfleet.distributed.ray.rpc import LearnerEndpoint, RolloutMessage
from qfleet.errors import QfleetError
from qfleet.plan.schema import Plan
from qfleet.training.process.signals import StopRequest


class TrainTask(msgspec.Struct):
    """The run to train or resume."""

    plan: Plan
    path: str  # the run to resume, or the directory for a new one
    fresh: bool
    name: str | None = None
    weights_from: str | None = None
    command: list[str] | None = None
    notes: list[str] = []  # changes to the plan of a resumed run
    strict: bool = False


class TrainResult(msgspec.Struct):
    """The result of a run: its directory, or the parts of an error."""

    path: str = ""
    error: tuple[str, str, str, str] | None = None  # class, what, why, fix
    trace: str = ""


class TrainerHost:
    """The process of the trainer; called from many threads."""

    def __init__(self) -> None:
        self.endpoint = LearnerEndpoint()
        self.stop_request = StopRequest()
        self.relay = WatcherRelay()

    def ready(self) -> bool:
        """Has the process started?"""
        return True

    def run(self, task: bytes, user_parts: UserParts) -> bytes:
        """Train or resume; returns the encoded TrainResult."""
        try:
            result = TrainResult(str(self.train_or_resume(msgspec.json.decode(task, type=TrainTask), user_parts)))
        except QfleetError as error:
            result = TrainResult(error=(type(error).__name__, error.what, error.why, error.fix))
        except BaseException as error:
            result = TrainResult(error=("", f"{type(error).__name__}: {error}", "", ""), trace=traceback.format_exc())
        return msgspec.json.encode(result)

    def train_or_resume(self, task: TrainTask, user_parts: UserParts) -> Path:
        """Train or resume as in a local run; returns the run directory."""
        here: dict[str, Any] = {"watcher": self.relay, "callbacks": [self.relay.call]}
        here |= {"endpoint": self.endpoint, "stop_request": self.stop_request}
        folder = Path(task.path)
        if not task.fresh:
            resume_here(task.plan, user_parts, folder, notes=task.notes, strict=task.strict, **here)
            return folder
        source = None if task.weights_from is None else Path(task.weights_from)
        return train_here(
            task.plan, user_parts, out=folder, name=task.name, source=source, command=task.command, **here
        )[0]

    def receive_rollout(self, worker: int, incarnation: int, *message: Any) -> tuple[Any, ...]:
        """Receive a message of an actor."""
        return tuple(self.endpoint.receive(worker, incarnation, RolloutMessage(*message)))

    def weights(self, newer_than: int) -> Any:
        """The version and place of the newest weights, if newer."""
        return self.endpoint.weights(newer_than)

    def request_stop(self, signal: str) -> None:
        """Pass on a signal that the driver received."""
        self.stop_request.name = self.stop_request.name or signal

    def stop_by_callback(self) -> None:
        """Stop the run, because a callback of the driver returned True."""
        self.relay.stop_requested = True

    def fail_by_callback(self, what: str) -> None:
        """Fail the run, because a callback of the driver raised."""
        self.relay.callback_error = what

    def news(self, num_received: int) -> bytes:
        """The items that the driver has not received yet."""
        return self.relay.news_since(num_received)
