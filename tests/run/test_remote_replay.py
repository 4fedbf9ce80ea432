"""A replay in a process of its own, asked directly: what it answers, and what happens when it does not."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from qfleet.plan import make_plan
from qfleet.plan.schema import Processes
from qfleet.run.processes import fork_server
from qfleet.run.remote_replay import RemoteReplay
from qfleet.run.resolve import resolve
from qfleet.run.wiring import ReplayLost, make_train_world
from tests.run.parts import SMALL

pytestmark = pytest.mark.timeout(110)


@pytest.fixture
def replay() -> Iterator[RemoteReplay]:
    more: dict[str, Any] = {"runtime.type": "processes", "runtime.replay_process": True, "runtime.hung_seconds": 1}
    plan = make_plan("CartPole-v1", overrides={**SMALL, **more})
    spec = make_train_world(plan).spec
    plan = resolve(plan, spec)
    assert isinstance(plan.runtime, Processes)
    made = RemoteReplay(plan, spec, fork_server(), plan.runtime)
    yield made
    made.close()


def test_one_that_is_stopped_in_the_middle_of_a_message_is_given_up(replay: RemoteReplay) -> None:
    assert len(replay) == 0
    assert replay.process is not None
    assert replay.process.pid is not None
    os.kill(replay.process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(ReplayLost, match="died"):  # far more than a pipe holds
        replay.call("items", {"serials": np.zeros(1 << 20, np.int64)})
    assert 0.9 < time.monotonic() - begun < 10
    replay.process.join(10)  # its death is told a moment after the pipe's end
    assert not replay.process.is_alive()


def test_one_that_was_given_up_is_started_again_as_often_as_allowed(replay: RemoteReplay) -> None:
    for at in range(5):
        assert replay.budget.charge(float(at))
    assert not replay.budget.charge(5.0)
    replay.start()
    assert len(replay) == 0
