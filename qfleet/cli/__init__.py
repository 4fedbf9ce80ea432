"""The command line: verbs, their help, and errors as what, why and fix."""

from qfleet.cli.entry import main

__all__ = ["main"]
