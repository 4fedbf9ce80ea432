"""The reaper of a world: a process that kills what environments started when the process of the world is killed.

The kernel ends workers with their parent, but not the processes that an environment started in a worker. Those are in
the worker's process group, which the reaper kills.
"""

import os
import signal
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from qfleet.envs.workers.process import start_process
from qfleet.system.child_process import close_fork_server_pipe, kill_process_group


class Reaper:
    """Sends the reaper process the id of every worker that starts, and the negative id of every worker that ended."""

    def __init__(self) -> None:
        child_connection, self._connection = Pipe(duplex=False)
        with child_connection:
            self._process = start_process(reaper_main, (child_connection,), main=False)

    def watch(self, pid: int | None) -> None:
        """Add a worker that was started."""
        self._send(pid or 0)

    def forget(self, pid: int | None) -> None:
        """Remove a worker whose process group was killed: the system may reuse its id."""
        self._send(-(pid or 0))

    def close(self) -> None:
        """Stop the reaper process."""
        if not self._connection.closed:
            self._connection.close()
            kill_process_group(self._process)

    def _send(self, number: int) -> None:
        with suppress(OSError):  # a world works without a reaper
            self._connection.send_bytes(b"%d" % number)


def reaper_main(connection: Connection) -> None:
    """Wait until the world's process closes its end of the pipe or dies, then kill the groups of all its workers."""
    close_fork_server_pipe()
    with suppress(OSError):
        os.setpgid(0, 0)  # a signal to the parent's group must not end the reaper
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    watched: set[int] = set()
    with suppress(EOFError, OSError):
        while message := connection.recv_bytes(32):
            number = int(message)
            watched = watched | {number} if number > 0 else watched - {-number}
    for pid in watched:
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)
