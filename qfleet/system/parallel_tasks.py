"""Tasks: calls that a second thread of this process may make while the first goes on.

A task that no other thread has begun is made by the thread that asks for its result. So the same calls are made with
and without a second thread, and what they compute does not depend on who makes them. The second thread measures how
much of its time it gets from the processor. While another program uses the core it pauses, and tries again later.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
Clock = Callable[[], float]

RESULT_SECONDS = 3_600.0  # the longest wait for a task that another thread has begun
WINDOW_SECONDS = 0.05  # of work after which the share of processor time is looked at
MIN_SHARE = 0.8  # of a task's time that the processor must have worked on it
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 8.0


class Task(Generic[T]):
    """A call that is made once, by whichever thread begins it first."""

    __slots__ = ("begun", "call", "done", "error", "value")

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.begun = threading.Lock()  # held from the beginning of the call on
        self.done = threading.Lock()  # held until the end of the call
        self.done.acquire(blocking=False)
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> bool:
        """Make the call unless another thread has begun it; returns whether it was made here."""
        if not self.begun.acquire(blocking=False):
            return False
        try:
            self.value = self.call()
        except BaseException as error:  # raised again where the result is asked for
            self.error = error
        finally:
            self.done.release()
        return True

    def result(self) -> T:
        """What the call returned; its error is raised."""
        if not self.run() and not self.done.acquire(timeout=RESULT_SECONDS):
            raise TimeoutError(f"a task was not done within {RESULT_SECONDS:g} s")
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value] # the call has returned it


@dataclass(eq=False)
class Contention:
    """Whether a thread gets a core of its own: decides from its processor time when it pauses, and for how long."""

    pause_seconds: float = FIRST_PAUSE_SECONDS
    paused_until: float = 0.0
    worked: float = 0.0  # seconds of this window's tasks
    got: float = 0.0  # processor seconds that they got

    def is_paused(self, now: float) -> bool:
        """Is the thread to leave the work to others at this time?"""
        return now < self.paused_until

    def add(self, seconds: float, processor_seconds: float, now: float) -> None:
        """Count a task; at the end of a window pause if too little of the time was processor time."""
        self.worked += seconds
        self.got += processor_seconds
        if self.worked < WINDOW_SECONDS:
            return
        if self.got < MIN_SHARE * self.worked:
            self.paused_until = now + self.pause_seconds
            self.pause_seconds = min(2.0 * self.pause_seconds, MAX_PAUSE_SECONDS)
        else:
            self.pause_seconds = FIRST_PAUSE_SECONDS
        self.worked = 0.0
        self.got = 0.0


@dataclass(eq=False)
class TaskThread:
    """One more thread for tasks; it starts with the first of them."""

    prepare: Callable[[], object] = lambda: None  # called in the new thread first
    clock: Clock = time.perf_counter
    processor_clock: Clock = time.thread_time
    contention: Contention = field(default_factory=Contention)
    queue: "SimpleQueue[Task[object] | None]" = field(default_factory=SimpleQueue)
    thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Task[T]:
        """A task that this thread will begin soon, unless it pauses."""
        task = Task(call)
        if not self.contention.is_paused(self.clock()):
            if self.thread is None:
                self.start()
            self.queue.put(task)  # type: ignore[arg-type] # the type of the result does not matter here
        return task

    def start(self) -> None:
        """Start the thread; it ends with the process."""
        self.thread = threading.Thread(target=self.run, name="qfleet-tasks", daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Make one task after the other."""
        self.prepare()
        while (task := self.queue.get()) is not None:
            begin = self.clock()
            used = self.processor_clock()
            if task.run():
                now = self.clock()
                self.contention.add(now - begin, self.processor_clock() - used, now)
            del task  # not kept alive while waiting for the next

    def close(self) -> None:
        """End the thread when its tasks are done."""
        self.queue.put(None)
        self.thread = None
