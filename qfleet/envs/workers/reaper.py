"""The reaper of a world: a process that ends what environments have started when whoever has the world is killed.

The kernel ends workers with their parent, but not what an environment has started in a worker: that is in the worker's
group, and somebody must be left to end the group.
"""

import os
import signal
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from qfleet.envs.workers.process import end_group, launched
from qfleet.system.child_process import let_go_of_server


class Reaper:
    """Is told of every worker that comes and goes, by its process id; those who go have a minus."""

    def __init__(self) -> None:
        theirs, self._line = Pipe(duplex=False)
        with theirs:
            self._process = launched(reap, (theirs,), main=False)

    def watch(self, pid: int | None) -> None:
        """A worker is there."""
        self._tell(pid or 0)

    def forget(self, pid: int | None) -> None:
        """It was ended, and its group with it: the number may be somebody else's from now on."""
        self._tell(-(pid or 0))

    def close(self) -> None:
        """Nobody is left to be watched."""
        if not self._line.closed:
            self._line.close()
            end_group(self._process)

    def _tell(self, number: int) -> None:
        with suppress(OSError):  # a world works without it as well
            self._line.send_bytes(b"%d" % number)


def reap(line: Connection) -> None:
    """A reaper's life: it waits until nobody holds the line's other end, which only the world's own process does."""
    let_go_of_server()
    with suppress(OSError):
        os.setpgid(0, 0)  # who ends a whole group of ours does not mean this one
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    watched: set[int] = set()
    with suppress(EOFError, OSError):
        while word := line.recv_bytes(32):
            number = int(word)
            watched = watched | {number} if number > 0 else watched - {-number}
    for pid in watched:
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)
