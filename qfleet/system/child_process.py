"""Child processes that end with their parent, do not run its script again, and do not fill its disk.

They do not import from the current folder either, which may hold untrusted files: Python puts it first in `sys.path`
for `-c` and `-m`, and every child is started in one of these ways. A child gets its parent's `sys.path` instead.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
EXIT_SECONDS = 2.0  # for a killed process to end
LOG_BYTES = 1_000_000
PRELOADED: list[str] = []  # modules that the fork server imports
# Any value switches Python's safe path on. This value marks it as set by us, for the start of a child only: programs
# that an environment starts later find their modules as usual.
SAFE_PATH = "PYTHONSAFEPATH"
SET_BY_PARENT = "qfleet-start"
if os.environ.get(SAFE_PATH) == SET_BY_PARENT:
    del os.environ[SAFE_PATH]  # this process is such a child
PACKAGE_PARENT = Path(__file__).resolve().parents[2]


def python_command(code: str, *arguments: str) -> list[str]:
    """The command that runs `code` in another Python with the same `sys.path`."""
    boot = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); {code}"
    return [sys.executable, "-P", "-c", boot, json.dumps(child_sys_path()), *arguments]


def child_sys_path() -> list[str]:
    """`sys.path` for a child: absolute folders, including the one that holds this package."""
    folders = [folder or os.getcwd() for folder in sys.path]
    return folders if str(PACKAGE_PARENT) in folders else [*folders, str(PACKAGE_PARENT)]


@contextmanager
def safe_path() -> Iterator[None]:
    """Processes that multiprocessing starts inside the block do not import from the current folder."""
    if os.environ.get(SAFE_PATH):
        yield  # set by the user, or by another thread inside this block
        return
    os.environ[SAFE_PATH] = SET_BY_PARENT
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH, None)


class StopRequested(SystemExit):
    """The parent asked this process to stop; an environment that calls sys.exit() raises a plain SystemExit."""


@contextmanager
def hidden_main(hide: bool = True) -> Iterator[None]:
    """Processes that multiprocessing starts inside the block do not run the user's script again."""
    main = sys.modules["__main__"]
    if hide:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        with safe_path():
            yield
    finally:
        sys.modules["__main__"] = main


def fork_server(*modules: str) -> ForkServerContext:
    """The context that forks children from a server process, which imports these modules before its first child.

    This process has one server; modules of earlier calls are imported too.
    """
    PRELOADED.extend(name for name in modules if name not in PRELOADED)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def die_with_parent(death_signal: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send `death_signal` when the parent ends; `parent` is its process id, if known.

    A child of multiprocessing's fork server ends with the server, and the server with the process that started it.
    """
    close_fork_server_pipe()
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), death_signal)


def close_fork_server_pipe() -> None:
    """Close this child's copy of the fork server's pipe: the server ends when all copies are closed."""
    server: Any = forkserver._forkserver
    if getattr(server, "_forkserver_alive_fd", None) is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def kill_process_group(process: BaseProcess) -> None:
    """Kill a process and all processes in its group."""
    if process.exitcode is None:
        process.kill()
    if process.pid:  # group 0 would be our own
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join(timeout=EXIT_SECONDS)
    with suppress(ValueError):
        process.close()


def limit_log() -> None:
    """Discard further output of this process once its log has LOG_BYTES."""
    log = os.fstat(1)
    if stat.S_ISREG(log.st_mode) and log.st_size >= LOG_BYTES:
        sys.stdout.flush()
        os.ftruncate(1, LOG_BYTES)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)
