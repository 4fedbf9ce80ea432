"""A sweep that is interrupted: its display says that members are saving, and they end with a checkpoint."""

import io
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qfleet import train_group
from qfleet.watch.console import SafeStream
from qfleet.watch.sweep_console import QuietGroup
from tests.support.runs import checkpoints, small, status


class InterruptsOnce(QuietGroup):
    """Sends this process SIGINT when a member has made its first row, and keeps the states that it is shown."""

    def __init__(self) -> None:
        super().__init__(SafeStream(io.StringIO()))
        self.interrupted = False
        self.states: list[str] = []

    def row(self, member: str, row: Any) -> None:
        if not self.interrupted and row["kind"] == "progress":
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)

    def live(self, members: Sequence[Any]) -> None:
        if self.interrupted:
            self.states += [member["state"] for member in members]


def test_members_are_shown_to_be_saving_after_ctrl_c(tmp_path: Path) -> None:
    watcher = InterruptsOnce()
    plan = small({"until.steps": 2_000_000, "save.every_steps": 1_000_000})
    made = train_group(plan, 1, out=tmp_path, name="sweep", watcher=watcher)
    assert watcher.interrupted
    assert "saving" in watcher.states
    assert made.exit_code == 130
    member = tmp_path / "sweep" / "seed-0"
    assert status(member)["state"] == "interrupted"
    assert checkpoints(member)
