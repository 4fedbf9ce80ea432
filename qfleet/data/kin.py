"""Processes that do not outlive their parent, do not run its script, and do not flood its disk."""

import ctypes
import multiprocessing
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
LOG_BYTES = 1_000_000
PRELOADED: list[str] = []  # by the fork server


class AskedToLeave(SystemExit):
    """This process was asked to end by its parent; an environment that calls sys.exit() raises a plain SystemExit."""


@contextmanager
def hidden_main(hide: bool = True) -> Iterator[None]:
    """A process that multiprocessing starts in here does not run the user's script again: it needs nothing from it."""
    main = sys.modules["__main__"]
    if hide:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def fork_server(*modules: str) -> ForkServerContext:
    """Starts processes quickly: before the first it imports these modules, and those that were named before.

    There is one for all of this process.
    """
    PRELOADED.extend(name for name in modules if name not in PRELOADED)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def die_with_parent(how: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Let the kernel end this process when its parent ends, however that happens; `parent` is its id if it is known.

    A child of multiprocessing's fork server ends with the server, and that with whoever started it.
    """
    let_go_of_server()
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:  # it went before the call
        os.kill(os.getpid(), how)


def let_go_of_server() -> None:
    """A fork server waits until nobody holds its pipe any more, so its own children must not."""
    server: Any = forkserver._forkserver
    if getattr(server, "_forkserver_alive_fd", None) is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def bound_log() -> None:
    """What this process prints goes nowhere once its log has LOG_BYTES."""
    now = os.fstat(1)
    if stat.S_ISREG(now.st_mode) and now.st_size >= LOG_BYTES:
        sys.stdout.flush()
        os.ftruncate(1, LOG_BYTES)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.close(nothing)
