"""What this machine is good at: how long an update of a few small examples takes, made in several ways.

It is measured once for a kind of machine (processor, its instructions, cores) and a version of torch, by the set-up, by
`qfleet doctor --measure` or before the first long run, and kept in the user's cache. Every run reads it.
"""

import hashlib
import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import msgspec

from qfleet.errors import StorageError
from qfleet.files import read_inside
from qfleet.system.cache_folder import cache_folder
from qfleet.system.cores import machine_cores
from qfleet.system.processor import instructions, processor
from qfleet.watch import write_file

FORMAT = 1  # raise it when updates are computed in another way: what was measured before is measured again
MAX_BYTES = 100_000
NEVER_SECONDS = 1e12  # where there is no compiler
# The examples: updates of a network, and convolutions in two layouts.
PICTURES = "pictures"
GRIDS = "grids"
VECTORS = "vectors"
LAYOUT = "layout"
# The ways of an update, each after its precision: "bfloat16 tasks".
ONE_THREAD = "1 thread"
TASKS = "tasks"
OPERATIONS = "operations"
# What is measured of a compiled update.
COMPILED = "compiled"
COMPILING = "compiling"  # once, before the first update
CHANNELS_LAST = "channels last"
CONTIGUOUS = "contiguous"
Seconds: TypeAlias = Mapping[str, float]  # of one update, by the way it is made


class MachineKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What has to be equal for measurements to hold."""

    processor: str
    instructions: tuple[str, ...]
    cores: int
    torch: str
    format: int = FORMAT


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One example: when it was measured, and the seconds of an update by the way it is made."""

    at: str
    seconds: dict[str, float]


class MachineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that was measured on a kind of machine, by the name of the example."""

    kind: MachineKind
    examples: dict[str, Measured] = {}

    def seconds(self, example: str | None) -> Seconds:
        """Of an example's updates; nothing if it was not measured."""
        found = self.examples.get(example or "")
        return {} if found is None else found.seconds

    def with_example(self, name: str, seconds: Seconds, at: str) -> "MachineTable":
        """The table with more rows of an example; those of the same ways are replaced."""
        rows = Measured(at, {**self.seconds(name), **seconds})
        return msgspec.structs.replace(self, examples={**self.examples, name: rows})


def this_machine() -> MachineKind:
    """The kind of this machine."""
    return MachineKind(processor(), instructions(), machine_cores(), metadata.version("torch"))


def table_file(kind: MachineKind, folder: Path | None = None) -> Path:
    """Where the table of a kind of machine is kept: machines that share a home have files of their own."""
    name = hashlib.sha256(msgspec.json.encode(kind)).hexdigest()[:16]
    return (folder or cache_folder()) / f"machine-{name}.json"


def read_table(kind: MachineKind | None = None, folder: Path | None = None) -> MachineTable:
    """The table of this kind of machine; an empty one if there is none, or none that can be trusted."""
    kind = kind or this_machine()
    file = table_file(kind, folder)
    try:
        found = msgspec.json.decode(read_inside(file.parent, file.name, MAX_BYTES), type=MachineTable)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return MachineTable(kind)
    return found if found.kind == kind and is_sound(found) else MachineTable(kind)


def is_sound(table: MachineTable) -> bool:
    """Are all numbers times?"""
    values = [value for rows in table.examples.values() for value in rows.seconds.values()]
    return all(math.isfinite(value) and 0.0 < value <= NEVER_SECONDS for value in values)


def write_table(table: MachineTable, folder: Path | None = None) -> bool:
    """Keep a table; False if the cache cannot be written, so it will be measured again."""
    file = table_file(table.kind, folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, msgspec.json.format(msgspec.json.encode(table), indent=1))
    except (OSError, StorageError):
        return False
    return True
