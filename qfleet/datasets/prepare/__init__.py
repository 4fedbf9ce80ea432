"""Preparing data sets: splits, statistics, and engines that do the work."""

from qfleet.datasets.prepare.choice import parse_capacities, require_group
from qfleet.datasets.prepare.engines import Engine, LocalEngine, Work
from qfleet.datasets.prepare.keys import read_keys
from qfleet.datasets.prepare.preparing import PreparePlan, prepare_dataset
from qfleet.datasets.prepare.splits import SplitRule, parse_split
from qfleet.datasets.prepare.strata import StrataRule, parse_strata

__all__ = [
    "Engine",
    "LocalEngine",
    "PreparePlan",
    "SplitRule",
    "StrataRule",
    "Work",
    "parse_capacities",
    "parse_split",
    "parse_strata",
    "prepare_dataset",
    "read_keys",
    "require_group",
]
