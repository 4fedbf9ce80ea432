"""The reaper of a world: a process that kills what environments started when the process of the world is killed.

The kernel ends workers with their parent, but not the processes that an environment started in a worker. Those are in
the worker's process group, which the reaper kills.
"""

from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from qfleet.system.child_process import fork_server
from qfleet.system.descendants import kill_group
from qfleet.system.worker_process import WorkerOptions, WorkerProcess


class Reaper:
    """Sends the reaper process the id of every worker that starts, and the negative id of every worker that ended."""

    def __init__(self) -> None:
        child_connection, self._connection = Pipe(duplex=False)
        # In a group of its own: a signal to the parent's group must not end the reaper.
        options = WorkerOptions(own_group=True, death_signal=None)
        context = fork_server("qfleet.envs.workers.reaper")
        self._process = WorkerProcess(context, "reaper", reaper_main, child_connection, options)
        with child_connection:
            self._process.start()

    def watch(self, pid: int) -> None:
        """Add a worker that was started."""
        self._send(pid)

    def forget(self, pid: int) -> None:
        """Remove a worker whose process group was killed: the system may reuse its id."""
        self._send(-pid)

    def close(self) -> None:
        """Stop the reaper process."""
        if not self._connection.closed:
            self._connection.close()
            self._process.close()

    def _send(self, number: int) -> None:
        with suppress(OSError):  # a world works without a reaper
            self._connection.send_bytes(b"%d" % number)


def reaper_main(connection: Connection) -> None:
    """Wait until the world's process closes its end of the pipe or dies, then kill the groups of all its workers."""
    watched: set[int] = set()
    with suppress(EOFError, OSError):
        while message := connection.recv_bytes(32):
            number = int(message)
            watched = watched | {number} if number > 0 else watched - {-number}
    for pid in watched:
        kill_group(pid)
