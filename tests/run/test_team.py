"""Several learners: the same learning as by one, whoever is lost on the way. Real processes."""

import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.data import Array, Batch
from qfleet.learn.parts import chosen
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.plan.together import (
    AdmmSync,
    AllreduceSync,
    Bf16Codec,
    EasgdSync,
    Fp16Codec,
    GossipSync,
    Int8Codec,
    LocalSync,
    PowerSgdCodec,
    ServerSync,
    SignCodec,
    Sync,
    TernaryCodec,
    TopKCodec,
)
from qfleet.replay import make_cut
from qfleet.run.partner import lone_learner
from qfleet.run.resolve import resolve
from qfleet.run.team import Speeds, Team, owners_of, share_of
from qfleet.run.wiring import make_train_world
from tests.run.parts import SMALL

pytestmark = pytest.mark.timeout(110)
LIMIT_SECONDS = 3.0
CODECS = (
    Fp16Codec(),
    Bf16Codec(),
    Int8Codec(),
    SignCodec(),
    TernaryCodec(),
    TopKCodec(share=0.1),
    TopKCodec(share=0.1, sampled=True),
    PowerSgdCodec(rank=1),
)
SYNCS: tuple[Sync, ...] = (
    LocalSync(every_updates=2),
    LocalSync(every_updates=2, outer_rate=0.7),
    EasgdSync(every_updates=2),
    AdmmSync(every_updates=2),
    GossipSync(),
    ServerSync(shards=2),
    ServerSync(shards=2, codec=Int8Codec()),
    ServerSync(max_staleness=4),
    ServerSync(max_staleness=None, window=2, slow_down=True),
    ServerSync(max_staleness=None, window=3, window_seconds=0.01, reduce="sum"),
    ServerSync(spare=1),
    *(AllreduceSync(codec=codec, check_every_rounds=2) for codec in CODECS),
    AllreduceSync(reduce="sum"),
    AllreduceSync(),
)


def small_plan(num: int, **more: Any) -> Plan:
    settings = {"learners.num": num, "learners.timeout_seconds": LIMIT_SECONDS, "algo.batch_size": 32}
    plan = make_plan("CartPole-v1", overrides={**SMALL, **settings, **more})
    return resolve(plan, make_train_world(plan).spec)


def make_team(plan: Plan) -> Team:
    spec = make_train_world(plan).spec
    return Team(plan, spec, spec, make_cut(plan.algo), lone_learner(plan, spec, spec, None))


def made_up(num: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)

    def looks() -> Array:
        return rng.normal(size=(num, 4)).astype(np.float32)

    ones = np.ones(num, np.float32)
    weight = rng.random(num).astype(np.float32)
    return Batch(looks(), rng.integers(0, 2, num), ones, ones * 0.9, looks(), weight, np.arange(num))


@pytest.fixture
def team() -> Iterator[Team]:
    made = make_team(small_plan(3))
    yield made
    made.close()


def weights(team: Team) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in team.learner.online_tensors])


def test_three_learners_make_the_steps_of_one(team: Team) -> None:
    plan = small_plan(1)
    spec = make_train_world(plan).spec
    alone = lone_learner(plan, spec, spec, None)
    for seed in range(20):
        one, three = alone.update(made_up(32, seed)), team.update(made_up(32, seed))  # 11, 11 and 10 items
        np.testing.assert_allclose(three.priority, one.priority, rtol=2e-3, atol=1e-4)
        assert math.isclose(three.stats["gradient_norm"], one.stats["gradient_norm"], rel_tol=1e-3)
    own = torch.cat([tensor.flatten() for tensor in alone.online_tensors])
    torch.testing.assert_close(weights(team), own, rtol=1e-3, atol=1e-4)
    assert team.learner.updates == alone.updates == 20


def test_a_server_makes_the_steps_of_one() -> None:
    plan = small_plan(3, **{"sync.type": "server", "sync.shards": 2, "optim.clip_norm": None})
    spec, team = make_train_world(plan).spec, make_team(plan)
    alone = lone_learner(plan, spec, spec, None)
    try:
        for seed in range(20):
            alone.update(made_up(33, seed))
            team.update(made_up(33, seed))
        own = torch.cat([tensor.flatten() for tensor in alone.online_tensors])
        torch.testing.assert_close(weights(team), own, rtol=1e-3, atol=1e-4)
        team.rest()
        for one, other in zip(alone.everything(), team.learner.everything(), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-4)
    finally:
        team.close()


def test_everybody_agrees_in_every_way_one_after_the_other(team: Team) -> None:
    for sync in SYNCS:
        team.switch(sync)
        before = weights(team).clone()
        heard = 0
        for seed in range(4):
            report = team.update(made_up(32, seed))
            heard += int(np.isfinite(report.priority).sum()) + sum(len(ids) for ids, _ in report.late)
        team.rest()
        assert heard + sum(len(ids) for ids, _ in team.late) == 4 * 32, sync
        team.late.clear()
        assert not torch.equal(weights(team), before)
    assert team.learner.updates == 4 * len(SYNCS)
    assert team.number == len(SYNCS)  # a new group for each, in which all began alike


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_shard_that_is_lost_comes_back_with_what_rank_0_has(team: Team, how: signal.Signals) -> None:
    team.switch(ServerSync(shards=2))
    team.update(made_up(32))
    team.rest()
    pid = team.servers[1].process.pid
    assert pid is not None
    os.kill(pid, how)
    for seed in range(2):
        report = team.update(made_up(32, seed))
        assert np.isfinite(report.priority).all()
    assert team.learner.updates == 3
    told = [server.ask("state")["version"] for server in team.servers]
    assert told == [2, 2]  # both began anew, together


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_who_is_lost_is_done_without_and_replaced(team: Team, how: signal.Signals) -> None:
    team.update(made_up(32))
    lost = team.mates[1].process
    assert lost.pid is not None
    os.kill(lost.pid, how)
    begun = time.monotonic()
    report = team.update(made_up(32, 1))
    assert time.monotonic() - begun < 2 * LIMIT_SECONDS + 10
    assert team.learner.updates == 2
    events = report.stats["learners"]
    (gone,) = [event for event in events if event["kind"] == "learner_lost"]
    assert gone["learner"] == 1
    assert gone["replaced"]
    assert not lost.is_alive()
    until = time.monotonic() + 60
    while len(team.group) < 2 and time.monotonic() < until:
        team.update(made_up(32, 2))
    assert len(team.group) == 2
    report = team.update(made_up(32, 3))
    assert np.isfinite(report.priority).all()


def test_nobody_is_left_and_the_run_goes_on_alone() -> None:
    team = make_team(small_plan(2, **{"learners.restarts": 0}))
    try:
        pid = team.mates[1].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        team.update(made_up(32))
        report = team.update(made_up(32, 1))
        assert team.learner.updates == 2
        assert not team.mates
        assert np.isfinite(report.priority).all()
    finally:
        team.close()


def test_weights_that_are_replaced_reach_everybody(team: Team) -> None:
    team.update(made_up(32))
    saved, moments = team.learner.model_arrays(), team.learner.optim_arrays()
    for seed in range(3):
        team.update(made_up(32, seed))
    after = weights(team).clone()
    team.learner.load_model_arrays(saved)
    team.learner.load_optim_arrays(moments)
    team.learner.updates = 1
    for seed in range(3):
        team.update(made_up(32, seed))
    assert torch.equal(weights(team), after)


def test_a_batch_that_is_not_finite_moves_nobody(team: Team) -> None:
    from qfleet.learn import NonFiniteUpdate

    team.update(made_up(32))
    before, bad = weights(team).clone(), made_up(32)
    bad.reward[1] = np.nan  # in the part of rank 1
    with pytest.raises(NonFiniteUpdate):
        team.update(bad)
    assert torch.equal(weights(team), before)
    team.update(made_up(32, 1))
    assert team.learner.updates == 2


def test_parts_are_a_whole() -> None:
    batch, owners = made_up(10), owners_of(10, [1.0] * 3)
    parts = [chosen(batch, owners == rank) for rank in range(3)]
    assert sorted(np.concatenate([part.ids for part in parts]).tolist()) == list(range(10))
    assert [len(part.ids) for part in parts] == [4, 3, 3]
    assert sum(share_of(owners, rank, 3) for rank in range(3)) == pytest.approx(3.0)
    assert share_of(owners_of(9, [1.0] * 3), 1, 3) == 1.0


def test_shares_follow_speeds() -> None:
    speeds = Speeds(2, balance=True)
    named: list[int] = []
    for _ in range(200):
        owners = owners_of(32, speeds.shares)
        for rank, speed in enumerate((1_000.0, 500.0)):
            items = int((owners == rank).sum())
            speeds.note(rank, items, items / speed)
        named += speeds.settle()
    owners = owners_of(30, speeds.shares)
    assert [int((owners == rank).sum()) for rank in range(2)] == [20, 10]  # half as fast: half as many
    assert [share_of(owners, rank, 2) for rank in range(2)] == pytest.approx([4 / 3, 2 / 3])
    assert set(owners[:6].tolist()) == {0, 1}  # both from the beginning on
    assert not named  # two thirds of the mean is not worth a word


def test_who_is_slow_is_named_once_and_shares_stay_equal_without_balance() -> None:
    speeds, fixed = Speeds(3, balance=True), Speeds(3, balance=False)
    named: list[int] = []
    for _ in range(300):
        for rank, speed in enumerate((1_000.0, 1_000.0, 100.0)):
            speeds.note(rank, 10, 10 / speed)
            fixed.note(rank, 10, 10 / speed)
        named += speeds.settle()
        assert not fixed.settle()
    assert named == [2]
    assert fixed.shares == [1.0] * 3
    owners = owners_of(4, speeds.shares)
    assert set(owners.tolist()) == {0, 1, 2}  # nobody is left without
