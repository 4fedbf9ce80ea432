"""status.json: how a run stands, how it ended, and whether its plan and seed alone decide it."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from qfleet.build.components import Components
from qfleet.errors import StorageError
from qfleet.system.worker_errors import WorkerLost
from qfleet.training.train_state import TrainState
from qfleet.watch import read_json, write_json
from qfleet.watch.provenance import resume_command
from qfleet.watch.run_files import overwrite_json

ENV_FAULT = "an environment failed and was made anew, with episodes that no seed decides"
ASYNCHRONOUS = "actors work beside the learner, so their timing decides what is learned from when"
CUSTOM_PARTS = "custom parts draw random numbers only from the generators that they are given, and keep no other state"
CLOCK_ENDS = "until.seconds is set, so the clock decides where it ends"

Row = dict[str, Any]


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    state: str
    exit_code: int | None
    reason: str

    def row(self) -> Row:
        """The fields of rows and of status.json."""
        return {"state": self.state, "exit_code": self.exit_code, "reason": self.reason}


RUNNING = Ending("running", None, "")


@dataclass(eq=False)
class RunStatus:
    """Writes status.json."""

    components: Components
    train_state: TrainState
    folder: Path
    filtered_share: Row = field(default_factory=dict)  # as last read: the process of the replay may be lost

    def write(self, ending: Ending, score: Row | None, seconds: float, profile: Row) -> Row:
        """Write how the run stands, and how to resume it."""
        status = {
            **ending.row(),
            "env_steps": self.components.steps,
            "updates": self.components.learner.updates,
            "seconds": round(seconds, 3),
            "resume": self.resume_text(),
            "best": self.train_state.best,
            **self.train_state.best_context(),
            "score": None if score is None else without_returns(score),
            **self.exactness(),
            "lost": self.train_state.lost,
            "pid": os.getpid() if ending is RUNNING else None,
            **self.filtered(),
            **self.together(),
            "profile": profile,
        }
        write_json(self.folder / "status.json", status)
        return status

    def resume_text(self) -> str:
        """How to go on: the command, or with parts of the user's own the call."""
        custom = msgspec.structs.asdict(self.components.plan.custom)
        parts = "".join(f", {name}=..." for name, value in custom.items() if value is not None)
        return f"qfleet.resume({str(self.folder)!r}{parts})" if parts else resume_command(self.folder)

    def exactness(self) -> Row:
        """`exact`: the plan and its seed decide this run, stopped and resumed or not; otherwise the reasons."""
        clock = self.components.plan.until.seconds is not None
        reasons = [*self.train_state.not_exact, *([CLOCK_ENDS] if clock else [])]
        exact = self.train_state.exact and not reasons
        own = [name for name, value in msgspec.structs.asdict(self.components.plan.custom).items() if value is not None]
        assumes = {"exact_assumes": f"{CUSTOM_PARTS}: {', '.join(own)}"} if exact and own else {}
        return {"exact": exact, "not_exact": reasons, **assumes}

    def filtered(self) -> Row:
        """The share of items that the replay's filter kept out, if it has one."""
        if (filter := self.components.batch_source.replay.filter) is not None:
            with suppress(WorkerLost):
                self.filtered_share = {"filtered": filter.share}
        return self.filtered_share

    def together(self) -> Row:
        """How several learners are synchronised at present."""
        peers = self.components.peers
        if peers is None:
            return {}
        return {"together": {"sync": msgspec.to_builtins(peers.sync_plan), "learners": peers.num_learners}}


def without_returns(row: Row) -> Row:
    """An evaluation without its list of returns."""
    return {name: value for name, value in row.items() if name != "returns"}


def inexact_reasons(components: Components) -> list[str]:
    """Why the seed does not decide this run, even if nothing goes wrong."""
    reasons = [*components.inexact_reasons, *device_inexact_reasons(components.plan.runtime.device)]
    return reasons + ([ASYNCHRONOUS] if components.remote_actors is not None else [])


def device_inexact_reasons(device: str | None) -> list[str]:
    """Why a run on this device need not repeat, if so: some kernels of an accelerator add up in any order."""
    if device is None or torch.device(device).type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return []
    return ["determinism on accelerators is not promised"]


def record_refusal(folder: Path, failed: Row, *, refused: bool) -> None:
    """Add the error to the status of a run that had not begun, or nothing to that of a run that had ended."""
    with suppress(StorageError):
        before = read_json(folder / "status.json")
        if not (refused and before.get("exit_code") is not None):
            write_json(folder / "status.json", {**before, **failed})


def overwrite_status(folder: Path, failed: Row) -> None:
    """Record the error where a full disk has no room for a new status."""
    with suppress(StorageError):
        kept = {name: value for name, value in read_json(folder / "status.json").items() if name != "profile"}
        overwrite_json(folder / "status.json", {**kept, **failed})
