"""A script beside a Ray that we started: when its standard input closes, the driver is dead, and it kills the rest.

Ray's daemons die with the driver by themselves, but some of their children try for a minute to report it to each other.
Arguments: a directory to remove, and the process ids of the daemons. It imports nothing of qfleet, to stay small.
"""

import os
import select
import shutil
import signal
import sys
from pathlib import Path

POLL_SECONDS = 2.0


def start_time(pid: int) -> str:
    """When a process was started; "" if there is none. Distinguishes a process from a later one with the same id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def children(pid: int) -> set[int]:
    """The living child processes of a process."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found |= {int(child) for child in file.read_text().split()}
        except OSError:
            continue  # the thread has just ended
    return found


def main(folder: str, daemons: list[int]) -> None:
    """Track the children of the daemons until the driver has ended; then kill them."""
    known = {pid: start_time(pid) for pid in daemons}
    while True:
        known |= {pid: start_time(pid) for daemon in daemons for pid in children(daemon)}
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            break
    for pid, started_at in known.items():
        if started_at and start_time(pid) == started_at:
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(pid) for pid in sys.argv[2:]])
