"""The workers of one world: who is there, who is busy, who had to be ended and why. B lanes in all."""

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
from qfleet.envs.workers.memory import DONE, WRONG
from qfleet.envs.workers.process import EnvWorkerProcess
from qfleet.envs.workers.reaper import Reaper

CLOSE_SECONDS = 2.0  # what environments may take to be closed, all of them together
_SLICE_SECONDS = 0.25  # how long to wait before looking at logs again
# One more look before a silent worker is ended: it may have been this process that was stopped.
_GRACE_SECONDS = 0.1
_WEIGH_SECONDS = 1.0
_TOO_HEAVY = 1.5  # times the limit: no waiting for an episode's end


@dataclass(frozen=True, slots=True)
class EnvFault:
    """Something that failed: `lanes` lost their episodes, `guilty` are charged for it, `quarantined` are given up."""

    kind: Literal["raised", "wrong", "hung", "died", "leaked"]
    worker: int
    lanes: tuple[int, ...]
    guilty: tuple[int, ...]
    what: str
    cause: str  # a traceback, if there is one
    seconds: float  # from the order to the moment it was seen that it failed
    quarantined: tuple[int, ...] = ()


def log_file(logs: Path, worker: int) -> Path:
    """A worker's log: `worker_0.log` in a folder, or `actor-1-worker-0.log` beside the log `actor-1.log`."""
    return logs / f"worker_{worker}.log" if logs.is_dir() else logs.with_stem(f"{logs.stem}-worker-{worker}")


class EnvWorkerPool:
    """So many processes, each with its share of the lanes; one that is ended stays away until it is hired again."""

    def __init__(
        self,
        task: EnvWorkerTask,
        spec: Spec,
        num: int,
        workers: int,
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
        bounds = [num * worker // workers for worker in range(workers + 1)]
        self.lanes = [range(first, after) for first, after in pairwise(bounds)]
        self.children: list[EnvWorkerProcess | None] = [None] * workers
        self._reaper = Reaper()
        self.faults: list[EnvFault] = []  # seen, but not yet taken
        self._weighed_at = clock()
        self._heavy: set[int] = set()
        self._poll = select.poll()
        self._voices = dict[int, EnvWorkerProcess]()

    def hire(self, worker: int) -> None:
        """Start a worker's process; `listen` will hear when it is ready."""
        log = os.devnull if self._logs is None else str(log_file(self._logs, worker))
        child = self.children[worker] = EnvWorkerProcess(
            self._task, self._spec, len(self.lanes[worker]), log, self._clock()
        )
        self._reaper.watch(child.process.pid)
        self._attend()

    def ready(self) -> Array:
        """Lanes [B] whose worker can be told something."""
        self.listen(0.0)
        if self.starting():
            self.expire()
        ready = [child is not None and child.state == "idle" for child in self.children]
        return np.repeat(ready, [len(lanes) for lanes in self.lanes])

    def present(self) -> Array:
        """Lanes [B] that have a worker."""
        return np.repeat([child is not None for child in self.children], [len(lanes) for lanes in self.lanes])

    def take_faults(self) -> list[EnvFault]:
        """What failed since this was last asked."""
        taken = self.faults
        self.faults = []
        return taken

    def starting(self) -> bool:
        """Is a worker on its way?"""
        return any(child is not None and child.state == "starting" for child in self.children)

    def give(self, command: Array, argument: Array) -> None:
        """Tell every worker that is ready what its lanes [B] do next."""
        now = self._clock()
        for child, lanes in zip(self.children, self.lanes, strict=True):
            part = slice(lanes.start, lanes.stop)
            if child is not None and child.state == "idle" and command[part].any():
                child.slab.command[:] = command[part]
                child.slab.argument[:] = argument[part]
                child.go(now)
        # Whoever woke up on this core begins now, not when this process next sleeps: some milliseconds of learning.
        os.sched_yield()

    def collect(self, step: Step) -> Array:
        """Wait for all that are busy and take their answers; lanes [B] that did what they were told."""
        busy = [worker for worker, child in enumerate(self.children) if child is not None and child.state == "busy"]
        while any(child is not None and child.state == "busy" for child in self.children):
            self._wait()
        done = np.zeros(self.lanes[-1].stop, bool)
        for worker in busy:
            self._take(worker, step, done)
        self._weigh(step)
        return done

    def listen(self, limit: float) -> None:
        """Hear what is said within the limit, and see who is gone."""
        for fd, _ in self._poll.poll(limit * 1_000):
            self._voices[fd].hear()
        for worker, each in enumerate(self.children):
            if each is not None and each.state == "dead":
                self._lose(worker, "died", each.how_it_ended())

    def close(self) -> None:
        """Let everybody close what they hold, and go; whoever does not is ended."""
        present = [child for child in self.children if child is not None]
        self.children = [None] * len(self.children)
        self._attend()
        for child in present:
            child.leave()
        until = self._clock() + CLOSE_SECONDS
        for child in present:
            # A step that is under way may end in time; who has not even begun has nothing to close.
            self._end(child, max(0.0, until - self._clock()) if child.state in ("idle", "busy") else 0.0)
        self._reaper.close()

    def expire(self) -> None:
        """End those that were silent for too long."""
        for worker, child in enumerate(self.children):
            late = child is not None and child.deadline(self._step_seconds) <= self._clock()
            if late and child is not None and child.state in ("busy", "starting"):
                doing = "start" if child.state == "starting" else "make" if child.slab.making else "answer"
                self._lose(worker, "hung", f"did not {doing} in time", child.where())

    def _attend(self) -> None:
        self._poll = select.poll()
        self._voices = {}
        for child in filter(None, self.children):
            for fd in (child.line.fileno(), child.process.sentinel):
                self._voices[fd] = child
                self._poll.register(fd, select.POLLIN)

    def _wait(self) -> None:
        busy = [child for child in self.children if child is not None and child.state == "busy"]
        left = min(child.deadline(self._step_seconds) for child in busy) - self._clock()
        self.listen(min(max(left, 0.0), _SLICE_SECONDS))
        for child in busy:
            if child.state == "busy":
                child.bound_log()
        if left <= 0:
            self.listen(_GRACE_SECONDS)
            self.expire()

    def _take(self, worker: int, step: Step, done: Array) -> None:
        child = self.children[worker]
        lanes = self.lanes[worker]
        if child is None:
            return
        part = slice(lanes.start, lanes.stop)
        answer = child.slab.step
        good = child.slab.outcome == DONE
        done[part] = good
        terminated, truncated = child.slab.flags()
        step.obs[part][good] = answer.obs[good]
        step.reward[part][good] = answer.reward[good]
        step.terminated[part][good] = terminated[good]
        step.truncated[part][good] = truncated[good]
        if step.mask is not None and answer.mask is not None:
            step.mask[part][good] = answer.mask.view(np.uint8)[good] != 0
        for index in np.flatnonzero(~good & (child.slab.command != 0)):
            self._note(worker, child, int(index))

    def _note(self, worker: int, child: EnvWorkerProcess, index: int) -> None:
        lane = self.lanes[worker][index]
        what, _, cause = child.slab.said(index).partition("\n")
        kind: Literal["wrong", "raised"] = "wrong" if child.slab.outcome[index] == WRONG else "raised"
        seconds = self._clock() - child.since
        self.faults.append(EnvFault(kind, worker, (lane,), (lane,), f"lane {lane}: {what}", cause, seconds))

    def _weigh(self, step: Step) -> None:
        """A worker that grew too large is ended when an episode has ended there."""
        if self._memory_bytes is None:
            return
        now = self._clock()
        if now - self._weighed_at >= _WEIGH_SECONDS:
            self._weighed_at = now
            weights = {w: child.resident_bytes() for w, child in enumerate(self.children) if child is not None}
            self._heavy = {worker for worker, weight in weights.items() if weight > self._memory_bytes}
            for worker in [w for w in self._heavy if weights[w] > _TOO_HEAVY * self._memory_bytes]:
                self._lose(worker, "leaked", "grew far beyond env.worker_memory_gib")
        ended = step.terminated | step.truncated
        for worker in [w for w in self._heavy if ended[self.lanes[w].start : self.lanes[w].stop].any()]:
            self._lose(worker, "leaked", "grew beyond env.worker_memory_gib")

    def _lose(self, worker: int, kind: Literal["hung", "died", "leaked"], what: str, cause: str = "") -> None:
        child = self.children[worker]
        lanes = self.lanes[worker]
        self._heavy.discard(worker)
        if child is None:
            return
        self.children[worker] = None
        self._attend()
        at = child.slab.at if kind != "leaked" else None
        guilty = tuple(lanes) if at is None else (lanes[at],)
        where = f"worker {worker}" if at is None else f"worker {worker}, at lane {guilty[0]},"
        text = cause or child.last_words()
        seconds = self._clock() - child.since
        self._end(child)
        self.faults.append(EnvFault(kind, worker, tuple(lanes), guilty, f"{where} {what}", text, seconds))

    def _end(self, child: EnvWorkerProcess, patience: float = 0.0) -> None:
        pid = child.process.pid  # a process that was ended does not tell it any more
        child.end(patience)
        self._reaper.forget(pid)
