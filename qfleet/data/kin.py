"""Processes that do not outlive their parent."""

import ctypes
import os
import signal
import sys
from multiprocessing import forkserver
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel end this process when its parent ends, however that happens.

    A child of multiprocessing's fork server ends with the server, and that with whoever started it: it waits until
    nobody holds its pipe any more, so its own children must not.
    """
    server: Any = forkserver._forkserver
    if getattr(server, "_forkserver_alive_fd", None) is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:  # it went before the call
        os.kill(os.getpid(), how)
