"""A run in this process: its lock, signals, threads and log around the trainer, and the record of how it ended."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qfleet import heartbeat
from qfleet.build.components import Components
from qfleet.build.seeds import LAYERS, device_rng, set_device_rng, stream
from qfleet.build.threads import operation_threads, torch_threads
from qfleet.build.worlds import EnvMaker
from qfleet.errors import QfleetError, StorageError, UsageError
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan
from qfleet.save import Checkpoints, CheckpointWarning, hold_run
from qfleet.training.callbacks import AnyCallback, Callback, RowCallback, split_callbacks
from qfleet.training.checkpoints.checkpointer import Checkpointer
from qfleet.training.log.error_log import LOG_FILE, error_log
from qfleet.training.log.run_log import RunLog
from qfleet.training.log.run_status import CLOCK_ENDS, Ending, Row
from qfleet.training.process.hang_warnings import watching
from qfleet.training.process.signals import (
    OUTSIDE_MAIN_THREAD,
    LeftAtOnce,
    StopRequest,
    hears_signals,
    listening,
)
from qfleet.training.trainer import Trainer
from qfleet.watch import Watcher, collect_provenance


def run_session(
    components: Components,
    folder: Path,
    begin: Callable[[Trainer], list[str]],
    *,
    env: EnvMaker | None,
    callbacks: Iterable[AnyCallback],
    watcher: Watcher | None,
    stop_request: StopRequest | None = None,
) -> None:
    """Train under the run's lock, and write a status whatever happens; `begin` starts or resumes, and returns notes.

    `stop_request` is passed where signals reach another process, which forwards them.
    """
    plan = components.plan
    objects, functions = split_callbacks(callbacks)
    heartbeat.update_run_info(folder=str(folder.absolute()))
    unheard = [OUTSIDE_MAIN_THREAD] if stop_request is None and not hears_signals() else []
    with (
        torch_threads(operation_threads(plan)),
        run_torch_rng(plan),
        hold_run(folder) as require_folder,
        listening(watcher, stop_request) as stop_request,
        error_log(folder) as log,
    ):
        run_log = RunLog(components, folder, watcher, functions, require_folder=require_folder)
        trainer = make_trainer(components, run_log, env, stop_request, objects)
        status: Row = {}
        try:
            notes = begin(trainer)
            if plan.until.seconds is not None:
                run_log.warn(f"not exact: {CLOCK_ENDS}")
            run_log.start_timing()
            run_log.write_status()
            if watcher is not None:
                watcher.start(run_introduction(plan, folder, [*notes, *unheard]))
                watcher.live(run_log.snapshot())  # warnings are shown before the first step
            run_log.callbacks += row_writers(plan, folder, trainer.steps)
            with watching(stop_request, plan.env.step_timeout_seconds, folder, run_log.warn):
                status = run_log.write_status(*trainer.train())
        except BaseException as error:
            status = write_error(error, trainer, log)
            raise
        finally:
            if watcher is not None:
                watcher.stop(status)
            trainer.close()
        try_write_card(folder, run_log)


def try_write_card(folder: Path, run_log: RunLog) -> None:
    """Write card.md; if that fails, the run itself is done."""
    from qfleet.watch.card import write_card

    try:
        write_card(folder)
    except (QfleetError, OSError) as cause:
        run_log.warn(f"card.md could not be written: {cause}")


def write_error(error: BaseException, trainer: Trainer, log: logging.Logger) -> Row:
    """Record the error in the run's log and status; if these cannot be written either, the first error counts."""
    if isinstance(error, QfleetError):
        error.log = str(trainer.run_log.folder / "logs" / LOG_FILE)
    refused = isinstance(error, UsageError | KeyboardInterrupt)
    ending = error_ending(error)
    status = ending.row()
    try:
        trainer.run_log.require_folder()
    except StorageError:
        return status  # there is no folder to write into
    try:
        log.error("the run ended with an error", exc_info=error)
    except Exception as second:
        trainer.run_log.warn(f"logs/run-0.log cannot be written: {second}")
    try:
        return trainer.run_log.write_failure(ending, begun=trainer.checkpointer.last is not None, refused=refused)
    except Exception as second:
        error.add_note(f"The status could not be written either: {type(second).__name__}: {second}")
        return status


def progress_note(watcher: Watcher | None) -> Callable[[str], object]:
    """Shows what takes a while before a run begins, if the watcher can."""
    found: Callable[[str], object] = getattr(watcher, "note", str)
    return found


def row_writers(plan: Plan, folder: Path, first_step: int) -> list[RowCallback]:
    """Callbacks that write rows besides metrics.jsonl."""
    if not plan.log.tensorboard:
        return []
    from qfleet.training.log.tensorboard import TensorBoardWriter

    return [TensorBoardWriter(folder / "tensorboard", first_step=first_step)]


def make_trainer(
    components: Components,
    run_log: RunLog,
    env: EnvMaker | None,
    stop_request: StopRequest,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """The trainer of these components, with its checkpointer and callback objects."""
    keep = components.plan.save.keep
    events = run_log.events.event
    checkpoints = Checkpoints(run_log.folder / "checkpoints", keep=keep, log_event=events, warn=warner(run_log))
    checkpointer = Checkpointer(checkpoints, components, collect_provenance(None)["versions"])
    if components.remote_actors is not None:
        components.remote_actors.use_run_folder(run_log.folder, run_log.faults.actor_event)
    if components.remote_replay is not None:
        components.remote_replay.use_run_folder(run_log.folder)
    if components.peers is not None:
        components.peers.use_run_folder(run_log.folder)
    return Trainer(components, env, checkpointer, run_log, stop_request, callbacks)


def warner(run_log: RunLog) -> Callable[[str], None]:
    """Warns of damage: in the run's log, and in a script that chose no watcher as a Python warning."""

    def warn(text: str) -> None:
        run_log.warn(text)
        if run_log.watcher is None or getattr(run_log.watcher, "in_script", False):
            warnings.warn(text, CheckpointWarning, stacklevel=2)

    return warn


@contextmanager
def run_torch_rng(plan: Plan) -> Iterator[None]:
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


def run_introduction(plan: Plan, folder: Path, notes: Iterable[str]) -> dict[str, Any]:
    """What a watcher shows first."""
    return {
        "run": str(folder),
        "env": plan.env.id,
        "algorithm": algorithm_name(plan),
        "device": plan.runtime.device,
        "threads": plan.runtime.threads,
        "until_steps": plan.until.steps,
        "notes": list(notes),
    }


def error_ending(error: BaseException) -> Ending:
    """How a run that raised ends."""
    if isinstance(error, QfleetError):
        state = "diverged" if error.exit_code == 3 else "failed"
        return Ending(state, error.exit_code, error.what)
    if isinstance(error, LeftAtOnce):
        return Ending("interrupted", 130, "left at once, by SIGINT")
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", 130, "stopped by SIGINT before it had begun")
    return Ending("failed", 1, f"{type(error).__name__}: {error}")
