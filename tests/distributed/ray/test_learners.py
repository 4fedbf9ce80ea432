"""Learners and server shards in processes of Ray: the steps of one learner; who is lost takes nobody along."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qfleet.data import Batch
from qfleet.plan.sync_schema import AllreduceSync, Int8Codec, LocalSync, ServerSync, Sync
from tests.distributed.learners.test_group import LINE, alone, made_up, small_plan, spec_of, weights
from tests.distributed.ray.test_driver import family, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]
LIMIT_SECONDS = 6.0
PLACE = {"runtime.type": "ray", "runtime.learner_cpus": 0.5, "runtime.actor_cpus": 0.5}


@pytest.fixture(scope="module")
def team() -> Iterator[Any]:
    """Three learners on a Ray of their own."""
    pytest.importorskip("ray")
    from qfleet.distributed.learners.group import LearnerGroup
    from qfleet.distributed.ray.learners import RayLearnerLauncher
    from qfleet.distributed.ray.session import session

    more = {**PLACE, "learners.timeout_seconds": LIMIT_SECONDS, "learners.restarts": 100, "optim.clip_norm": None}
    plan = small_plan(3, more=more)
    with session(plan):
        made = LearnerGroup(plan, alone(plan), RayLearnerLauncher(plan, spec_of(plan), spec_of(plan)))
        try:
            yield made
        finally:
            made.close()


def some(seed: int) -> Batch:
    return made_up(33, seed, LINE)


def pids(role: str) -> list[int]:
    return sorted(pid for pid, line in family(os.getpid()).items() if f"ray::{role}" in line)


def whole(team: Any) -> None:
    """Go on until everybody is there."""
    until = time.monotonic() + 90
    while len(team.group) < 2:
        team.update(some(99))
        assert time.monotonic() < until, team.take_events()


@pytest.mark.parametrize(
    "sync",
    [AllreduceSync(), ServerSync(shards=2), AllreduceSync(codec=Int8Codec()), LocalSync(every_updates=2)],
    ids=["allreduce", "server", "int8", "local"],
)
def test_three_learners_on_ray_make_the_steps_of_one(team: Any, sync: Sync) -> None:
    whole(team)
    team.rest()
    one = alone(team.plan)
    one.load_model_arrays(team.learner.model_arrays())
    one.load_optim_arrays(team.learner.optim_arrays())
    one.updates, before = team.learner.updates, team.learner.updates
    team.switch(sync)
    for seed in range(10):
        one.update(some(seed))
        team.update(some(seed))
    team.rest()
    assert team.learner.updates == before + 10
    near = 1e-3 if sync in (AllreduceSync(), ServerSync(shards=2)) else 0.1
    torch.testing.assert_close(weights(team.learner), weights(one), rtol=near, atol=near)
    events = team.take_events()
    ahead = sync == AllreduceSync(codec=Int8Codec())  # by one's own part of what the codec owes
    assert ahead or team.alike("targets" if isinstance(sync, ServerSync) else "all"), events
    assert not [event for event in events if event["kind"] == "learner_lost"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("sync", [AllreduceSync(), ServerSync(max_staleness=None)], ids=["allreduce", "server"])
def test_a_partner_on_ray_that_is_lost_is_replaced(team: Any, sync: Sync, how: signal.Signals) -> None:
    whole(team)
    team.switch(sync)
    team.update(some(0))
    team.take_events()
    before, begun = team.learner.updates, time.monotonic()
    victim = pids("PartnerHost")[0]
    os.kill(victim, how)
    lost: list[Any] = []
    made = 0
    while not lost:
        team.update(some(made))
        made += 1
        lost = [event for event in team.take_events() if event["kind"] == "learner_lost"]
        assert time.monotonic() - begun < 30
    assert len(lost) == 1
    assert lost[0]["replaced"]
    assert team.learner.updates == before + made
    whole(team)
    wait_for(lambda: victim not in pids("PartnerHost"))  # Ray ends one that is stopped in its own time


def test_a_shard_on_ray_that_is_lost_comes_back_with_what_rank_0_has(team: Any) -> None:
    whole(team)
    team.switch(ServerSync(shards=2))
    team.update(some(0))
    team.rest()
    team.take_events()
    before = team.learner.updates
    os.kill(pids("ShardHost")[0], signal.SIGKILL)
    for seed in range(4):
        team.update(some(seed))
    team.rest()
    events = team.take_events()
    assert team.learner.updates == before + 4
    assert not [event for event in events if event["kind"] == "learner_lost"]
    versions = [event["versions"] for event in events if event["kind"] == "server"]
    assert versions
    assert all(len(set(each)) == 1 for each in versions)
