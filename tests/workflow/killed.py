"""A workflow whose process kills itself in the middle of a stage: python -m tests.workflow.killed PLAN OUT STAGE."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qfleet.datasets.format import BlockWriter, EpisodeWriter
from qfleet.datasets.prepare import preparing
from qfleet.training.evaluation import on_data
from qfleet.training.trainer import Trainer
from qfleet.workflow.plan import read_workflow
from qfleet.workflow.stages import run_workflow

ADDED = {"collect": 1, "import": 60, "prepare": 25}
UPDATES = 47


def die_at(call: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work; its call of this number kills the process."""
    calls = 0

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*args, **more)

    return counted


def die_in(stage: str) -> None:
    """Let the process die in this stage."""
    if stage == "learn":
        Trainer.do_due = die_at(UPDATES, Trainer.do_due)  # type: ignore[method-assign]
    elif stage == "prepare":
        preparing.publish = die_at(1, preparing.publish)
    elif stage == "judge":
        on_data.fitted_q_estimate = die_at(1, on_data.fitted_q_estimate)
    elif stage == "collect":
        BlockWriter.add = die_at(ADDED[stage], BlockWriter.add)  # type: ignore[method-assign]
    else:
        EpisodeWriter.add = die_at(ADDED[stage], EpisodeWriter.add)  # type: ignore[method-assign]


if __name__ == "__main__":
    die_in(sys.argv[3])
    run_workflow(read_workflow(sys.argv[1]), Path(sys.argv[2]))
