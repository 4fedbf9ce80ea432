"""Ctrl-C while a long run measures and compiles: it leaves at once, without a traceback, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qfleet.build.machine.table import MachineTable, this_machine, write_table
from tests.distributed.actors.test_process import alive, process_tree

LONG = ["train", "CartPole-v1", "until.steps=100_000_000", "until.score=none", "--out"]


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("words", ["measuring how long", "compiling the update"])
def test_ctrl_c_while_it_measures_leaves_cleanly(words: str, tmp_path: Path) -> None:
    # Whether a compiler is started depends on the time of an update, which other programs may disturb.
    kind = this_machine()
    write_table(
        MachineTable(kind).with_example("vectors", {"float32 1 thread": 1e-3}, "now"), tmp_path / "cache/qfleet"
    )
    home = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-m", "qfleet", *LONG, str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=home) as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if words in line).endswith(" s)\n")
        time.sleep(1.0)
        kin = process_tree(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "Error" not in err
    until = time.monotonic() + 10
    while alive(kin) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(kin)
    assert not list(tmp_path.glob("runs/*/run.toml"))
