"""`qfleet data prepare`: its options become a plan and an engine."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qfleet.cli.offline.progress import CountProgress
from qfleet.cli.output import echo
from qfleet.datasets.format import FILE_BYTES
from qfleet.datasets.prepare import (
    PreparePlan,
    parse_capacities,
    parse_split,
    parse_strata,
    prepare_dataset,
    read_keys,
    require_group,
)
from qfleet.distributed.preparing.capacity import MEASURED, measure_capacities
from qfleet.distributed.preparing.choosing import make_engine
from qfleet.errors import UsageError

if TYPE_CHECKING:
    from qfleet.datasets.format import Dataset

SMALLEST_FILE = 1 << 10
LARGEST_FILE = 1 << 29  # a reader decodes at most twice as much


@dataclass(frozen=True)
class PrepareOptions:
    """The options of the command; None and empty texts are those that were left out."""

    split: str
    salt: str
    group: str
    strata: str
    keys: str | None
    unique: bool
    shards: int | None
    capacity: str | None
    engine: str
    jobs: int | None
    address: str | None
    file_bytes: int | None


def prepare_by_options(dataset: "Dataset", target: str, options: PrepareOptions) -> None:
    """Prepare a data set as the options say, and show how far it is."""
    engine = make_engine(options.engine, options.jobs, options.address)
    plan = plan_of(options)
    progress = CountProgress("prepare", "files")
    try:
        prepare_dataset(dataset, target, plan, engine, progress.show)
    finally:
        progress.end()


def plan_of(options: PrepareOptions) -> PreparePlan:
    """What is done with every episode."""
    group = require_group(options.group)
    strata = parse_strata(options.strata)
    wants_keys = "key" in (group, strata.key)
    if wants_keys != (options.keys is not None):
        raise UsageError(
            "--keys FILE goes with --group key or --strata key" + (", and is missing" if wants_keys else ""),
            "The file has the user's own key of every episode.",
            "Example: --strata key --keys sites.csv",
        )
    keys, sha256 = read_keys(options.keys) if options.keys is not None else ({}, "")
    return PreparePlan(
        parse_split(options.split, options.salt),
        _file_bytes(options.file_bytes),
        group,
        options.unique,
        _capacities(options),
        strata,
        keys,
        sha256,
    )


def _file_bytes(num: int | None) -> int:
    if num is not None and not SMALLEST_FILE <= num <= LARGEST_FILE:
        raise UsageError(
            f"--file-bytes {num:,} is not possible",
            f"Files have {SMALLEST_FILE:,} to {LARGEST_FILE:,} bytes before compression.",
            "Leave it out: 64 MB is right for most data sets.",
        )
    return num or FILE_BYTES


def _capacities(options: PrepareOptions) -> tuple[float, ...]:
    if options.capacity != MEASURED:
        return parse_capacities(options.shards, options.capacity)
    found = measure_capacities(options.engine, options.shards, options.jobs, options.address)
    echo(f"measured: --capacity {','.join(f'{each:g}' for each in found)} makes the same shards again", to_stderr=True)
    return found
