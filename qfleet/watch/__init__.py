"""Observing runs: rows and events, watchers for the terminal, run directories, statistics and plots."""

from qfleet.watch.bottleneck import profile_of, rounded, shares_of, times_between, with_other
from qfleet.watch.card import write_card
from qfleet.watch.console import Mode, Watcher, auto_mode, make_watcher
from qfleet.watch.energy import EnergyMeter
from qfleet.watch.plot import plot_runs
from qfleet.watch.provenance import collect_provenance, cores, program
from qfleet.watch.run_directory import find_run, new_run_dir
from qfleet.watch.run_files import (
    CLOCK_FIELDS,
    EventLog,
    RowLog,
    json_line,
    read_json,
    read_rows,
    without_clock,
    write_file,
    write_json,
)
from qfleet.watch.run_listing import diff_runs, list_runs, remove_run, run_state, show_run
from qfleet.watch.statistics import summarize
from qfleet.watch.tensorboard import TensorBoardWriter

__all__ = [
    "CLOCK_FIELDS",
    "EnergyMeter",
    "EventLog",
    "Mode",
    "RowLog",
    "TensorBoardWriter",
    "Watcher",
    "auto_mode",
    "collect_provenance",
    "cores",
    "diff_runs",
    "find_run",
    "json_line",
    "list_runs",
    "make_watcher",
    "new_run_dir",
    "plot_runs",
    "profile_of",
    "program",
    "read_json",
    "read_rows",
    "remove_run",
    "rounded",
    "run_state",
    "shares_of",
    "show_run",
    "summarize",
    "times_between",
    "with_other",
    "without_clock",
    "write_card",
    "write_file",
    "write_json",
]
