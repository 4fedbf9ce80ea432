"""The engine of Ray Data, which only says which process does which order: files are read and checked by qfleet."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError

from qfleet.datasets.prepare import Work
from qfleet.distributed.ray.session import joined, require_version, restored_sigterm, started_locally
from qfleet.errors import QfleetError, UsageError
from qfleet.plan.schema import RayRuntime
from qfleet.plan.validate.placement import ADDRESS
from qfleet.system.cores import usable_cores

ORDER = "order"
ANSWER = "answer"
NUMBER = "number"
ATTEMPTS = 5  # at one order, with a process that is lost


@dataclass(frozen=True)
class RayEngine:
    """Orders are the rows of a Ray data set, each a block of its own. Ray repeats what it loses with a process."""

    jobs: int | None = None
    address: str | None = None  # of a cluster; without one Ray is started for the preparation

    def map(self, work: Work, orders: Sequence[bytes]) -> Iterator[bytes]:
        """The answers, in the order of the orders."""
        with ray_session(self.jobs, self.address):
            yield from in_order(answers(work, orders, self.jobs))


def answers(work: Work, orders: Sequence[bytes], jobs: int | None) -> Iterator[tuple[int, bytes]]:
    """The numbers of orders and their answers, as they come."""
    rows = [{NUMBER: number, ORDER: order} for number, order in enumerate(orders)]
    data = ray.data.from_items(rows, override_num_blocks=len(rows))
    done = data.map(worker_of(work), num_cpus=1, concurrency=jobs, max_retries=ATTEMPTS)
    try:
        for row in done.iter_rows():
            yield int(row[NUMBER]), bytes(row[ANSWER])
    except RayError as error:
        raise QfleetError(
            "Ray gave up the preparation",
            " ".join(str(error).split())[:400],
            "If memory is short, use fewer processes: --jobs 1. The same command goes on with the same result.",
        ) from error


def worker_of(work: Work) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The work on a row."""
    return lambda row: {NUMBER: row[NUMBER], ANSWER: work(row[ORDER])}


def in_order(found: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    """Answers in the order of their numbers: 0, 1, ..."""
    early: dict[int, bytes] = {}
    number = 0
    for at, answer in found:
        early[at] = answer
        while number in early:
            yield early.pop(number)
            number += 1


@contextmanager
def ray_session(jobs: int | None, address: str | None) -> Iterator[None]:
    """Ray for the time of a preparation; one that this process has already initialised is used as it is."""
    require_version(ray.__version__)
    if address is not None and not ADDRESS.fullmatch(address):
        raise UsageError(
            f"--address {address} is not host:port", "It is that of a Ray cluster.", "Example: 10.0.0.1:6379"
        )
    runtime = RayRuntime(address=address)
    if ray.is_initialized():
        yield
        return
    with restored_sigterm(), started_locally(runtime, jobs or usable_cores()) if address is None else joined(runtime):
        silence()
        yield


def silence() -> None:
    """Ray Data shows no progress and no errors of its own."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised
