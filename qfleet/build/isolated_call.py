"""A function call in a process of its own, which can be ended by a time limit and by Ctrl-C."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from qfleet.system.child_process import die_with_parent, hidden_main, kill_process_group


def call_isolated(work: Callable[..., list[float]], args: tuple[Any, ...], limit_seconds: float) -> list[float] | None:
    """The result of `work`, or None if it was not done in time or its process ended; no process is left."""
    # Not from the fork server, which cannot be ended while it imports: Ctrl-C would wait for it.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child_main, args=(sender, work, args), name="qfleet-measure", daemon=True)
    try:
        with hidden_main(), sender:
            process.start()
        if not receiver.poll(limit_seconds):
            return None
        return msgspec.json.decode(receiver.recv_bytes(10_000), type=list[float])
    except (EOFError, OSError, msgspec.MsgspecError):
        return None
    finally:
        receiver.close()
        if process.pid is not None:  # it was started
            kill_process_group(process)


def child_main(receiver: Connection, work: Callable[..., list[float]], args: tuple[Any, ...]) -> None:
    """The main function of that process: it has its own process group and ends with its parent."""
    die_with_parent()
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent receives it too, and ends this process
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    found = work(*args)
    with suppress(OSError):
        receiver.send_bytes(msgspec.json.encode(found))
