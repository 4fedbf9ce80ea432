"""The command line: verbs, their help, and errors in three sentences."""

from qfleet.cli.entry import main

__all__ = ["main"]
