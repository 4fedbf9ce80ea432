"""The workers of one world: starting them, polling them, and stopping those that fail. B lanes in all."""

import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from qfleet.data import Array, Spec, Step
from qfleet.envs.workers.main import EnvWorkerTask
from qfleet.envs.workers.memory import DONE, OUTSIDE_SPACE
from qfleet.envs.workers.process import EnvWorkerProcess
from qfleet.envs.workers.reaper import Reaper

CLOSE_SECONDS = 2.0  # for closing the environments of all workers
_LOG_CHECK_SECONDS = 0.25  # how long to wait before checking the size of logs again
_MEMORY_CHECK_SECONDS = 1.0
_HARD_MEMORY_LIMIT = 1.5  # times the limit: stop the worker before its episode ends


@dataclass(frozen=True, slots=True)
class EnvFault:
    """A failure: `lanes` lost their episodes, `guilty` are charged for it, `quarantined` are not restarted."""

    kind: Literal["raised", "wrong", "hung", "died", "leaked"]
    worker: int
    lanes: tuple[int, ...]
    guilty: tuple[int, ...]
    what: str
    cause: str  # a traceback, if there is one
    seconds: float  # from the command to the detection of the failure
    quarantined: tuple[int, ...] = ()


def log_file(logs: Path, worker: int) -> Path:
    """A worker's log: `worker_0.log` in a folder, or `actor-1-worker-0.log` beside the log `actor-1.log`."""
    return logs / f"worker_{worker}.log" if logs.is_dir() else logs.with_stem(f"{logs.stem}-worker-{worker}")


class EnvWorkerPool:
    """`num_workers` processes that share the lanes of a world; a stopped one is None until `start` is called again."""

    def __init__(
        self,
        task: EnvWorkerTask,
        spec: Spec,
        num: int,
        num_workers: int,
        *,
        step_seconds: float,
        memory_bytes: float | None,
        logs: Path | None,
        clock: Callable[[], float],
    ) -> None:
        self._task = task
        self._spec = spec
        self._clock = clock
        self._step_seconds = step_seconds
        self._memory_bytes = memory_bytes
        self._logs = logs
        bounds = [num * worker // num_workers for worker in range(num_workers + 1)]
        self.lanes = [range(first, after) for first, after in pairwise(bounds)]
        self.workers: list[EnvWorkerProcess | None] = [None] * num_workers
        self._reaper = Reaper()
        self._faults: list[EnvFault] = []
        self._memory_checked_at = clock()
        self._over_memory: set[int] = set()
        self._poll = select.poll()
        self._by_descriptor = dict[int, EnvWorkerProcess]()

    def start(self, index: int) -> None:
        """Start a worker's process; `poll` notices when it is ready."""
        log = os.devnull if self._logs is None else str(log_file(self._logs, index))
        worker = EnvWorkerProcess(self._task, self._spec, len(self.lanes[index]), log, self._clock())
        self.workers[index] = worker
        self._reaper.watch(worker.process.pid)
        self._register_descriptors()

    def idle_lanes(self) -> Array:
        """Lanes [B] whose worker can execute a command."""
        self.poll(0.0)
        if self.starting():
            self.stop_overdue()
        return self._lanes_where(lambda worker: worker.state == "idle")

    def present_lanes(self) -> Array:
        """Lanes [B] whose worker is started."""
        return self._lanes_where(lambda worker: True)

    def take_faults(self) -> list[EnvFault]:
        """The failures since the last call."""
        taken = self._faults
        self._faults = []
        return taken

    def starting(self) -> bool:
        """Is a worker still starting?"""
        return any(worker is not None and worker.state == "starting" for worker in self.workers)

    def send_commands(self, command: Array, argument: Array) -> None:
        """Send the commands of the lanes [B] to every idle worker."""
        now = self._clock()
        for worker, lanes in zip(self.workers, self.lanes, strict=True):
            rows = slice(lanes.start, lanes.stop)
            if worker is not None and worker.state == "idle" and command[rows].any():
                worker.memory.command[:] = command[rows]
                worker.memory.argument[:] = argument[rows]
                worker.run_commands(now)
        # Let a worker that woke on this core run now: otherwise it waits for milliseconds until learning pauses.
        os.sched_yield()

    def receive(self, step: Step) -> Array:
        """Wait for all busy workers and copy their results into `step`; lanes [B] that executed their command."""
        busy = [index for index, worker in enumerate(self.workers) if worker is not None and worker.state == "busy"]
        while waiting := [worker for worker in self.workers if worker is not None and worker.state == "busy"]:
            self._wait(waiting)
        done = np.zeros(self.lanes[-1].stop, bool)
        for index in busy:
            self._copy_results(index, step, done)
        self._check_memory(step)
        return done

    def poll(self, timeout_seconds: float) -> None:
        """Receive messages until the timeout, and remove workers that died."""
        for descriptor, _ in self._poll.poll(timeout_seconds * 1_000):
            self._by_descriptor[descriptor].receive()
        for index, worker in enumerate(self.workers):
            if worker is not None and worker.state == "dead":
                self._fail(index, "died", worker.process.exit_text())

    def close(self) -> None:
        """Stop all workers after they closed their environments, and kill those that do not exit in time."""
        present = [worker for worker in self.workers if worker is not None]
        self.workers = [None] * len(self.workers)
        self._register_descriptors()
        for worker in present:
            worker.request_stop()
        until = self._clock() + CLOSE_SECONDS
        for worker in present:
            # A running step may finish in time; a worker that is still starting has nothing to close.
            self._stop(worker, max(0.0, until - self._clock()) if worker.state in ("idle", "busy") else 0.0)
        self._reaper.close()

    def stop_overdue(self) -> None:
        """Stop the workers whose reply is overdue."""
        for index, worker in enumerate(self.workers):
            if worker is None or worker.state not in ("busy", "starting"):
                continue
            if worker.seconds_left(self._step_seconds, self._clock()) <= 0:
                doing = "start" if worker.state == "starting" else "make" if worker.memory.making else "answer"
                self._fail(index, "hung", f"did not {doing} in time", worker.process.current_traceback())

    def _lanes_where(self, condition: Callable[[EnvWorkerProcess], bool]) -> Array:
        flags = [worker is not None and condition(worker) for worker in self.workers]
        return np.repeat(flags, [len(lanes) for lanes in self.lanes])

    def _register_descriptors(self) -> None:
        self._poll = select.poll()
        self._by_descriptor = {}
        for worker in filter(None, self.workers):
            for descriptor in (worker.connection.fileno(), worker.process.process.sentinel):
                self._by_descriptor[descriptor] = worker
                self._poll.register(descriptor, select.POLLIN)

    def _wait(self, busy: list[EnvWorkerProcess]) -> None:
        now = self._clock()
        left = min(worker.seconds_left(self._step_seconds, now) for worker in busy)
        self.poll(min(max(left, 0.0), _LOG_CHECK_SECONDS))
        for worker in busy:
            if worker.state == "busy":
                worker.truncate_log()
        if left <= 0:
            self.stop_overdue()

    def _copy_results(self, index: int, step: Step, done: Array) -> None:
        worker = self.workers[index]
        if worker is None:
            return
        rows = slice(self.lanes[index].start, self.lanes[index].stop)
        result = worker.memory.step
        good = worker.memory.outcome == DONE
        done[rows] = good
        terminated, truncated = worker.memory.end_flags()
        step.obs[rows][good] = result.obs[good]
        step.reward[rows][good] = result.reward[good]
        step.terminated[rows][good] = terminated[good]
        step.truncated[rows][good] = truncated[good]
        if step.mask is not None and result.mask is not None:
            step.mask[rows][good] = result.mask.view(np.uint8)[good] != 0
        if step.info is not None and result.info is not None:
            step.info[rows][good] = result.info[good]
        for row in np.flatnonzero(~good & (worker.memory.command != 0)):
            self._record_env_fault(index, worker, int(row))

    def _record_env_fault(self, index: int, worker: EnvWorkerProcess, row: int) -> None:
        lane = self.lanes[index][row]
        what, _, cause = worker.memory.message(row).partition("\n")
        kind: Literal["wrong", "raised"] = "wrong" if worker.memory.outcome[row] == OUTSIDE_SPACE else "raised"
        seconds = self._clock() - worker.since
        self._faults.append(EnvFault(kind, index, (lane,), (lane,), f"lane {lane}: {what}", cause, seconds))

    def _check_memory(self, step: Step) -> None:
        """Stop workers above the memory limit at the end of an episode, and far above it at once."""
        if self._memory_bytes is None:
            return
        now = self._clock()
        if now - self._memory_checked_at >= _MEMORY_CHECK_SECONDS:
            self._memory_checked_at = now
            used = {index: worker.resident_bytes() for index, worker in enumerate(self.workers) if worker is not None}
            self._over_memory = {index for index, size in used.items() if size > self._memory_bytes}
            for index in [i for i in self._over_memory if used[i] > _HARD_MEMORY_LIMIT * self._memory_bytes]:
                self._fail(index, "leaked", "grew far beyond env.worker_memory_gib")
        ended = step.terminated | step.truncated
        for index in [i for i in self._over_memory if ended[self.lanes[i].start : self.lanes[i].stop].any()]:
            self._fail(index, "leaked", "grew beyond env.worker_memory_gib")

    def _fail(self, index: int, kind: Literal["hung", "died", "leaked"], what: str, cause: str = "") -> None:
        """Stop a worker and record the fault."""
        worker = self.workers[index]
        lanes = self.lanes[index]
        self._over_memory.discard(index)
        if worker is None:
            return
        self.workers[index] = None
        self._register_descriptors()
        current = worker.memory.current_lane if kind != "leaked" else None
        guilty = tuple(lanes) if current is None else (lanes[current],)
        where = f"worker {index}" if current is None else f"worker {index}, at lane {guilty[0]},"
        cause = cause or worker.process.crash_traceback()
        seconds = self._clock() - worker.since
        self._stop(worker)
        self._faults.append(EnvFault(kind, index, tuple(lanes), guilty, f"{where} {what}", cause, seconds))

    def _stop(self, worker: EnvWorkerProcess, timeout_seconds: float = 0.0) -> None:
        worker.stop(timeout_seconds)
        self._reaper.forget(worker.process.pid)
