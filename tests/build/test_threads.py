"""Threads of updates and native worlds: with a run's other processes they keep no more cores busy than there are."""

from typing import Any

import pytest

from qfleet import Plan
from qfleet.build import threads, worlds
from qfleet.build.resolve import with_runtime
from qfleet.build.threads import choose_parallel, choose_threads, num_other_processes
from qfleet.build.worlds import world_threads
from qfleet.plan import make_plan
from tests.support.runs import PONG, small

OPERATIONS = {"runtime.parallel": "operations"}
ACTORS = {"runtime.type": "processes", "actors.num": 2, "env.num": 4}


def pong(settings: dict[str, Any]) -> Plan:
    """With `runtime.parallel` chosen, and threads left open."""
    plan = small({**PONG, "runtime.threads": None, **settings}, "ALE/Pong-v5")
    return with_runtime(plan, parallel=choose_parallel(plan))


def set_cores(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (threads, worlds):
        monkeypatch.setattr(module, "usable_cores", lambda: num)


@pytest.mark.parametrize(
    ("num_cores", "settings", "expected"),
    [
        # Divided into tasks: the learner's thread, and a second one that pauses while another process needs its core.
        (1, {}, 1),
        (2, {}, 2),
        (16, {}, 2),
        (2, ACTORS, 2),
        (2, {"runtime.threads": 1}, 1),
        # Operations take every core that nobody else needs.
        (8, OPERATIONS, 8),
        (8, {**OPERATIONS, **ACTORS}, 6),
        (8, {**OPERATIONS, **ACTORS, "env.workers": 2}, 4),  # four processes step environments while their actors wait
        (8, {**OPERATIONS, **ACTORS, "runtime.replay_process": True}, 5),
        (8, {**OPERATIONS, **ACTORS, "runtime.inference": "central"}, 5),
        (8, {**OPERATIONS, "env.workers": 2}, 6),
        (2, {**OPERATIONS, **ACTORS}, 1),
        (1, {**OPERATIONS, **ACTORS}, 1),
        (8, {**OPERATIONS, "runtime.threads": 12, **ACTORS}, 12),  # the user's own number
        # Learners compute all the time.
        (8, {**OPERATIONS, "learners.num": 2}, 4),
        (8, {"learners.num": 2}, 2),
        (2, {"learners.num": 2}, 1),
        (2, {"learners.num": 4}, 1),
        # Small networks.
        (8, {"net.torso.type": "mlp", "net.torso.width": None}, 1),
    ],
)
def test_an_update_uses_the_cores_that_are_left(
    num_cores: int, settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cores(num_cores, monkeypatch)
    assert choose_threads(pong(settings)) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 8), ({"runtime.address": "10.0.0.1:6379", "runtime.allow_no_token": True}, 0), ({"actors.num": 1}, 1)],
)
def test_actors_of_a_cluster_are_elsewhere(settings: dict[str, Any], expected: int) -> None:
    plan = pong({"runtime.type": "ray", "actors.num": 8, "env.num": 8, **settings})
    assert num_other_processes(plan) == expected


@pytest.mark.parametrize(
    ("num_cores", "settings", "expected"),
    [
        (2, {}, 1),
        (8, {}, 4),  # no more than environments
        (4, {}, 2),
        (4, {"runtime.threads": 1}, 3),
        (2, {"runtime.threads": 2}, 1),  # as in a new run, so in one that goes on and has its number of threads
    ],
)
def test_native_worlds_use_the_cores_that_updates_leave(
    num_cores: int, settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cores(num_cores, monkeypatch)
    assert world_threads(pong(settings), 4) == expected


@pytest.mark.parametrize("settings", [{}, {"runtime.threads": 2}])
def test_native_worlds_use_every_core_if_no_updates_are_made_meanwhile(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cores(3, monkeypatch)
    assert world_threads(make_plan("ALE/Pong-v5", "pqn", settings), 4) == 3
