"""A run on a data set, in a process that a soak kills: begins it, or goes on from its newest checkpoint.

It notes each batch that was learned from, and each position that it went back to. It ends with an error if a position
of a batch belongs to no learner, or to two.
"""

import multiprocessing
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from qfleet import resume, train
from qfleet.data import Array
from qfleet.distributed.learners.epoch_scatter import EpochScatter
from qfleet.learn.offline.dataset_source import DatasetSource
from qfleet.plan import make_plan
from qfleet.training.requests import SyncRequest, write_request

BATCH = 16
LENGTHS = [101, 57, 240, 33, 160, 9, 200]  # 800 transitions: 50 batches


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


def check_owners(names: Path) -> None:
    """Every position of a batch goes to one learner; rank 0 reads its own part, and the others get theirs in messages.

    The file `names` holds the process ids of the other learners.
    """
    begin = EpochScatter.begin
    share_for = EpochScatter.share_for
    given: dict[int, Array] = {}

    def check_begin(scatter: EpochScatter, batch: Any) -> Any:
        own, share = begin(scatter, batch)
        note_workers(names)
        given.clear()
        given[0] = own.ids
        return own, share

    def check_share(scatter: EpochScatter, rank: int, updates: int, rate: float) -> Any:
        found = share_for(scatter, rank, updates, rate)
        given[rank] = found[1]["positions"]
        if len(given) == scatter.speeds.num:
            counts = Counter(position for ids in given.values() for position in ids.tolist())
            if counts != Counter(scatter.positions.tolist()):
                raise AssertionError("a position has no owner, or two")
        return found

    EpochScatter.begin = check_begin  # type: ignore[method-assign]
    EpochScatter.share_for = check_share  # type: ignore[method-assign]


def note_workers(names: Path) -> None:
    """Write the process ids of the other learners."""
    pids = [child.pid for child in multiprocessing.active_children() if child.name.startswith("qfleet-learner")]
    text = " ".join(map(str, pids))
    if not names.exists() or names.read_text(encoding="utf-8") != text:
        draft = names.with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        draft.replace(names)


def main(data: str, out: str, num_learners: str, epochs: str, wanted: str) -> None:
    """Run to the end, unless killed; `wanted` learners are asked for when a run goes on."""
    folder = Path(out)
    note_positions(folder / "positions")
    check_owners(folder / "workers")
    if list(folder.glob("run/checkpoints/step_*/manifest.json")):
        if int(wanted):
            write_request(folder / "run", SyncRequest(make_plan("Logs-v0").sync, int(wanted)))
        resume(folder / "run", progress=False)
        return
    shutil.rmtree(folder / "run", ignore_errors=True)  # it was killed before its first checkpoint
    (folder / "positions").write_bytes(b"")
    plan = make_plan("Logs-v0", overrides=settings(data, int(num_learners), int(epochs)))
    train(plan, out=folder, name="run", progress=False)


def settings(data: str, num_learners: int, epochs: int) -> dict[str, Any]:
    """A small plan that is saved often."""
    found = {"replay.type": "dataset", "replay.path": data, "replay.split": "all", "until.epochs": epochs}
    found |= {"learners.num": num_learners, "algo.batch_size": BATCH, "net.torso.type": "mlp", "net.torso.sizes": (8,)}
    found |= {"eval.on": "data", "eval.episodes": 0, "eval.test_episodes": 0, "log.every_steps": 100}
    found |= {"save.every_steps": 160, "save.every_seconds": 0, "save.max_share": 1, "runtime.threads": 1}
    return found | ({"learners.restarts": 100_000, "learners.timeout_seconds": 20.0} if num_learners > 1 else {})
