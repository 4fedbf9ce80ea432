"""A process that imports everything once, then forks for each requested command.

One request per line of standard input, one reply per line of standard output, both JSON. A fork costs some
milliseconds where a fresh Python with torch costs seconds. Commands that start processes of their own start fresh ones.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.005
MOST_KILOBYTES = 3_000_000  # a command that holds more is killed, to protect the machine; the tests allow 1 GB
MOST_FILE_BYTES = 3 << 30
MOST_LOAD_FACTOR = 3.0
PR_CAPBSET_DROP = 24
CAPABILITIES = (1, 2, 3)  # DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER: with them no mode of a file counts
CAP_VERSION = 0x20080522
PREDICT = "Policy.load"  # in the place of a verb: a call from Python
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.spawn", "pty.spawn")


def import_all() -> None:
    """Import, compile and load in advance everything that commands need."""
    import gymnasium
    import matplotlib.pyplot
    import numpy
    import torch

    import qfleet.api
    import qfleet.cli.app
    import qfleet.sweep.sweep
    import qfleet.watch.compare
    from qfleet.data import Spec
    from qfleet.replay.warm import warm

    torch.set_num_threads(1)
    warm(Spec((4,), "float32", (2,)))
    gymnasium.make("CartPole-v1").close()
    matplotlib.use("Agg")
    for name in ("imageio.v2", "imageio_ffmpeg", "pygame", "pyarrow.parquet"):
        __import__(name)
    assert numpy
    assert qfleet.sweep.sweep


def act_as_plain_user() -> None:
    """If root, drop the capabilities that ignore file modes, for this process and its children."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAP_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for each in CAPABILITIES:
        libc.prctl(PR_CAPBSET_DROP, each, 0, 0, 0)
        for index in (0, 1):  # effective, permitted
            sets[index] &= ~(1 << each)
    libc.capset(header, sets)


def install_audit_hook(file: int, root: str) -> None:
    """Log every started program, every connection, and every executed code below `root`."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        text = ""
        if event in STARTS:
            text = f"start {args[0]!r} {args[1] if len(args) > 1 else ''!r}"
        elif event == "socket.connect" and isinstance(args[1], tuple):
            text = f"connect {args[1]!r}"
        elif event == "exec" and str(getattr(args[0], "co_filename", "")).startswith(root):
            text = f"code {args[0].co_filename}"
        if text:
            os.write(file, (text.replace("\n", " ") + "\n").encode(errors="replace"))

    sys.addaudithook(hook)


def set_up_process(request: dict[str, Any]) -> None:
    """Set standard streams, folder, environment and limits of the command."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(request["log"] + ".out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    err = os.open(request["log"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    audit = os.open(request["log"] + ".audit", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    for number, file in enumerate((nothing, out, err)):
        os.dup2(file, number)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
    act_as_plain_user()
    install_audit_hook(audit, request["root"])


def predict(arguments: list[str]) -> int:
    """Load a policy in Python and let it choose an action; returns what a command would."""
    import numpy

    from qfleet import Policy
    from qfleet.errors import QfleetError
    from qfleet.escape import indented

    try:
        action, _ = Policy.load(arguments[1]).predict(numpy.zeros(4))
    except QfleetError as error:
        print(indented(error), file=sys.stderr)  # its text may be printed as commands print it
        return error.exit_code
    print("chose", action)
    return 0


def run_command(request: dict[str, Any]) -> None:
    """In the forked process: run the command line and leave with its exit code."""
    code = 99
    try:
        set_up_process(request)
        sys.argv = ["qfleet", *request["arguments"]]
        from qfleet.cli.entry import main

        calls = {PREDICT: predict}
        code = calls.get(request["arguments"][0], main)(request["arguments"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def session_of(pid: str) -> int | None:
    """The session that a process belongs to; None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])


def members(session: int) -> list[int]:
    """Living processes of a session."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and session_of(name) == session]


def end_all(session: int) -> int:
    """Kill the processes that a command has left behind; returns how many there were."""
    limit = time.monotonic() + load_adjusted(5.0)
    while members(session) and time.monotonic() < limit:
        time.sleep(0.02)  # those that end with their parent take a moment
    left = members(session)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(left)


def resident_kilobytes(pid: int) -> int:
    """Memory that a process holds now."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize() // 1024


def load_adjusted(limit_seconds: float) -> float:
    """The limit, extended if more processes than cores are runnable.

    With QFLEET_STRICT_LIMITS set it is not extended: for a machine that does nothing else.
    """
    if os.environ.get("QFLEET_STRICT_LIMITS"):
        return limit_seconds
    return limit_seconds * min(MOST_LOAD_FACTOR, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def supervise(pid: int, limit_seconds: float) -> dict[str, Any]:
    """Wait for the command, and end it when it takes too long or too much memory."""
    begin = time.monotonic()
    stopped = ""
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if not stopped and time.monotonic() - begin > load_adjusted(limit_seconds):
            stopped = "time"
        elif not stopped and resident_kilobytes(pid) > MOST_KILOBYTES:
            stopped = "memory"
        if stopped:
            os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    seconds = time.monotonic() - begin
    code = os.waitstatus_to_exitcode(status)
    left = end_all(pid)
    return {"code": code, "stopped": stopped, "seconds": seconds, "megabytes": usage.ru_maxrss // 1024, "left": left}


def serve() -> None:
    """Answer requests until standard input ends."""
    import_all()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_command(request)
        reply = supervise(pid, request["limit_seconds"])
        print(json.dumps({"number": request["number"], **reply}), flush=True)


if __name__ == "__main__":
    serve()
