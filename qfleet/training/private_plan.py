"""Where a plan with a secret in it is kept: in a folder and a file that are this user's alone."""

from pathlib import Path

from qfleet.plan import write_plan
from qfleet.plan.schema import Plan
from qfleet.plan.secrets import typed_secrets


def keep_plan(plan: Plan, file: Path) -> None:
    """Write a run's plan; if a secret was typed into it, nobody else can read it at any moment."""
    if not typed_secrets(plan):
        write_plan(plan, file)
        return
    file.parent.chmod(0o700)
    write_plan(plan, file, mode=0o600)
