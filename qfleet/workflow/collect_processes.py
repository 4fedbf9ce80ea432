"""Collecting with several actors, each in a process of its own that writes its own data files.

A process sends how far it is, and at the end the index of what it wrote. One that ends without it ends the collection.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import msgspec
import torch

from qfleet.build.worlds import ROLES, make_own_world
from qfleet.datasets.format import BlockWriter, DataFile, Description, IndexRow, Statistics, WrittenFiles
from qfleet.datasets.storage import Place, open_place
from qfleet.errors import EnvError
from qfleet.plan.schema import InlineRuntime, Plan
from qfleet.plan.validate.placement import num_senders
from qfleet.system.child_process import fork_server
from qfleet.system.worker_errors import raise_usage_error
from qfleet.system.worker_process import WorkerOptions, WorkerProcess
from qfleet.workflow.behaviours import Behaviour, load_policies
from qfleet.workflow.playing import Amount, Show, describe_world, make_playing_world, make_recording, record_into

POLL_SECONDS = 0.2
SEND_SECONDS = 0.2  # from one report to the next
START_SECONDS = 120.0  # until a process has made its environments and loaded its policies
END_SECONDS = 600.0  # for the last file of a process
MAX_MESSAGE_BYTES = 1 << 30  # of the index of everything that a process has written


class CollectedSoFar(msgspec.Struct, tag=True):
    """How far a process is."""

    episodes: int
    steps: int


class CollectedAll(msgspec.Struct, tag=True):
    """Everything that a process has written."""

    files: list[DataFile]
    index: list[IndexRow]
    statistics: dict[str, Statistics]
    faults: int


@dataclass(frozen=True)
class CollectSetup:
    """What a collecting process is given."""

    plan: bytes  # as JSON
    url: str
    behaviours: tuple[Behaviour, ...]
    amount: Amount
    worker: int
    connection: Connection


@dataclass(eq=False)
class _Worker:
    """A collecting process as its parent sees it."""

    process: WorkerProcess
    connection: Connection
    heard_at: float
    so_far: CollectedSoFar | None = None
    result: CollectedAll | None = None


def collect_in_processes(
    plan: Plan, place: Place, behaviours: Sequence[Behaviour], amount: Amount, trust_env: bool, show: Show
) -> tuple[Description, WrittenFiles, int]:
    """Record in the plan's number of processes; returns what was written, and how many environments failed."""
    with closing(
        make_playing_world(msgspec.structs.replace(plan, env=msgspec.structs.replace(plan.env, num=1)))
    ) as one:
        description = describe_world(plan, one)
        load_policies(behaviours, plan.env.id, one.spec, trust_env)  # what is refused is refused here
    context = fork_server(ROLES)
    num = num_senders(plan)
    with ExitStack() as stack:
        workers = []
        for number in range(num):
            ours, theirs = Pipe(duplex=False)
            share = amount.share(number, num)
            setup = CollectSetup(msgspec.json.encode(plan), place.url, tuple(behaviours), share, number, theirs)
            options = WorkerOptions(starts_processes=True)
            process = WorkerProcess(context, f"collect-{number}", collect_until_enough, setup, options)
            stack.callback(process.close)
            stack.callback(ours.close)
            process.start()
            theirs.close()
            workers.append(_Worker(process, ours, time.monotonic()))
        receive_all(workers, plan, show)
    written = WrittenFiles()
    faults = 0
    for worker in workers:
        if worker.result is not None:
            written.add(WrittenFiles(worker.result.files, worker.result.index, worker.result.statistics))
            faults += worker.result.faults
    return description, written, faults


def receive_all(workers: Sequence[_Worker], plan: Plan, show: Show) -> None:
    """Receive what the processes send until all have sent everything."""
    while running := [worker for worker in workers if worker.result is None]:
        ready = wait([worker.connection for worker in running], timeout=POLL_SECONDS)
        for worker in running:
            if worker.connection in ready:
                receive(worker)
            elif not worker.process.is_alive() and not worker.connection.poll(0):
                raise lost(worker, worker.process.how_ended())
            require_progress(worker, plan)
        so_far = [worker.so_far for worker in workers if worker.so_far is not None]
        show(sum(each.episodes for each in so_far), sum(each.steps for each in so_far))


def receive(worker: _Worker) -> None:
    """One message of a process."""
    try:
        data = worker.connection.recv_bytes(MAX_MESSAGE_BYTES)
        message = msgspec.json.decode(data, type=CollectedSoFar | CollectedAll)
    except (EOFError, OSError, msgspec.DecodeError) as error:
        raise lost(worker, worker.process.how_ended()) from error
    worker.heard_at = time.monotonic()
    if isinstance(message, CollectedAll):
        worker.result = message
    else:
        worker.so_far = message


def require_progress(worker: _Worker, plan: Plan) -> None:
    """Give up a process that says nothing for too long."""
    if isinstance(plan.runtime, InlineRuntime) or worker.result is not None:
        return
    limit = START_SECONDS if worker.so_far is None else max(END_SECONDS, plan.runtime.hung_seconds)
    if time.monotonic() - worker.heard_at > limit:
        raise lost(worker, f"it said nothing for {limit:.0f} s")


def lost(worker: _Worker, cause: str) -> EnvError:
    """The error that ends the collection; a user's own mistake is raised as it is."""
    if (report := worker.process.reported_error()) is not None:
        raise_usage_error(report)
    return EnvError(
        f"a collecting process has failed: {cause}",
        "Its episodes are missing, so there is no data set; the files that were written have no manifest.",
        "Correct the environment and start again; runtime.type=inline shows its error in full.",
    )


# In a process


def collect_until_enough(setup: CollectSetup) -> None:
    """Play, write and report."""
    torch.set_num_threads(1)
    plan = msgspec.json.decode(setup.plan, type=Plan)
    place = open_place(setup.url)
    reports = _Reports(setup.connection)
    with closing(make_own_world(plan, setup.worker, 0)) as world:
        parts = load_policies(setup.behaviours, plan.env.id, world.spec, trust_env=True)
        recording = make_recording(plan, world, parts, setup.amount, reports.show, setup.worker)
        reports.send(CollectedSoFar(0, 0))
        writer = BlockWriter(place, describe_world(plan, world), plan.seed, prefix=f"a{setup.worker:03d}-")
        written = record_into(writer, recording)
        reports.send(CollectedSoFar(recording.episodes, recording.steps))
        reports.send(CollectedAll(written.files, written.index, written.statistics, recording.faults))


@dataclass(eq=False)
class _Reports:
    """Sends how far this process is, a few times per second."""

    connection: Connection
    sent_at: float = 0.0

    def show(self, episodes: int, steps: int) -> None:
        if (now := time.monotonic()) - self.sent_at >= SEND_SECONDS:
            self.sent_at = now
            self.send(CollectedSoFar(episodes, steps))

    def send(self, message: CollectedSoFar | CollectedAll) -> None:
        self.connection.send_bytes(msgspec.json.encode(message))
