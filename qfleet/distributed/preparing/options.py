"""How a data set is prepared, as options of a command or a table of a workflow say it."""

from dataclasses import dataclass

from qfleet.datasets.format import FILE_BYTES
from qfleet.datasets.prepare import (
    Engine,
    PreparePlan,
    parse_capacities,
    parse_split,
    parse_strata,
    read_keys,
    require_group,
)
from qfleet.distributed.preparing.capacity import MEASURED, measure_capacities
from qfleet.distributed.preparing.choosing import make_engine
from qfleet.errors import UsageError

SMALLEST_FILE = 1 << 10
LARGEST_FILE = 1 << 29  # a reader decodes at most twice as much


@dataclass(frozen=True)
class PrepareOptions:
    """The options; None and empty texts are those that were left out."""

    split: str = "80/10/10"
    salt: str = "qfleet"
    group: str = ""
    strata: str = ""
    keys: str | None = None
    unique: bool = False
    shards: int | None = None
    capacity: str | None = None
    engine: str = "local"
    jobs: int | None = None
    address: str | None = None
    file_bytes: int | None = None

    @property
    def is_measured(self) -> bool:
        """Are the capacities of the nodes measured?"""
        return self.capacity == MEASURED

    def make_engine(self) -> Engine:
        """The engine that does the work."""
        return make_engine(self.engine, self.jobs, self.address)

    def capacities(self) -> tuple[float, ...]:
        """The capacity of each shard's node, which may have to be measured now."""
        if self.is_measured:
            return measure_capacities(self.engine, self.shards, self.jobs, self.address)
        return parse_capacities(self.shards, self.capacity)

    def plan(self, capacities: tuple[float, ...]) -> PreparePlan:
        """What is done with every episode."""
        group = require_group(self.group)
        strata = parse_strata(self.strata)
        wants_keys = "key" in (group, strata.key)
        if wants_keys != (self.keys is not None):
            raise UsageError(
                "--keys FILE goes with --group key or --strata key" + (", and is missing" if wants_keys else ""),
                "The file has the user's own key of every episode.",
                "Example: --strata key --keys sites.csv",
            )
        keys, sha256 = read_keys(self.keys) if self.keys is not None else ({}, "")
        rule = parse_split(self.split, self.salt)
        size = _file_bytes(self.file_bytes)
        return PreparePlan(rule, size, group, self.unique, capacities, strata, keys, sha256)


def _file_bytes(num: int | None) -> int:
    if num is not None and not SMALLEST_FILE <= num <= LARGEST_FILE:
        raise UsageError(
            f"--file-bytes {num:,} is not possible",
            f"Files have {SMALLEST_FILE:,} to {LARGEST_FILE:,} bytes before compression.",
            "Leave it out: 64 MB is right for most data sets.",
        )
    return num or FILE_BYTES
