"""The process of Ray in which the course of a run goes on, and what its driver tells it and hears from it."""

import traceback
from typing import Any

import msgspec
from torch import nn

from qfleet.act import Explore
from qfleet.build.components import EnvMaker
from qfleet.distributed.ray.actors import DESK
from qfleet.distributed.ray.relay import Relay
from qfleet.distributed.ray.rpc import Desk, Message
from qfleet.errors import QfleetError
from qfleet.plan.schema import Plan
from qfleet.run import api
from qfleet.train.signals import Asked, given

Own = tuple[EnvMaker | None, nn.Module | None, Explore | None]


class Task(msgspec.Struct):
    """What the course is to do."""

    plan: Plan
    path: str  # the run to go on with, or the folder that a new one is made in
    fresh: bool
    name: str | None = None
    weights_from: str | None = None
    command: list[str] | None = None
    steps: int | None = None
    trust_env: bool = False
    trust_run: bool = False
    strict: bool = False


class Result(msgspec.Struct):
    """How a course ended: the run's folder, or the parts of an error."""

    path: str = ""
    error: tuple[str, str, str, str] | None = None  # class, what, why, fix
    trace: str = ""


class CourseHost:
    """The process in which the course of a run goes on; many threads call."""

    def __init__(self) -> None:
        self.desk, self.asked, self.relay = Desk(), Asked(), Relay()

    def ready(self) -> bool:
        """Is it there?"""
        return True

    def run(self, task: bytes, own: Own) -> bytes:
        """The whole course; answers with a result."""
        DESK.set(self.desk)
        given.set(self.asked)
        try:
            result = Result(str(self.complete(msgspec.json.decode(task, type=Task), own).path))
        except QfleetError as error:
            result = Result(error=(type(error).__name__, error.what, error.why, error.fix))
        except BaseException as error:
            result = Result(error=("", f"{type(error).__name__}: {error}", "", ""), trace=traceback.format_exc())
        return msgspec.json.encode(result)

    def complete(self, task: Task, own: Own) -> api.Run:
        """Train or resume, as in any other process."""
        things = dict(zip(("env", "torso", "explore"), own, strict=True))
        told: dict[str, Any] = {"watcher": self.relay, "callbacks": [self.relay.call], **things}
        if not task.fresh:
            told |= {"trust_env": task.trust_env, "trust_run": task.trust_run}
            return api.resume(task.path, steps=task.steps, strict=task.strict, **told)
        told |= {"name": task.name, "weights_from": task.weights_from, "command": task.command}
        return api.train(task.plan, out=task.path, **told)

    def put(self, worker: int, incarnation: int, *message: Any) -> tuple[Any, ...]:
        """A call of an actor."""
        return tuple(self.desk.put(worker, incarnation, Message(*message)))

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
