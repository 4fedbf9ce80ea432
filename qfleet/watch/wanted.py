"""What somebody wants of a run that is under way: a file in its folder, taken at the next safe point."""

from pathlib import Path
from typing import Any

import msgspec

from qfleet.plan.schema import Plan
from qfleet.plan.together import Sync
from qfleet.watch.metrics import read_json, write_json

WANTED = "wanted.json"


def ask(folder: Path, sync: Sync) -> None:
    """Have the run agree in this way from its next safe point on."""
    write_json(folder / WANTED, {"sync": msgspec.to_builtins(sync)})


def is_asked(folder: Path) -> bool:
    """Is something wanted that the run has not taken yet?"""
    return (folder / WANTED).is_file()


def take(folder: Path) -> Sync | None:
    """What is wanted, once; None if nothing is. What makes no sense is a ValueError, and gone too."""
    path = folder / WANTED
    if not path.is_file():
        return None
    try:
        return as_sync(read_json(path).get("sync"))
    finally:
        path.unlink(missing_ok=True)


def as_sync(value: Any) -> Sync:
    """An agreement from plain data; ValueError if it is none."""
    try:
        found: Sync = msgspec.convert(value, Sync)
    except msgspec.ValidationError as error:
        raise ValueError(f"{WANTED}: {error}") from error
    return found


def now(folder: Path, plan: Plan) -> Sync:
    """How the learners of a run agree at present, as its status says."""
    said = read_json(folder / "status.json").get("sync")
    return plan.sync if said is None else as_sync(said)
