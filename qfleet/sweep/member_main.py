"""One member of a sweep, in the supervised fork of its process: trains or resumes, and sends rows to its parent."""

import sys
import traceback
from socket import socket
from typing import Any

import msgspec

from qfleet.api import resume, train
from qfleet.errors import QfleetError
from qfleet.escape import indented
from qfleet.plan import read_plan
from qfleet.run_object import Run
from qfleet.sweep.member_parts import unpack_member_parts
from qfleet.sweep.member_process import MemberRow, MemberSetup, MemberWarning, send
from qfleet.system.worker_errors import FinalError
from qfleet.training.env_trust import require_places, require_trust
from qfleet.training.process.forward_signals import ENDINGS
from qfleet.watch.console import RowWatcher
from qfleet.watch.run_directory import is_run
from qfleet.watch.run_files import json_value

PLAN_FILE = "plan.toml"


def train_member(setup: MemberSetup, connection: socket) -> int:
    """Train or resume one member; the exit code is that of the run."""
    try:
        return _run(setup, _watcher(connection)).exit_code
    except KeyboardInterrupt:
        return ENDINGS["SIGINT"][1]
    except QfleetError as error:
        return _report(error, connection)
    except Exception as error:
        traceback.print_exc()
        why = "This is a bug in qfleet, not in what you did."
        return _report(QfleetError(f"{type(error).__name__}: {error}", why), connection)


def _run(setup: MemberSetup, watcher: RowWatcher) -> Run:
    path = setup.group / setup.name
    given = unpack_member_parts(setup.parts).arguments()
    if is_run(path):
        trust: dict[str, Any] = {"trust_env": setup.trust_env, "trust_run": setup.trust_run}
        return resume(path, steps=setup.steps, strict=setup.strict, watcher=watcher, **trust, **given)
    plan = read_plan(setup.group / PLAN_FILE)
    require_trust(setup.group, plan.env, setup.trust_env or setup.trust_run)
    require_places(setup.group, plan, setup.trust_run)
    return train(
        msgspec.structs.replace(plan, seed=setup.seed),
        out=setup.group,
        name=setup.name,
        watcher=watcher,
        weights_from=setup.weights_from,
        command=["qfleet", "train", "--plan", str(setup.group / PLAN_FILE), "--seed", str(setup.seed)],
        **given,
    )


def _watcher(connection: socket) -> RowWatcher:
    """Sends rows and warnings to the sweep, which shows them."""
    return RowWatcher(
        lambda row: send(connection, MemberRow(json_value(row))), lambda text: send(connection, MemberWarning(text))
    )


def _report(error: QfleetError, connection: socket) -> int:
    """Report an error to the sweep and to the log; returns its exit code."""
    print(f"error: {indented(error)}", file=sys.stderr)
    send(connection, FinalError(error.what, error.why, error.fix, error.exit_code))
    return error.exit_code
