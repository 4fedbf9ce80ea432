"""Processes that do not outlive their parent, do not run its script, and do not flood its disk.

Nor do they import from the current folder, which may hold files of anybody: Python puts it first in `sys.path` for
`-c` and `-m`, and every child is started in one of these ways. A child gets its parent's own `sys.path` instead.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
LOG_BYTES = 1_000_000
PRELOADED: list[str] = []  # by the fork server
# Any text switches Python's safe path on. This one says that it is for a child's start only: programs that an
# environment starts later are none of ours, and find their modules as always.
SAFE_PATH = "PYTHONSAFEPATH"
AT_START = "qfleet-start"
if os.environ.get(SAFE_PATH) == AT_START:
    del os.environ[SAFE_PATH]  # this is such a child
HOME = Path(__file__).resolve().parents[2]  # where the package lies


def python_command(code: str, *words: str) -> list[str]:
    """The command that runs `code` in another Python, which finds modules where this one does."""
    boot = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); {code}"
    return [sys.executable, "-P", "-c", boot, json.dumps(module_folders()), *words]


def module_folders() -> list[str]:
    """`sys.path` for a child: the same in every folder, and this package is found by it."""
    folders = [folder or os.getcwd() for folder in sys.path]
    return folders if str(HOME) in folders else [*folders, str(HOME)]


@contextmanager
def safe_path() -> Iterator[None]:
    """Whatever Python multiprocessing starts in here does not look for modules in the current folder."""
    if os.environ.get(SAFE_PATH):
        yield  # the user set it, or another thread is in here
        return
    os.environ[SAFE_PATH] = AT_START
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH, None)


class StopRequested(SystemExit):
    """This process was asked to end by its parent; an environment that calls sys.exit() raises a plain SystemExit."""


@contextmanager
def hidden_main(hide: bool = True) -> Iterator[None]:
    """A process that multiprocessing starts in here does not run the user's script again: it needs nothing from it."""
    main = sys.modules["__main__"]
    if hide:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        with safe_path():
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
