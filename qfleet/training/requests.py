"""What somebody wants of a run that is under way: a file in its folder, taken at the next safe point."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from qfleet.files import is_file, remove_file, rename_inside
from qfleet.plan.part import Positive
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Sync
from qfleet.watch.run_files import read_json, write_json

WANTED = "wanted.json"
TAKEN = "wanted.taken.json"


class SyncRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """How the learners of a run shall agree, and how many they shall be."""

    sync: Sync
    learners: Positive


def ask(folder: Path, wish: SyncRequest) -> None:
    """Have the run do so from its next safe point on."""
    write_json(folder / WANTED, msgspec.to_builtins(wish))


def is_asked(folder: Path) -> bool:
    """Is something wanted that the run has not done yet?"""
    return is_file(folder, WANTED) or is_file(folder, TAKEN)


def take(folder: Path) -> SyncRequest | None:
    """What is wanted, once; None if nothing is. What makes no sense is a ValueError. `heeded` must follow."""
    if not is_file(folder, WANTED):
        return None
    rename_inside(folder, WANTED, TAKEN)  # so that another wish may come meanwhile, and is not lost
    return as_wish(read_json(folder / TAKEN))


def heeded(folder: Path) -> None:
    """What was taken is done."""
    remove_file(folder, TAKEN)


def as_wish(value: Any) -> SyncRequest:
    """A wish from plain data; ValueError if it is none."""
    try:
        return msgspec.convert(value, SyncRequest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{WANTED}: {error}") from error


def now(folder: Path, plan: Plan) -> Plan:
    """The plan with its learners as they are at present, as the run's status says."""
    said = read_json(folder / "status.json").get("together")
    if said is None:
        return plan
    found = as_wish(said)
    learners = plan.learners
    return replace(plan, sync=found.sync, learners=replace(learners, num=found.learners))
