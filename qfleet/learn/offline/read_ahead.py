"""What will be needed next, made by a thread ahead of need. What it makes does not depend on whether it was in time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from qfleet.system.parallel_tasks import Task, TaskThread

T = TypeVar("T")
CLOSE_SECONDS = 10.0  # for the task that is being made


@dataclass(eq=False)
class ReadAhead(Generic[T]):
    """At most `num` results ahead. An error of `load` is raised where its result is taken."""

    load: Callable[[int], T]
    num: int
    tasks: dict[int, Task[T]] = field(default_factory=dict)
    thread: TaskThread = field(init=False)

    def __post_init__(self) -> None:
        # Waiting for a disk or a network is no reason to pause, so every second counts as one of the processor.
        self.thread = TaskThread(processor_clock=time.perf_counter)

    def want(self, numbers: Sequence[int]) -> None:
        """Make the first `num` of these, and drop all others."""
        wanted = list(numbers)[: self.num]
        for number in set(self.tasks) - set(wanted):
            drop(self.tasks.pop(number))
        for number in wanted:
            if number not in self.tasks:
                self.tasks[number] = self.thread.submit(partial(self.load, number))

    def take(self, number: int) -> T | None:
        """The result, waited for or made here if it is not ready; None if it was not wanted."""
        task = self.tasks.pop(number, None)
        return None if task is None else task.result()

    def close(self) -> None:
        """Drop everything, and end the thread; one that hangs ends with the process."""
        for task in self.tasks.values():
            drop(task)
        self.tasks.clear()
        running = self.thread.thread
        if running is not None:
            self.thread.close()
            running.join(CLOSE_SECONDS)


def drop(task: Task[T]) -> None:
    """Keep a task from being made, if it has not begun."""
    task.begun.acquire(blocking=False)
