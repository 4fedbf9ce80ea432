"""Processes related to this one: ending with the parent; finding, adopting and ending those below."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 2.0
GRACE_SECONDS = 0.3  # some of them are just ending by themselves


def die_with_parent(death_signal: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send `death_signal` when the parent ends; `parent` is its process id, if known."""
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), death_signal)


def kill_group(pid: int) -> None:
    """Kill all processes of the process group that this process leads or led."""
    if pid > 0:  # group 0 would be our own
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


def send_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of these processes that still exist."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that this process can end them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int, keep: Collection[int] = ()) -> list[int]:
    """All processes below this one, except those in `keep` and their descendants."""
    parents = dict[int, int]()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        with suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found = list[int]()
    below = {pid}
    while below := {each for each, parent in parents.items() if parent in below and each not in keep}:
        found += below
    return found


def end_descendants(
    seconds: float = END_SECONDS, grace_seconds: float = GRACE_SECONDS, keep: Collection[int] = ()
) -> None:
    """End all processes below this one, whatever their process group or session: environments started them.

    `keep` are processes that existed before the work began: a shell has started them (`Xvfb & exec qfleet train`).
    """
    now = time.monotonic()
    until = now + seconds
    kill_at = now + grace_seconds
    while (left := descendants(os.getpid(), keep)) and time.monotonic() < until:
        if time.monotonic() > kill_at:
            send_all(left, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(0.01)
