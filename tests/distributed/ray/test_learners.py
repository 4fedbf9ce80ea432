"""Learners and server shards in processes of Ray: the steps of one learner; a lost learner does not harm the others."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qfleet.data import Batch
from qfleet.plan.sync_schema import AllreduceSync, Int8Codec, LocalSync, ServerSync, Sync
from tests.distributed.learners.test_group import LINE, random_batch, single_learner, small_plan, spec_of, weights
from tests.distributed.ray.test_driver import family, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]
LIMIT_SECONDS = 6.0
PLACE = {"runtime.type": "ray", "runtime.learner_cpus": 0.5, "runtime.actor_cpus": 0.5}


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """Three learners on a Ray of their own."""
    pytest.importorskip("ray")
    from qfleet.distributed.learners.group import LearnerGroup
    from qfleet.distributed.ray.learners import RayLearnerLauncher
    from qfleet.distributed.ray.session import session

    more = {**PLACE, "learners.timeout_seconds": LIMIT_SECONDS, "learners.restarts": 100, "optim.clip_norm": None}
    more["algo.target.every_updates"] = 2
    plan = small_plan(3, more=more)
    with session(plan):
        made = LearnerGroup(plan, single_learner(plan), RayLearnerLauncher(plan, spec_of(plan), spec_of(plan)))
        try:
            yield made
        finally:
            made.close()


def some(seed: int) -> Batch:
    return random_batch(33, seed, LINE)


def pids(role: str) -> list[int]:
    return sorted(pid for pid, line in family(os.getpid()).items() if f"ray::{role}" in line)


def whole(group: Any) -> None:
    """Update until all learners have joined."""
    until = time.monotonic() + 90
    while len(group.process_group.members) < 2:
        group.update(some(99))
        assert time.monotonic() < until, group.take_events()


@pytest.mark.parametrize(
    "sync",
    [AllreduceSync(), ServerSync(shards=2), AllreduceSync(codec=Int8Codec()), LocalSync(every_updates=2)],
    ids=["allreduce", "server", "int8", "local"],
)
def test_three_learners_on_ray_make_the_steps_of_one(group: Any, sync: Sync) -> None:
    whole(group)
    while group.learner.updates % 2:  # target networks are copied where learners that step alone have just agreed
        group.update(some(99))
    group.quiesce()
    one = single_learner(group.plan)
    one.load_model_arrays(group.learner.model_arrays())
    one.load_optim_arrays(group.learner.optim_arrays())
    one.updates, before = group.learner.updates, group.learner.updates
    group.set_sync_plan(sync)
    for seed in range(10):
        one.update(some(seed))
        group.update(some(seed))
    group.quiesce()
    assert group.learner.updates == before + 10
    near = 1e-3 if sync in (AllreduceSync(), ServerSync(shards=2)) else 0.1
    torch.testing.assert_close(weights(group.learner), weights(one), rtol=near, atol=near)
    events = group.take_events()
    ahead = sync == AllreduceSync(codec=Int8Codec())  # by one's own part of what the codec owes
    assert ahead or group.states_equal("targets" if isinstance(sync, ServerSync) else "all"), events
    assert not [event for event in events if event["kind"] == "learner_lost"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("sync", [AllreduceSync(), ServerSync(max_staleness=None)], ids=["allreduce", "server"])
def test_a_lost_learner_on_ray_is_restarted(group: Any, sync: Sync, how: signal.Signals) -> None:
    whole(group)
    group.set_sync_plan(sync)
    group.update(some(0))
    group.take_events()
    before, begun = group.learner.updates, time.monotonic()
    victim = pids("LearnerHost")[0]
    os.kill(victim, how)
    lost: list[Any] = []
    made = 0
    while not lost:
        group.update(some(made))
        made += 1
        lost = [event for event in group.take_events() if event["kind"] == "learner_lost"]
        assert time.monotonic() - begun < 30
    assert len(lost) == 1
    assert lost[0]["replaced"]
    assert group.learner.updates == before + made
    whole(group)
    wait_for(lambda: victim not in pids("LearnerHost"))  # Ray ends one that is stopped in its own time


def test_a_lost_shard_on_ray_is_restarted_with_rank_0s_state(group: Any) -> None:
    whole(group)
    group.set_sync_plan(ServerSync(shards=2))
    group.update(some(0))
    group.quiesce()
    group.take_events()
    before = group.learner.updates
    os.kill(pids("ShardHost")[0], signal.SIGKILL)
    for seed in range(4):
        group.update(some(seed))
    group.quiesce()
    events = group.take_events()
    assert group.learner.updates == before + 4
    assert not [event for event in events if event["kind"] == "learner_lost"]
    versions = [event["versions"] for event in events if event["kind"] == "server"]
    assert versions
    assert all(len(set(each)) == 1 for each in versions)
