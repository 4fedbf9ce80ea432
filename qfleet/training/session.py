"""Conducting a run: its lock, signals, threads and log around the course, and word of how it ended."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qfleet import heartbeat
from qfleet.build.components import LAYERS, Components, EnvMaker, device_rng, set_device_rng, stream
from qfleet.errors import QfleetError, StorageError, UsageError
from qfleet.escape import indented
from qfleet.files import make_folder, open_log, require_plain
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan
from qfleet.save import Checkpoints, CheckpointWarning, hold_run
from qfleet.training.checkpoints.checkpointer import Checkpointer
from qfleet.training.evaluator import Evaluator
from qfleet.training.log.run_log import Callback, Ending, Row, RunLog
from qfleet.training.process.hang_watch import watching
from qfleet.training.process.signals import StopRequest, listening
from qfleet.training.trainer import Trainer
from qfleet.watch import TensorBoardWriter, Watcher, auto_mode, make_watcher, provenance, write_card
from qfleet.watch.run_files import unwritable

LOG_FILE = "run-0.log"


def run_session(
    line: Components,
    folder: Path,
    begin: Callable[[Trainer], list[str]],
    *,
    env: EnvMaker | None,
    callbacks: Iterable[Callback],
    watcher: Watcher | None,
    asked: StopRequest | None = None,
) -> None:
    """Run a course under its lock, and leave a status behind whatever happens; `begin` says what is worth telling.

    `asked` is given where signals reach another process, which passes them on.
    """
    plan = line.plan
    heartbeat.tell(folder=str(folder.absolute()))
    watcher = watcher if watcher is not None else interactive_watcher()
    with (
        threads(plan),
        own_torch_rng(plan),
        hold_run(folder) as held,
        listening(watcher, asked) as asked,
        logbook(folder) as log,
    ):
        run_log = RunLog(line, folder, watcher, callbacks, require_folder=held.require_in_place)
        trainer = make_trainer(line, run_log, env, asked)
        status: Row = {}
        try:
            notes = begin(trainer)
            run_log.warn_of_clock()
            run_log.begin()
            run_log.write_status()
            if watcher is not None:
                watcher.start(introduction(plan, folder, notes))
                watcher.live(run_log.snapshot())  # what is known to be wrong is said before the first step
            run_log.callbacks += row_writers(plan, folder, trainer.steps)
            with watching(asked, plan.env.step_timeout_seconds, folder, run_log.warn):
                status = run_log.write_status(*trainer.complete())
        except BaseException as error:
            status = write_down(error, trainer, log)
            raise
        finally:
            if watcher is not None:
                watcher.stop(status)
            trainer.close()
        try:
            write_card(folder)
        except (QfleetError, OSError) as cause:
            run_log.warn(f"card.md could not be written: {cause}")  # the run itself is done


def write_down(error: BaseException, trainer: Trainer, log: logging.Logger) -> Row:
    """The status of a run that raised, in its log and folder as far as these can be written: the error goes first."""
    if isinstance(error, QfleetError):
        error.log = str(trainer.folder / "logs" / LOG_FILE)
    refused = isinstance(error, UsageError | KeyboardInterrupt)
    ended = failure(error)
    status: Row = {"state": ended.state, "exit_code": ended.exit_code, "reason": ended.reason}
    try:
        trainer.run_log.require_folder()
    except StorageError:
        return status  # there is no folder to write it down in
    try:
        log.error("the run ended with an error", exc_info=error)
    except Exception as second:
        trainer.run_log.warn(f"logs/run-0.log cannot be written: {second}")
    try:
        return trainer.run_log.write_failure(ended, begun=trainer.checkpointer.last is not None, refused=refused)
    except Exception as second:
        error.add_note(f"The status could not be written either: {type(second).__name__}: {second}")
        return status


def interactive_watcher() -> Watcher | None:
    """In a terminal or a notebook somebody is looking; a script stays silent unless it asks for a watcher."""
    mode = auto_mode(sys.stdout)
    return make_watcher(mode) if mode == "live" else None


def noting(watcher: Watcher | None) -> Callable[[str], object]:
    """Where to say what takes a while before a run begins; a watcher that has no place for it is not told."""
    found: Callable[[str], object] = getattr(watcher, "note", str)
    return found


def row_writers(plan: Plan, folder: Path, first_step: int) -> list[Callback]:
    """Where rows go besides metrics.jsonl."""
    return [TensorBoardWriter(folder / "tensorboard", first_step=first_step)] if plan.log.tensorboard else []


def make_trainer(line: Components, run_log: RunLog, env: EnvMaker | None, asked: StopRequest) -> Trainer:
    """The course of a line, with its judge and keeper."""
    keep = line.plan.save.keep
    events = run_log.events.event
    checkpoints = Checkpoints(run_log.folder / "checkpoints", keep=keep, events=events, warn=teller(run_log))
    checkpointer = Checkpointer(checkpoints, line, provenance(None)["versions"])
    if line.remote_actors is not None:
        line.remote_actors.settle(run_log.folder, run_log.note_actor)
    if line.remote is not None:
        line.remote.settle(run_log.folder)
    if line.peers is not None:
        line.peers.settle(run_log.folder)
    return Trainer(line, Evaluator(line.plan, env), checkpointer, run_log, asked)


def teller(run_log: RunLog) -> Callable[[str], None]:
    """Where word of damage goes: into the diary, and to a script without a watcher as a Python warning."""

    def tell(text: str) -> None:
        run_log.warn(text)
        if run_log.watcher is None:
            warnings.warn(text, CheckpointWarning, stacklevel=2)

    return tell


@contextmanager
def threads(plan: Plan) -> Iterator[None]:
    """Torch's thread count for the time of a run."""
    before = torch.get_num_threads()
    torch.set_num_threads(plan.runtime.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def own_torch_rng(plan: Plan) -> Iterator[None]:
    """Torch's generator, which random layers draw from, seeded for the time of a run and then as it was.

    On an accelerator its own generator too; those of other devices are never touched.
    """
    seed = int(stream(plan.seed, LAYERS).integers(2**63))
    before = device_rng(plan.runtime.device)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if before is not None:
            with torch.cuda.device(torch.device(str(plan.runtime.device))):
                torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            set_device_rng(plan.runtime.device, before)


class LogFile(logging.Handler):
    """A log of the run folder, which no link can lead out of; it is made with its first record."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record."""
        with open(open_log(self.file), "a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(self.format(record) + "\n")


class EscapedFormat(logging.Formatter):
    """Lines that text from elsewhere cannot forge: control characters are escaped, lines after the first indented."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, its traceback below it."""
        return indented(super().format(record))


@contextmanager
def logbook(folder: Path) -> Iterator[logging.Logger]:
    """logs/run-0.log: the traceback of an error that ended this run."""
    log = logging.getLogger(f"qfleet.{folder.name}")
    try:
        for name in ("logs", "history"):
            require_plain(folder, name)  # these files are opened later, some of them by children
        make_folder(folder, "logs")
    except OSError as error:
        raise unwritable(folder / "logs", error) from error
    handler = LogFile(folder / "logs" / LOG_FILE)
    handler.setFormatter(EscapedFormat("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    try:
        yield log
    finally:
        log.removeHandler(handler)


def introduction(plan: Plan, folder: Path, notes: Iterable[str]) -> dict[str, Any]:
    """What a watcher is told first."""
    return {
        "run": str(folder),
        "env": plan.env.id,
        "algorithm": algorithm_name(plan),
        "device": plan.runtime.device,
        "threads": plan.runtime.threads,
        "until_steps": plan.until.steps,
        "notes": list(notes),
    }


def failure(error: BaseException) -> Ending:
    """How a run ends that raised."""
    if isinstance(error, QfleetError):
        state = "diverged" if error.exit_code == 3 else "failed"
        return Ending(state, error.exit_code, error.what)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", 130, "stopped by SIGINT before it had begun")
    return Ending("failed", 1, f"{type(error).__name__}: {error}")
