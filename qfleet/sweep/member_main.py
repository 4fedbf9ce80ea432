"""One member of a sweep, in a process of its own: trains or resumes, prints rows, and ends with its parent."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from qfleet import heartbeat
from qfleet.api import Run, resume, train
from qfleet.errors import QfleetError
from qfleet.escape import indented
from qfleet.plan import read_plan
from qfleet.system.child_process import die_with_parent
from qfleet.training.env_trust import require_places, require_trust
from qfleet.training.process.forward_signals import ENDINGS
from qfleet.watch import json_line
from qfleet.watch.console import JsonWatcher, SafeStream
from qfleet.watch.run_directory import is_run

PLAN_FILE = "plan.toml"


def main(argv: Sequence[str]) -> int:
    """Train or resume one member; the exit code is that of the run."""
    arguments = _parse(argv)
    try:
        _stop_with_parent(arguments.parent)
        return _run(arguments).exit_code
    except KeyboardInterrupt:
        return ENDINGS["SIGINT"][1]
    except QfleetError as error:
        return _print_error(error)
    except Exception as error:
        traceback.print_exc()
        return _print_error(
            QfleetError(f"{type(error).__name__}: {error}", "This is a bug in qfleet, not in what you did.")
        )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("qfleet member")
    parser.add_argument("--group", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--weights-from", type=Path)
    parser.add_argument("--trust-env", action="store_true")
    parser.add_argument("--trust-run", action="store_true")
    parser.add_argument("--strict", action="store_true")
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> Run:
    path = arguments.group / arguments.name
    watcher = _watcher()
    if is_run(path):
        trust = {"trust_env": arguments.trust_env, "trust_run": arguments.trust_run}
        return resume(path, steps=arguments.steps, strict=arguments.strict, watcher=watcher, **trust)
    plan = read_plan(arguments.group / PLAN_FILE)
    require_trust(arguments.group, plan.env, arguments.trust_env or arguments.trust_run)
    require_places(arguments.group, plan, arguments.trust_run)
    return train(
        msgspec.structs.replace(plan, seed=arguments.seed),
        out=arguments.group,
        name=arguments.name,
        watcher=watcher,
        weights_from=arguments.weights_from,
        command=["qfleet", "train", "--plan", str(arguments.group / PLAN_FILE), "--seed", str(arguments.seed)],
    )


def _watcher() -> JsonWatcher:
    """Prints rows for the parent; warnings are rows too, so that the sweep can show them."""
    out = SafeStream(sys.stdout)
    return JsonWatcher(out, lambda text: out.write_line(json_line({"kind": "warning", "text": text})))


def _stop_with_parent(parent: int) -> None:
    """Have the kernel request a stop when the parent ends; under a supervisor that is its task."""
    if heartbeat.is_attached():
        return
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call
        raise QfleetError(
            "the group's own process has ended", "Its members do not go on without it.", "Resume the group."
        )


def _print_error(error: QfleetError) -> int:
    """Print an error for the parent and the log; returns its exit code."""
    print(f"error: {indented(error)}", file=sys.stderr)
    SafeStream(sys.stdout).write_line(
        json_line({"kind": "error", "what": error.what, "why": error.why, "fix": error.fix})
    )
    return error.exit_code
