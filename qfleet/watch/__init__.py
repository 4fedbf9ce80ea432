"""Observing runs: rows and events, watchers for the terminal, run directories, statistics and plots."""

from qfleet.watch.bottleneck import profile_of, rounded, shares_of, times_between, with_other
from qfleet.watch.console import Watcher, auto_mode, default_watcher, make_watcher
from qfleet.watch.new_run_dir import new_run_dir
from qfleet.watch.provenance import collect_provenance, program
from qfleet.watch.read_files import CLOCK_FIELDS, read_json, read_rows, without_clock
from qfleet.watch.run_directory import find_run
from qfleet.watch.run_files import EventLog, RowLog, json_line, write_file, write_json

__all__ = [
    "CLOCK_FIELDS",
    "EventLog",
    "RowLog",
    "Watcher",
    "auto_mode",
    "collect_provenance",
    "default_watcher",
    "find_run",
    "json_line",
    "make_watcher",
    "new_run_dir",
    "profile_of",
    "program",
    "read_json",
    "read_rows",
    "rounded",
    "shares_of",
    "times_between",
    "with_other",
    "without_clock",
    "write_file",
    "write_json",
]
