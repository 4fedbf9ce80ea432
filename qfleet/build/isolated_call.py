"""A calculation in a process of its own, which can be ended: by a limit of time, and by Ctrl-C."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from qfleet.system.child_process import die_with_parent, hidden_main, kill_process_group


def answer_of(work: Callable[..., list[float]], args: tuple[Any, ...], limit_seconds: float) -> list[float] | None:
    """What `work` answers, or None if it was not done in time or its process ended; no process is left."""
    # Not from the fork server: that one cannot be ended while it imports, and Ctrl-C would wait for it.
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(theirs, work, args), name="qfleet-measure", daemon=True)
    try:
        with hidden_main(), theirs:
            process.start()
        if not line.poll(limit_seconds):
            return None
        return msgspec.json.decode(line.recv_bytes(10_000), type=list[float])
    except (EOFError, OSError, msgspec.MsgspecError):
        return None
    finally:
        line.close()
        if process.pid is not None:  # it was started
            kill_process_group(process)


def answer(line: Connection, work: Callable[..., list[float]], args: tuple[Any, ...]) -> None:
    """The life of that process: it has a group of its own, with all that it starts, and ends with its parent."""
    die_with_parent()
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever asked is told, and ends this process
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    found = work(*args)
    with suppress(OSError):
        line.send_bytes(msgspec.json.encode(found))
