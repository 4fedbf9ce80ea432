"""Running a command as a user would: timed from the outside, its JSON lines stamped on arrival, never for ever."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.report import ROOT

Rows = list[tuple[float, dict[str, Any]]]  # each with the second of its arrival


@dataclass
class Finished:
    """A command that has ended: its rows with their moment of arrival, how long it took, and how it left."""

    command: list[str]
    rows: Rows = field(default_factory=list)
    seconds: float = 0.0
    exit_code: int | None = None  # None: stopped at the limit
    errors: str = ""

    def last(self, kind: str, **fields: Any) -> tuple[float, dict[str, Any]] | None:
        """The newest row of a kind with these fields, and the second it arrived."""
        wanted = {"kind": kind, **fields}
        return next((row for row in reversed(self.rows) if wanted.items() <= row[1].items()), None)


def qfleet(*arguments: str) -> list[str]:
    """The command line a user types, by its script when there is one."""
    script = ROOT / "scripts" / "qfleet"
    return [str(script), *arguments] if script.exists() else [sys.executable, "-m", "qfleet", *arguments]


def here(module: str, *words: str) -> tuple[str, ...]:
    """One of our modules by our Python."""
    return (sys.executable, "-m", f"benchmarks.{module}", *words)


def run(
    command: Sequence[str],
    limit_seconds: float,
    env: Mapping[str, str] | None = None,
    root: Path = ROOT,
    rows: Rows | None = None,
) -> Finished:
    """Run to the end or to the limit, whichever is first.

    `root` holds the code that is run; `rows` is a list that another thread may read while rows arrive.
    """
    done = Finished(list(command), [] if rows is None else rows)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        begin = time.monotonic()
        process = start(command, errors, env, root=root)
        reader = threading.Thread(target=collect, args=(process.stdout, begin, done.rows), daemon=True)
        reader.start()
        try:
            done.exit_code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            stop(process)
        reader.join(10)
        done.seconds = time.monotonic() - begin
        done.errors = tail(errors)
    return done


def start(
    command: Sequence[str],
    errors: IO[str],
    env: Mapping[str, str] | None = None,
    quiet: bool = False,
    root: Path = ROOT,
) -> "subprocess.Popen[str]":
    """Begin a command in a process group of its own, so that all of it can be stopped.

    It stays in our session: Linux may share processor time among sessions first, and then a burner in another session
    would take a whole core from contestants with two threads, which nearly stops those whose threads wait for another.
    """
    surroundings = {**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1", **(env or {})}
    return subprocess.Popen(  # noqa: S603 - commands are made by the benchmarks themselves
        list(command),
        cwd=root,
        env=surroundings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
        stderr=errors,
        text=True,
        process_group=0,
    )


def tail(errors: IO[str]) -> str:
    """The last of what a command said on stderr, without where this clone lives."""
    errors.seek(0)
    return errors.read()[-4000:].replace(str(ROOT), ".")


def stop(process: "subprocess.Popen[str]") -> None:
    """End what is left of a command's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def collect(stream: IO[str] | None, begin: float, rows: Rows) -> None:
    """Put every row of JSON into the list as it arrives."""
    for line in stream or ():
        moment = time.monotonic() - begin
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append((moment, row))
