"""Where a plan with a secret in it is kept: in a folder and a file that are this user's alone."""

import os
from pathlib import Path

from qfleet.plan import write_plan
from qfleet.plan.schema import Plan
from qfleet.plan.secrets import typed_secrets
from qfleet.watch.metrics import open_plain


def keep_plan(plan: Plan, file: Path) -> None:
    """Write a run's plan; if a secret was typed into it, nobody else can read it at any moment."""
    if not typed_secrets(plan):
        write_plan(plan, file)
        return
    file.parent.chmod(0o700)
    write_plan(plan, file)
    with open(open_plain(file), "rb") as written:
        os.fchmod(written.fileno(), 0o600)
