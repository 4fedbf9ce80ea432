"""Child processes that do not run their parent's script again, and do not fill its screen or its disk.

They do not import from the current folder either, which may hold untrusted files: Python puts it first in `sys.path`
for `-c` and `-m`, and every child is started in one of these ways. A child gets its parent's `sys.path` instead.
"""

import json
import multiprocessing
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType

from qfleet.files import open_log

LOG_BYTES = 1_000_000
PRELOADED = ["qfleet.system.worker_process"]  # modules that the fork server imports: every worker begins in this one
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
def hidden_main() -> Iterator[None]:
    """Processes that multiprocessing starts inside the block do not run the user's script again."""
    main = sys.modules["__main__"]
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


def redirect_output(file: str | None) -> None:
    """Send standard output and error to a file, or nowhere: never over the user's screen. Standard input is empty."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it may be None, broken or closed
            stream.flush()
    null = os.open(os.devnull, os.O_RDWR)
    target = null if file is None else open_log(file)
    for source, fd in ((null, 0), (target, 1), (target, 2)):
        os.dup2(source, fd)
    for opened in {null, target} - {0, 1, 2}:
        os.close(opened)


def limit_log() -> None:
    """Discard further output of this process once its log has LOG_BYTES."""
    log = os.fstat(1)
    if stat.S_ISREG(log.st_mode) and log.st_size >= LOG_BYTES:
        sys.stdout.flush()
        os.ftruncate(1, LOG_BYTES)
        redirect_output(None)
