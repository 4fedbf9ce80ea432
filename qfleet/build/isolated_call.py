"""A function call in a process of its own, which can be ended by a time limit and by Ctrl-C."""

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from qfleet.system.worker_process import WorkerOptions, WorkerProcess


def call_isolated(work: Callable[..., list[float]], args: tuple[Any, ...], limit_seconds: float) -> list[float] | None:
    """The result of `work`, or None if it was not done in time or its process ended; no process is left."""
    # Not from the fork server, which cannot be ended while it imports: Ctrl-C would wait for it.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = WorkerProcess(context, "measure", send_result, (sender, work, args), WorkerOptions(own_group=True))
    try:
        with sender:
            process.start()
        if not receiver.poll(limit_seconds):
            return None
        return msgspec.json.decode(receiver.recv_bytes(10_000), type=list[float])
    except (EOFError, OSError, msgspec.MsgspecError):
        return None
    finally:
        receiver.close()
        process.close()


def send_result(setup: tuple[Connection, Callable[..., list[float]], tuple[Any, ...]]) -> None:
    """The main function of that process."""
    sender, work, args = setup
    found = work(*args)
    with suppress(OSError):
        sender.send_bytes(msgspec.json.encode(found))
