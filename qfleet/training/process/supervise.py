"""Supervising the process that runs environments: they may hang, crash, leave, print without end or start processes.

The work is done in a fork of this process. This one passes signals on, bounds what environments print, ends the work
when a call of an environment takes far too long, ends what environments have started, and knows how the work ended.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from qfleet.errors import QfleetError
from qfleet.escape import escaped
from qfleet.files import list_inside
from qfleet.frames import user_frames
from qfleet.heartbeat import (
    CALLS,
    IMPORT,
    MAKE,
    TRACEBACK_SIGNAL,
    Heartbeat,
    attach,
    open_standard_streams,
    unnamed_file,
)
from qfleet.system.descendants import adopt_orphans, descendants, end_descendants, send_all

# What a run's state and exit code become after one of these signals.
ENDINGS = {
    "SIGINT": ("interrupted", 130),
    "SIGTERM": ("preempted", 143),
    "SIGHUP": ("stopped", 75),
}
FORWARDED = tuple(signal.Signals[name] for name in ENDINGS)
ENV_FAILED = 4
MOST_OUTPUT_BYTES = 1_000_000
# after these a call is said to hang, unless the plan says otherwise
STEP_SECONDS = 30.0
MAKE_SECONDS = 60.0
END_FACTOR = 4  # times that, and the work is ended
GRACE_SECONDS = 5.0  # that a call may go on after a signal asked the work to end, at least
GRACE_FACTOR = 2  # times the longest call of that kind so far, if that is longer
ONE_REQUEST_SECONDS = 0.1  # signals this close together are one request: a closed terminal sends two
AT_ONCE_SECONDS = 0.7  # that the work may go on after a second signal
LOOK_SECONDS = 0.1
TELL_SECONDS = 0.3
CONTINUE_SECONDS = 0.2  # after Ctrl-Z workers go on first: whoever waits for them with a limit finds their answers
PR_SET_PDEATHSIG = 1
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


class WorkDone(SystemExit):
    """The work of a supervised process is done: nothing is left to do but to leave, with this exit code."""


class Killable(Protocol):
    """A process that takes signals."""

    def send_signal(self, number: int, /) -> None:
        """Send one."""
        ...


@dataclass(frozen=True, slots=True)
class ExitVerdict:
    """How work ended that did not end by itself."""

    code: int
    state: str | None  # of the run; None: its status stays as it is, and readers see that its process is gone
    what: str
    frames: tuple[str, ...] = ()


class SupervisedProcess:
    """The process that does the work; with `adopts`, processes that lose their parent become children of ours."""

    def __init__(self, pid: int, heartbeat: Heartbeat, output: int, crash_log: int, *, adopts: bool) -> None:
        self.pid = pid
        self.heartbeat = heartbeat
        self.output = output
        self.crash_log = crash_log
        self.adopts = adopts
        self.status: int | None = None  # as waitpid gives it
        self.killed_by_us = False
        self.printed = 0

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless it is gone."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def poll(self) -> bool:
        """Has it ended? Adopted processes that have ended are released as well: nobody else waits for them."""
        while self.status is None:
            found, status = os.waitpid(-1 if self.adopts else self.pid, os.WNOHANG)
            if found == self.pid:
                self.status = status
            elif not found:
                return False
        return True

    def kill(self) -> None:
        """End it now."""
        self.killed_by_us = True
        self.send_signal(signal.SIGKILL)
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)

    def code(self) -> int:
        """Its exit code as it said it, or as the system does: minus the signal that ended it."""
        said = self.heartbeat.exit_code()
        return said if said is not None else os.waitstatus_to_exitcode(self.status or 0)

    def pump(self, seconds: float) -> None:
        """Pass on what environments print, up to a bound; return when there is nothing within the time."""
        if not select.select([self.output], [], [], seconds)[0]:
            return
        data = os.read(self.output, 1 << 16)
        if not data:
            time.sleep(0.02)  # nobody prints any more: it is about to end
            return
        with suppress(OSError):
            os.write(2, data[: max(0, MOST_OUTPUT_BYTES - self.printed)])
        if self.printed < MOST_OUTPUT_BYTES <= self.printed + len(data):
            say("")
            say(f"warning: the environment has printed {MOST_OUTPUT_BYTES:,} bytes; what it prints now is dropped")
        self.printed += len(data)

    def is_stopped(self) -> bool:
        """Was it stopped, by a signal or by the terminal?"""
        with suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
        return False

    def where(self) -> tuple[str, ...]:
        """The user's own calls that it is in, if it can tell."""
        before = os.fstat(self.crash_log).st_size
        self.send_signal(TRACEBACK_SIGNAL)
        until = time.monotonic() + TELL_SECONDS
        while os.fstat(self.crash_log).st_size == before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.01)  # it is written in pieces
        return self.left(before)

    def left(self, begin: int = 0) -> tuple[str, ...]:
        """The user's own calls in what it has left in its crash log."""
        text = os.pread(self.crash_log, 1 << 16, begin).decode(errors="replace")
        return tuple(str(frame) for frame in user_frames(text))


class HangWatch:
    """Looks at a child again and again: does a call of an environment hang, and does it heed signals?"""

    def __init__(self, child: SupervisedProcess, asked: list[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.child = child
        self.asked = asked
        self.clock = clock
        self.since = self.looked_at = clock()
        self.call: tuple[int, int, int] | None = None
        self.asked_at: list[float] = []
        self.longest: dict[int, float] = {}  # seconds of the longest call of each kind that has returned
        self.warned = False

    def look(self) -> ExitVerdict | None:
        """Why the child must be ended, if it must."""
        now = self.clock()
        call = self.child.heartbeat.call()
        if now - self.looked_at > 10 * LOOK_SECONDS:  # it was this process that did not run
            self.since += now - self.looked_at
        self.looked_at = now
        self.asked_at += [now] * (len(self.asked) - len(self.asked_at))
        if call != self.call:
            self.remember(now - self.since)
            self.call = call
            self.since = now
            self.warned = False
        if len(self.asked_at) > 1 and now - self.asked_at[1] > AT_ONCE_SECONDS:
            return self.signalled("it was asked to leave at once")
        return None if call is None else self.judge(now - self.since, now)

    def remember(self, seconds: float) -> None:
        """The call that was under way has returned after so long."""
        if self.call is not None:
            kind = self.call[1]
            self.longest[kind] = max(seconds, self.longest.get(kind, 0.0))

    def grace(self) -> float:
        """Seconds that the present call may go on after a signal: slow calls are healthy if they were always slow."""
        longest = 0.0 if self.call is None else self.longest.get(self.call[1], 0.0)
        return max(GRACE_SECONDS, min(GRACE_FACTOR * longest, self.limit()))

    def judge(self, stuck: float, now: float) -> ExitVerdict | None:
        """What to do about a call that has taken so many seconds."""
        if self.asked_at and min(stuck, now - self.asked_at[0]) > (grace := self.grace()):
            return self.signalled(f"{self.named()} did not return within {grace:.3g} s")
        if stuck <= self.limit():
            return None
        if stuck > END_FACTOR * self.limit():
            what = f"{self.named()} has not returned for {stuck:.0f} s"
            return ExitVerdict(ENV_FAILED, "failed", what, self.child.where())
        if not self.warned:
            self.warned = True
            self.warn(stuck)
        return None

    def warn(self, stuck: float) -> None:
        """Say that a call seems to hang, and where."""
        where = self.child.where()
        until = f"the run ends after {END_FACTOR * self.limit():.0f} s (env.step_timeout_seconds)"
        stopped = " (it is stopped, not by Ctrl-Z here: does it use the terminal?)" if self.child.is_stopped() else ""
        say(f"warning: {self.named()} has not returned for {stuck:.0f} s{stopped}; {until}")
        for frame in where:
            say(f"   at: {frame}")

    def limit(self) -> float:
        """Seconds after which the present call is said to hang."""
        told = float(self.child.heartbeat.run_info().get("step_seconds") or STEP_SECONDS)
        return told if self.call is None else call_limit(self.call[1], told)

    def named(self) -> str:
        """The call in words."""
        env = self.child.heartbeat.run_info().get("env") or "the environment"
        if self.call is None:
            return str(env)
        _, kind, lane = self.call
        name = CALLS[kind]
        return f"{env}: {name}" if kind in (MAKE, IMPORT) else f"{env}, lane {lane}: {name}()"

    def signalled(self, why: str) -> ExitVerdict:
        """It is ended because a signal asked for that."""
        name = signal.Signals(self.asked[0]).name
        state, code = ENDINGS[name]
        return ExitVerdict(code, state, f"stopped by {name}; {why}", self.child.where())


def call_limit(kind: int, step_seconds: float) -> float:
    """Seconds after which a call of this kind is said to hang: making an environment takes longer than a step."""
    return max(step_seconds, MAKE_SECONDS) if kind in (MAKE, IMPORT) else step_seconds


def supervised(work: Callable[[], int], is_new_request: Callable[[], bool] = lambda: True) -> int:
    """Do the work in a fork, and answer with its exit code; in the fork this raises `WorkDone`.

    `is_new_request` is asked about each signal after the first: does it ask again, to leave at once?
    """
    from qfleet.system.oom import oom_kills  # most commands need none of that room

    adopt_orphans()
    not_ours = descendants(os.getpid())
    num_oom = oom_kills()
    child = start(work)
    with forwarding(child, child.heartbeat, is_new_request) as asked, stopping(lambda: [child.pid]):
        verdict = wait(child, asked)
        end_descendants(keep=not_ours)
        drain(child)
        if verdict is None and child.code() == -signal.SIGKILL:
            verdict = killed(out_of_memory=oom_kills() > num_oom)
        if verdict is not None:
            report(verdict, child.heartbeat.run_info().get("folder"))
            return verdict.code
    return child.code() if child.code() >= 0 else pass_on(-child.code())


def killed(out_of_memory: bool) -> ExitVerdict:
    """Somebody else, or the kernel, has killed the work; its run goes on from its last checkpoint when resumed."""
    why = ", by the kernel, for lack of memory (a smaller replay.capacity needs less)" if out_of_memory else ""
    return ExitVerdict(128 + signal.SIGKILL, None, f"killed by SIGKILL{why}")


def pass_on(number: int) -> int:
    """End as the work was ended: by this signal."""
    if number in CRASHES:
        say(f"error: the process was ended by {signal.Signals(number).name}")
        return 128 + number
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def boot(module: str, words: Sequence[str]) -> int:
    """Do what a module's `main` does with these words, supervised; it saves and leaves when `--parent` is gone.

    The parent passes a signal on once, and a signal to all processes comes directly as well: that is one request. A
    parent that is asked again leaves at once, and the kernel tells so by another signal.
    """
    parent = int(words[list(words).index("--parent") + 1])
    die_with(parent, signal.SIGTERM)
    return supervised(lambda: int(import_module(module).main(words)), lambda: os.getppid() != parent)


def start(work: Callable[[], int]) -> SupervisedProcess:
    """Fork; the fork does the work and raises `WorkDone`."""
    open_standard_streams()
    heartbeat = Heartbeat()
    crash_log = unnamed_file()  # both processes have it
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        os.close(theirs)
        with suppress(OSError):
            os.setpgid(pid, pid)
        return SupervisedProcess(pid, heartbeat, ours, crash_log, adopts=True)
    os.close(ours)
    with suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C reaches it through the supervisor alone, and once
    die_with(parent)
    attach(heartbeat, theirs, crash_log)
    os.close(theirs)
    code = work()
    heartbeat.set_exit_code(code)
    raise WorkDone(code)


def wait(child: SupervisedProcess, asked: list[int]) -> ExitVerdict | None:
    """Wait until the child has ended, or end it: a verdict if it did not end by itself."""
    watch = HangWatch(child, asked)
    while not child.poll():
        child.pump(LOOK_SECONDS)
        if (verdict := watch.look()) is not None:
            child.kill()
            return verdict
    return verdict_on(child, watch)


def verdict_on(child: SupervisedProcess, watch: HangWatch) -> ExitVerdict | None:
    """What to say of a child that has ended, unless it did its work."""
    watch.call = child.heartbeat.call()
    code = child.code()
    if child.heartbeat.exit_code() is not None or (watch.call is None and code != 0):
        return None
    if code >= 0:
        return ExitVerdict(ENV_FAILED, "failed", f"{watch.named()} ended the process with exit code {code} (os._exit)")
    name = signal.Signals(-code).name
    crash = ExitVerdict(ENV_FAILED, "failed", f"{watch.named()} crashed the process ({name})", child.left())
    return crash if -code in CRASHES else None


def report(verdict: ExitVerdict, folder: str | None) -> None:
    """Say how it ended, and write it into the run's folder: nobody else is left to do so."""
    failed = verdict.state in (None, "failed")
    say(f"{'error: ' if failed else ''}{verdict.what}")
    for frame in verdict.frames:
        say(f"   at: {frame}")
    if folder is None:
        return
    with suppress(OSError, QfleetError):  # the folder may be gone
        write_down(verdict, Path(folder))
    saved = any(name.startswith("step_") for name in list_inside(Path(folder), "checkpoints"))
    say(f"  run: {folder} ({'its last checkpoint is whole' if saved else 'nothing was saved yet'})")


def write_down(verdict: ExitVerdict, path: Path) -> None:
    """Into the run's folder: how it ended."""
    from qfleet.watch.run_files import EventLog, read_json, write_json

    how = {"state": verdict.state, "exit_code": verdict.code, "reason": verdict.what, "pid": None}
    status = read_json(path / "status.json")
    if status.get("exit_code") is None:
        write_json(path / "status.json", {**status, **(how if verdict.state else {"reason": verdict.what})})
        EventLog(path / "events.jsonl").event("failed", what=verdict.what, exit_code=verdict.code)


def say(text: str) -> None:
    """A line on standard error, without control characters."""
    with suppress(OSError):
        print(escaped(text), file=sys.stderr, flush=True)


def drain(child: SupervisedProcess) -> None:
    """Pass on what was printed last."""
    os.set_blocking(child.output, False)
    with suppress(BlockingIOError):
        while data := os.read(child.output, 1 << 16):
            with suppress(OSError):
                os.write(2, data[: max(0, MOST_OUTPUT_BYTES - child.printed)])
            child.printed += len(data)
    os.close(child.output)
    os.close(child.crash_log)


@contextmanager
def forwarding(
    child: Killable, heartbeat: Heartbeat, is_new_request: Callable[[], bool] = lambda: True
) -> Iterator[list[int]]:
    """Signals that mean the run are passed on, and collected; it saves and leaves, and so do we."""
    asked: list[int] = []
    asked_at = [0.0]

    def forward(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if asked and (now - asked_at[0] < ONE_REQUEST_SECONDS or not is_new_request()):
            return
        asked_at[0] = now
        asked.append(number)
        heartbeat.set_stop_requests(len(asked))
        child.send_signal(number)

    # What is ignored, as SIGHUP by nohup, does not mean the run; the child ignores it too.
    meant = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, forward) for number in meant}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stopping(children: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Ctrl-Z stops this process, these children and all processes below them, and all go on together."""

    def stop(number: int, frame: FrameType | None) -> None:
        stopped = stop_all(children())
        os.kill(os.getpid(), signal.SIGSTOP)
        for pid in reversed(stopped):  # the shell has this process go on
            send_all([pid], signal.SIGCONT)
            time.sleep(CONTINUE_SECONDS / len(stopped))

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


# --- processes ---


def stop_all(pids: Iterable[int]) -> list[int]:
    """Stop these processes and all below them, which are answered, parents first."""
    stopped: list[int] = []
    tops = list(pids)
    while new := [pid for top in tops for pid in (top, *descendants(top)) if pid not in stopped]:
        send_all(new, signal.SIGSTOP)  # one of them may have started another meanwhile
        stopped += new
    return stopped


def die_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel end this process when its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:  # it went before the call
        os._exit(1)
