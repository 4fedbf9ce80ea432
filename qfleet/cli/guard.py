"""A guard over the process that learns: when it is killed, its run goes on from the last commit.

Only where actors live in processes of their own; a run in one thread is one process, and whoever kills that means it.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from qfleet.cli.say import say
from qfleet.plan.schema import Plan, Processes

GUARDED = "QFLEET_GUARDED"  # set for the process under guard
START = "from qfleet.cli import main; sys.exit(main())"
RESTARTS = 5  # in ten minutes
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
POLL_SECONDS = 0.2


def needs_guard(plan: Plan) -> bool:
    """Is this run to be guarded, and by us? The process under guard ends with its guard, after saving."""
    if GUARDED not in os.environ:
        return isinstance(plan.runtime, Processes)
    from qfleet.data.kin import die_with_parent  # most commands need none of that room

    die_with_parent(signal.SIGTERM, int(os.environ[GUARDED]))
    return False


def guarded(
    words: Sequence[str],
    out: str,
    again: Callable[[Path], list[str]],
    *,
    to_stderr: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the command `words` in a process of its own; `again` makes the command that goes on with its run."""
    from qfleet.data.budget import Budget  # most commands need none of that room
    from qfleet.data.oom import oom_kills

    command, budget = list(words), Budget(RESTARTS)
    while True:
        before = owners(Path(out))
        killed = oom_kills()
        code, pid, asked = run_child(command)
        if code >= 0:
            return code
        folder = None if asked else run_of(pid, Path(out), before)
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL and oom_kills() > killed:
            name = f"{name}, by the kernel, for lack of memory (a smaller replay.capacity needs less)"
        if folder is None or not budget.charge(clock()):
            say(f"the learner was ended by {name}", to_stderr=True)
            return 128 - code
        say(f"the learner was ended by {name}: going on with {folder} from its last commit", to_stderr=to_stderr)
        command = again(folder)


def run_child(command: Sequence[str]) -> tuple[int, int, bool]:
    """Run a command line of ours: its exit code (minus the signal that ended it), its process id, was it asked to end?

    The child has a process group of its own, so that Ctrl-C reaches it through us alone, and once.
    """
    from qfleet.data.kin import python_command

    child = subprocess.Popen(  # noqa: S603  our own program
        python_command(START, *command), env={**os.environ, GUARDED: str(os.getpid())}, process_group=0
    )
    with forwarding(child) as asked:
        while True:
            try:
                return child.wait(POLL_SECONDS), child.pid, bool(asked)
            except subprocess.TimeoutExpired:
                continue


@contextmanager
def forwarding(child: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Signals that mean the run are passed on, and collected; it saves and leaves, and so do we."""
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        child.send_signal(number)

    # What is ignored, as SIGHUP by nohup, does not mean the run; the child ignores it too.
    meant = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, forward) for number in meant}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def owners(out: Path) -> dict[Path, int | None]:
    """The process that each run folder says it belongs to."""
    from qfleet.watch.metrics import read_json

    return {status.parent: read_json(status).get("pid") for status in out.glob("*/status.json")}


def run_of(pid: int, out: Path, before: dict[Path, int | None]) -> Path | None:
    """The run folder that a process said was its own; ids come again, so what was said before does not count."""
    return next((run for run, owner in owners(out).items() if owner == pid and before.get(run) != pid), None)
