"""Stand-ins for members: what their processes do comes from a file. They import neither numpy nor torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from qfleet.sweep.member_process import MemberRow, MemberSetup, MemberWarning, send
from qfleet.system.cores import usable_cores
from qfleet.system.worker_errors import FinalError

Given = tuple[MemberSetup, socket.socket]


def act(given: Given) -> None:
    """Do what `acts.json` says: sleep, send a row, talk, leave with a code; note when this began and ended."""
    setup, connection = given
    acts = json.loads((setup.group / "acts.json").read_text())[setup.name]

    def note(what: str) -> None:
        with (setup.group / "notes").open("a") as file:
            file.write(f"{time.monotonic()} {what} {setup.name} {os.getpid()}\n")

    def hear(number: int, frame: object) -> None:
        note(signal.Signals(number).name)
        if "stubborn" not in acts:
            sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hear)
    note("begin")
    for word in acts:
        what, _, value = word.partition("=")
        if what == "sleep":
            until = time.monotonic() + float(value)
            while time.monotonic() < until:
                time.sleep(0.01)
        elif what == "row":
            send(connection, MemberRow({"kind": "progress", "env_steps": int(value)}))
        elif what == "long":
            send(connection, MemberRow({"kind": "eval", "returns": [0.5] * int(value)}))
        elif what == "say":
            print(value, flush=True)
        elif what == "threads":
            facts = {
                "threads": os.environ["OMP_NUM_THREADS"],
                "cores": usable_cores(),
                "light": not {"numpy", "torch"} & set(sys.modules),
            }
            send(connection, MemberRow({"kind": "threads", **facts}))
        elif what == "leads":
            send(connection, MemberRow({"kind": "leads", "leads": os.getpgrp() == os.getpid()}))
        elif what == "start":
            subprocess.Popen(["sleep", value], start_new_session=True)
        elif what == "exit":
            note("end")
            sys.exit(int(value))
        elif what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    note("end")


def play(given: Given) -> None:
    """Make a run folder and end as the file $PLAYS says, by name: "CODE STATE [MEAN]"."""
    setup, connection = given
    code, state, *mean = json.loads(Path(os.environ["PLAYS"]).read_text())[setup.name].split()
    folder = setup.group / setup.name
    flags = [f"--{name}" for name in ("trust-env", "trust-run", "strict") if getattr(setup, name.replace("-", "_"))]
    flags += [] if setup.steps is None else ["--steps", str(setup.steps)]
    with open(os.environ["PLAYS"] + ".said", "a") as file:
        verb = "resume" if (folder / "run.toml").exists() else "train"
        file.write(" ".join([setup.name, verb, *flags]) + "\n")
    if state == "refused":
        send(connection, FinalError("the world is flat"))
        sys.exit(int(code))
    (folder / "checkpoints" / "step_000000000100").mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(
        (setup.group / "plan.toml").read_text().replace("seed = 0", f"seed = {setup.seed}")
    )
    score = {"mean": float(mean[0]), "low": 0.0, "high": 1.0} if mean else None
    row = {"kind": "end", "seconds": 1.0, "env_steps": 100, "updates": 10, "score": score}
    send(connection, MemberRow(row))
    told = {"state": state, "exit_code": int(code), "reason": "as played", "score": score, "env_steps": 100}
    (folder / "status.json").write_text(json.dumps(told))
    sys.exit(int(code))


def warn_and_play(given: Given) -> None:
    """Send a warning first."""
    send(given[1], MemberWarning("step_1 is damaged"))
    play(given)
