"""A run that learns from a data set, in a process that a test kills: begins it, or goes on from its newest checkpoint.

It notes each batch that was learned from, and each position that it went back to.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from qfleet import resume, train
from qfleet.learn.offline.dataset_source import DatasetSource
from qfleet.plan import make_plan


def note_positions(log: Path) -> None:
    """Append every batch to the file, in one write each: a kill cannot cut a line."""
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    load = DatasetSource.load_state_dict

    def after_update(source: DatasetSource, batch: Any, priority: Any) -> None:
        os.write(descriptor, f"used {batch.ids.min()} {batch.ids.max() + 1}\n".encode())

    def load_state_dict(source: DatasetSource, state: Any, **options: Any) -> None:
        load(source, state, **options)
        os.write(descriptor, f"back {source.steps}\n".encode())

    DatasetSource.after_update = after_update  # type: ignore[method-assign]
    DatasetSource.load_state_dict = load_state_dict  # type: ignore[method-assign]


def main(data: str, out: Path, num_learners: int, epochs: int) -> None:
    """Run to the end, unless killed."""
    note_positions(out / "positions")
    if list(out.glob("run/checkpoints/step_*/manifest.json")):
        resume(out / "run", progress=False)
        return
    shutil.rmtree(out / "run", ignore_errors=True)  # it was killed before its first checkpoint
    (out / "positions").write_bytes(b"")
    settings = {"replay.type": "dataset", "replay.path": data, "replay.split": "all", "until.epochs": epochs}
    settings |= {"learners.num": num_learners, "algo.batch_size": 16, "net.torso.type": "mlp", "net.torso.sizes": (8,)}
    settings |= {"eval.on": "data", "eval.episodes": 0, "eval.test_episodes": 0, "log.every_steps": 100}
    settings |= {"save.every_steps": 160, "save.every_seconds": 0, "save.max_share": 1, "runtime.threads": 1}
    train(make_plan("Logs-v0", overrides=settings), out=out, name="run", progress=False)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
