"""Preparing data sets: splits, statistics, and engines that do the work."""

from qfleet.datasets.prepare.choice import parse_capacities, require_group
from qfleet.datasets.prepare.engines import Engine, LocalEngine, Work
from qfleet.datasets.prepare.preparing import PreparePlan, prepare_dataset
from qfleet.datasets.prepare.splits import SplitRule, parse_split

__all__ = [
    "Engine",
    "LocalEngine",
    "PreparePlan",
    "SplitRule",
    "Work",
    "parse_capacities",
    "parse_split",
    "prepare_dataset",
    "require_group",
]
