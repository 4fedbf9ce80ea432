"""The process on Ray in which the trainer of a run lives: it also handles messages of the driver and of actors."""

import os
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from qfleet.build.custom_parts import CustomParts, unpack_parts
from qfleet.data.wire_format import to_bytes, unpack
from qfleet.distributed.local_run import resume_here, train_here
from qfleet.distributed.ray import messages
from qfleet.distributed.ray.relay import WatcherRelay
from qfleet.distributed.ray.rpc import LearnerEndpoint
from qfleet.distributed.worker.messages import Failed, Ready
from qfleet.distributed.worker.transport import MAX_MESSAGE_BYTES
from qfleet.errors import QfleetError
from qfleet.system.worker_process import final_error_of
from qfleet.training.callbacks import Callback
from qfleet.training.process.signals import StopRequest

NEWS_SECONDS = 0.25  # between two replies with news
IDLE_SECONDS = 1.0


class TrainerWorker:
    """The trainer of a run, and what the driver can ask of it meanwhile; its methods are called from many threads."""

    def __init__(self) -> None:
        self.endpoint = LearnerEndpoint()
        self.stop_request = StopRequest()
        self.relay = WatcherRelay()
        self.result: messages.RunResult | None = None
        self.over = threading.Event()

    def train(self, task: messages.TrainTask, custom_parts: CustomParts, callbacks: Sequence[Callback] = ()) -> None:
        """Train or resume to the end, and keep the result."""
        try:
            self.result = messages.RunDone(str(self.train_or_resume(task, custom_parts, callbacks)))
        except QfleetError as error:
            self.result = messages.RunFailed(type(error).__name__, error.what, error.why, error.fix)
        except BaseException as error:
            self.result = failed_run(error, traceback.format_exc())
        self.over.set()

    def train_or_resume(
        self, task: messages.TrainTask, custom_parts: CustomParts, callbacks: Sequence[Callback]
    ) -> Path:
        """Train or resume as in a local run; returns the run directory."""
        here: dict[str, Any] = {"watcher": self.relay, "callbacks": [self.relay.call, *callbacks]}
        here |= {"endpoint": self.endpoint, "stop_request": self.stop_request}
        folder = Path(task.path)
        if not task.fresh:
            resume_here(
                task.plan,
                custom_parts,
                folder,
                notes=task.notes,
                changed_parts=task.changed_parts,
                strict=task.strict,
                **here,
            )
            return folder
        source = None if task.weights_from is None else Path(task.weights_from)
        return train_here(
            task.plan, custom_parts, out=folder, name=task.name, source=source, command=task.command, **here
        )[0]

    def handle(self, message: messages.TrainerRequest) -> messages.News | None:
        """Handle a message of the driver; only a request for news has a reply."""
        match message:
            case messages.GetNews(num_received):
                return self.news_since(num_received)
            case messages.RequestStop(signal):
                self.stop_request.name = self.stop_request.name or signal
            case messages.StopByCallback():
                self.relay.stop_requested = True
            case messages.FailByCallback(what):
                self.relay.callback_error = what
        return None

    def news_since(self, num_received: int) -> messages.News:
        """The items that the driver has not received yet, after NEWS_SECONDS or at the end of the run."""
        self.over.wait(NEWS_SECONDS)
        result = self.result  # read first: then no item comes after it
        return msgspec.structs.replace(self.relay.news_since(num_received), result=result)


def failed_run(error: BaseException, trace: str) -> messages.RunFailed:
    """The message for an error that is none of qfleet's own; one of the system keeps its number."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno:
        file = None if error.filename is None else os.fsdecode(error.filename)
        return messages.RunFailed("", error.strerror or what, trace=trace, errno=error.errno, file=file)
    return messages.RunFailed("", what, trace=trace)


class TrainerHost:
    """The Ray actor of the trainer; called from many threads, by the driver and by actors."""

    def __init__(self) -> None:
        self.trainer = TrainerWorker()

    def start(self) -> bytes:
        """The process has started."""
        return to_bytes(Ready())

    def run(self, task: bytes, custom_parts: bytes, callbacks: Sequence[Callback] = ()) -> None:
        """Train; never returns, so that the driver notices the end of the process, and kills it at the end."""
        found = unpack(task, messages.TrainTask, limit_bytes=MAX_MESSAGE_BYTES)[0]
        self.trainer.train(found, unpack_parts(custom_parts), callbacks)
        while True:
            time.sleep(IDLE_SECONDS)

    def handle(self, message: bytes) -> bytes:
        """Handle a message of the driver; returns the packed reply, if it has one."""
        try:
            reply = self.trainer.handle(unpack(message, messages.TrainerRequest, limit_bytes=MAX_MESSAGE_BYTES)[0])
        except Exception as error:
            return to_bytes(Failed(final_error_of(error)))
        return b"" if reply is None else to_bytes(reply)

    def receive_rollout(self, report: bytes, rollout: bytes) -> bytes:
        """Receive a report of an actor, and a rollout if there is one."""
        return self.trainer.endpoint.receive_packed(report, rollout)

    def weights(self, newer_than: int) -> Any:
        """The version and place of the newest weights, if newer."""
        return self.trainer.endpoint.weights(newer_than)
