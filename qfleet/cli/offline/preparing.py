"""`qfleet data prepare`: the work, with its progress."""

from typing import TYPE_CHECKING

from qfleet.cli.offline.progress import CountProgress
from qfleet.cli.output import echo
from qfleet.datasets.prepare import prepare_dataset
from qfleet.distributed.preparing.options import PrepareOptions

if TYPE_CHECKING:
    from qfleet.datasets.format import Dataset


def prepare_by_options(dataset: "Dataset", target: str, options: PrepareOptions) -> None:
    """Prepare a data set as the options say, and show how far it is."""
    engine = options.make_engine()
    capacities = options.capacities()
    if options.is_measured:
        shown = ",".join(f"{each:g}" for each in capacities)
        echo(f"measured: --capacity {shown} makes the same shards again", to_stderr=True)
    plan = options.plan(capacities)
    progress = CountProgress("prepare", "files")
    try:
        prepare_dataset(dataset, target, plan, engine, progress.show)
    finally:
        progress.end()
