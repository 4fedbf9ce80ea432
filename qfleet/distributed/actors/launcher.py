"""The seam between the actor pool and where actors run, and the counters that actors report."""

from pathlib import Path
from typing import Any, Protocol

from qfleet.distributed.actors.handle import ActorHandle
from qfleet.plan.schema import Plan
from qfleet.training.log.timing import ACTOR_TIMES

# Counters that actors report, summed over all incarnations.
COMPRESSION_COUNTS = ("raw_bytes", "sent_bytes", "pack_ns")  # of compressed rollouts
COUNTS = (*ACTOR_TIMES, *COMPRESSION_COUNTS)
COMPRESSED_COLUMNS = ("obs", "state")  # the columns worth compressing


class ActorLauncher(Protocol):
    """Starts actors, and carries weights to them."""

    folder: Path | None  # the run directory, for logs

    def launch(self, worker: int, incarnation: int) -> ActorHandle:
        """Start an incarnation of a worker."""

    def publish(self, version: int, weights: Any, steps: int) -> None:
        """Publish the newest weights and the number of steps received so far."""

    def publish_steps(self, steps: int) -> None:
        """Publish the number of steps received so far."""

    def counts(self) -> dict[str, int]:
        """ACTOR_TIMES (`wait` is for room) and COMPRESSION_COUNTS, summed over all actors so far."""

    def close(self) -> None:
        """Free all resources."""


def actor_files(plan: Plan, folder: Path | None, worker: int, incarnation: int) -> tuple[str | None, str | None]:
    """The log and the history file of an actor; None without a run directory."""
    if folder is None:
        return None, None
    history = folder / "history" / f"actor-{worker}-{incarnation:06d}.jsonl"
    return str(folder / "logs" / f"actor-{worker}.log"), str(history) if plan.log.history else None
