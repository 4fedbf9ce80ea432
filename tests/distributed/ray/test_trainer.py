"""The trainer as a worker of the driver, without Ray: what it replies, and what the driver does with it."""

import errno
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qfleet.build.custom_parts import NO_CUSTOM_PARTS
from qfleet.data.wire_format import Arrays, Message, Parts, to_bytes, unpack
from qfleet.distributed.ray.messages import GetNews, RequestStop, RunDone, RunFailed, TrainTask
from qfleet.distributed.ray.relay import RelayReader
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.messages import Failed
from qfleet.errors import EnvError, QfleetError, UsageError
from qfleet.plan import make_plan
from qfleet.system.worker_errors import WorkerDied, WorkerLost
from qfleet.training.process.signals import StopRequest

pytest.importorskip("ray")

from qfleet.distributed.ray import driver, trainer_host
from qfleet.distributed.ray.trainer_host import TrainerHost, TrainerWorker
from qfleet.distributed.ray.worker import PROCESS_ENDED

TASK = TrainTask(make_plan("CartPole-v1", overrides={"runtime.type": "ray"}), "runs", fresh=True, notes=("a note",))


@pytest.fixture(autouse=True)
def no_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_host, "NEWS_SECONDS", 0.001)
    monkeypatch.setattr(driver, "POLL_SECONDS", 0.001)


def trained(end: Callable[[], Path]) -> TrainerWorker:
    """A trainer whose run ends like this."""
    worker = TrainerWorker()
    worker.train_or_resume = lambda task, custom_parts, callbacks: end()  # type: ignore[method-assign]
    worker.train(TASK, NO_CUSTOM_PARTS)
    return worker


def raising(error: BaseException) -> Callable[[], Path]:
    def end() -> Path:
        raise error

    return end


# In the trainer's process


def test_a_task_travels_as_a_checked_message() -> None:
    found, _ = unpack(to_bytes(TASK), TrainTask, limit_bytes=1 << 20)
    assert found == TASK
    assert found.plan == TASK.plan


def test_the_result_of_a_run_is_its_directory_or_its_error() -> None:
    assert trained(lambda: Path("runs/a")).result == RunDone("runs/a")
    assert trained(raising(EnvError("what", "why", "fix"))).result == RunFailed("EnvError", "what", "why", "fix")
    strange = trained(raising(SystemExit(3))).result
    assert isinstance(strange, RunFailed)
    assert (strange.error, strange.what) == ("", "SystemExit: 3")
    assert "Traceback" in strange.trace


def test_news_have_the_result_once_the_run_is_over() -> None:
    worker = TrainerWorker()
    worker.relay.row({"n": 1})
    news = worker.handle(GetNews(0))
    assert news is not None
    assert ([item.row for item in news.items], news.result) == ([{"n": 1}], None)
    worker.train_or_resume = lambda task, custom_parts, callbacks: Path("runs/a")  # type: ignore[method-assign]
    worker.train(TASK, NO_CUSTOM_PARTS)
    again = worker.handle(GetNews(1))
    assert again is not None
    assert (again.first, again.items, again.result) == (1, [], RunDone("runs/a"))


def test_the_first_signal_is_kept() -> None:
    worker = TrainerWorker()
    assert worker.handle(RequestStop("SIGINT")) is None
    worker.handle(RequestStop("SIGTERM"))
    assert worker.stop_request.name == "SIGINT"


def test_a_message_of_another_kind_is_refused() -> None:
    host = TrainerHost()
    failed, _ = unpack(host.handle(to_bytes(TASK)), Failed, limit_bytes=1 << 16)
    assert "table" in failed.report.what
    assert host.handle(to_bytes(RequestStop("SIGINT"))) == b""


# In the driver's process


class FakeTrainer:
    """A connection to a trainer in this process, whose run does one step with every request for news."""

    def __init__(self, *steps: Callable[[TrainerWorker], object]) -> None:
        self.worker = TrainerWorker()
        self.steps = deque(steps)
        self.replies: deque[Parts] = deque()
        self.received: list[Message] = []
        self.dead = False

    def send(self, message: Any, arrays: Arrays | None = None) -> None:
        self.received.append(message)
        if isinstance(message, GetNews) and self.steps:
            self.steps.popleft()(self.worker)
        if (reply := self.worker.handle(message)) is not None:
            self.replies.append((reply, {}))

    def receive(self, timeout_seconds: float) -> Parts | None:
        return self.replies.popleft() if self.replies and not self.dead else None

    def poll(self, timeout_seconds: float) -> bool:
        return bool(self.replies)

    def close(self) -> None:
        pass

    def is_alive(self) -> bool:
        return not self.dead

    def is_pending(self) -> bool:
        return False

    def why_lost(self) -> WorkerLost:
        return WorkerDied(PROCESS_ENDED + "The actor died unexpectedly.")

    def request_stop(self) -> None:
        pass

    def stop(self) -> None:
        self.dead = True

    def handle(self, ready: bool = True) -> WorkerHandle:
        handle = WorkerHandle(0, self, self, start_seconds=1.0)
        handle.ready = ready
        return handle


def row(number: int) -> Callable[[TrainerWorker], object]:
    return lambda worker: worker.relay.call({"n": number})


def end(worker: TrainerWorker) -> None:
    worker.result = RunDone("runs/a")
    worker.over.set()


def test_the_driver_delivers_all_rows_and_returns_the_result() -> None:
    rows: list[int] = []
    fake = FakeTrainer(row(1), row(2), lambda worker: (row(3)(worker), end(worker)))
    reader = RelayReader(None, [lambda row: rows.append(row["n"])])
    assert driver.wait_for_result(fake.handle(), reader, StopRequest()) == RunDone("runs/a")
    assert rows == [1, 2, 3]


def test_a_signal_is_passed_on_once() -> None:
    request = StopRequest()
    request.name = "SIGINT"
    fake = FakeTrainer(row(1), row(2), row(3), end)
    driver.wait_for_result(fake.handle(), RelayReader(None, []), request)
    assert [message for message in fake.received if isinstance(message, RequestStop)] == [RequestStop("SIGINT")]
    assert fake.worker.stop_request.name == "SIGINT"


def test_a_callback_stops_the_run() -> None:
    fake = FakeTrainer(row(1), row(2), end)
    driver.wait_for_result(fake.handle(), RelayReader(None, [lambda row: row["n"] == 1]), StopRequest())
    assert fake.worker.relay.stop_requested


def test_if_a_callback_raises_the_run_fails_before_the_command_ends() -> None:
    def broken(row: Any) -> None:
        raise ZeroDivisionError("the callback broke")

    fake = FakeTrainer(row(1), lambda worker: None, end)
    with pytest.raises(ZeroDivisionError, match="the callback broke"):
        driver.wait_for_result(fake.handle(), RelayReader(None, [broken]), StopRequest())
    assert fake.worker.relay.callback_error == "ZeroDivisionError: the callback broke"
    assert not fake.steps  # it waited for the end


def test_a_lost_trainer_is_reported_with_what_ray_said() -> None:
    fake = FakeTrainer(row(1))
    reader = RelayReader(None, [])
    reader.run = "a-run"
    handle = fake.handle()
    fake.dead = True
    with pytest.raises(QfleetError, match="has ended unexpectedly") as raised:
        driver.wait_for_result(handle, reader, StopRequest())
    assert raised.value.why == "Ray said: The actor died unexpectedly."
    assert "resume a-run" in raised.value.fix
    assert raised.value.exit_code == 1


def test_a_trainer_that_does_not_start_is_a_usage_error() -> None:
    fake = FakeTrainer()
    fake.dead = True
    with pytest.raises(UsageError, match="did not start the learner on this node") as raised:
        driver.wait_until_ready(fake.handle(ready=False), driver.ray_of(TASK.plan))
    assert "The actor died unexpectedly." in raised.value.why
    assert "runtime.learner_cpus" in raised.value.fix


def test_a_full_disk_is_the_same_error_as_elsewhere() -> None:
    """The command line turns such an error into a StorageError, exit code 5."""
    from qfleet.cli.output import STORAGE_ERRNOS

    full = OSError(errno.ENOSPC, "No space left on device", "/data/runs/x/metrics.jsonl")
    result = trainer_host.failed_run(full, "Traceback ...")
    error = driver.as_error(unpack(to_bytes(result), RunFailed, limit_bytes=1 << 16)[0])
    assert isinstance(error, OSError)
    assert error.errno in STORAGE_ERRNOS
    assert (error.strerror, error.filename) == ("No space left on device", "/data/runs/x/metrics.jsonl")
    assert isinstance(driver.as_error(trainer_host.failed_run(ValueError("x"), "trace")), RuntimeError)
