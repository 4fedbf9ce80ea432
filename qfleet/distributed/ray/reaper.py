"""Run as a script beside a Ray of our own: when its standard input ends, the driver is gone, and so must be the rest.

Ray's daemons die with the driver by themselves, but some of their children try for a minute to report it to each other.
Arguments: a folder to remove, and the process ids of the daemons. It imports nothing of ours: it is to be small.
"""

import os
import select
import shutil
import signal
import sys
from pathlib import Path

LOOK_SECONDS = 2.0


def born(pid: int) -> str:
    """When a process was started; nothing if it is not there. With it a process id is not taken for its successor's."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def children(pid: int) -> set[int]:
    """The processes that a process has started and that live."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found |= {int(word) for word in file.read_text().split()}
        except OSError:
            continue  # the thread has just ended
    return found


def main(folder: str, daemons: list[int]) -> None:
    """Remember whom the daemons start, until the driver is gone."""
    known = {pid: born(pid) for pid in daemons}
    while True:
        known |= {pid: born(pid) for daemon in daemons for pid in children(daemon)}
        if select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
            break
    for pid, when in known.items():
        if when and born(pid) == when:
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
