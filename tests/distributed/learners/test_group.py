"""Several learners: the same learning as by one, whoever is lost on the way. Real processes."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from qfleet.audit.checks import check_history
from qfleet.build.components import make_train_world, rejoin, together
from qfleet.build.resolve import resolve
from qfleet.data import Array, Batch, Spec
from qfleet.data.wire_format import Parts
from qfleet.distributed.learners.batch_scatter import SplitScatter
from qfleet.distributed.learners.group import LearnerGroup
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.learners.launcher import LocalLearnerLauncher
from qfleet.distributed.learners.worker import lone_learner
from qfleet.distributed.parameter_server import driver
from qfleet.distributed.parameter_server.driver import ShardProcess, ShardProcesses
from qfleet.distributed.parameter_server.shard import WeightBlock
from qfleet.learn import Learner, NonFiniteUpdate
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import (
    AdmmSync,
    AllreduceSync,
    Bf16Codec,
    EasgdSync,
    Fp16Codec,
    GossipSync,
    Int8Codec,
    LocalSync,
    NoCodec,
    PowerSgdCodec,
    ServerSync,
    SignCodec,
    Sync,
    TernaryCodec,
    TopKCodec,
    WindowSync,
)
from qfleet.replay import make_cut
from qfleet.sync.comm import CommLost
from qfleet.sync.served import ServerClient
from qfleet.sync.shard import Push
from tests.support.runs import SMALL, Settings, process_of

pytestmark = pytest.mark.timeout(110)
LIMIT_SECONDS, LEFT_OUT = 3.0, object()  # until one that is stopped counts as lost
LINE = Spec((4,), "float32", (2,))
CONVOLUTIONS = {
    "net.torso.type": "minatar",
    "net.torso.sizes": LEFT_OUT,
    "optim.learning_rate": 0.01,
    "optim.eps": 1e-3,
}
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
ALIKE: tuple[Sync, ...] = (  # after every second update everybody has the same
    LocalSync(every_updates=2),
    *(AllreduceSync(codec=codec, send="gradients", check_every_rounds=2) for codec in CODECS),
    AllreduceSync(reduce="sum"),
    AllreduceSync(),
)
OWN_MOMENTS: tuple[Sync, ...] = (  # but the same weights
    LocalSync(every_updates=2, outer_rate=0.7, codec=Int8Codec()),
    AllreduceSync(send="steps"),
)
APART: tuple[Sync, ...] = (
    *(AllreduceSync(codec=codec, send="steps", check_every_rounds=2) for codec in CODECS),  # each looks ahead
    LocalSync(every_updates=2, codec=Int8Codec()),
    EasgdSync(every_updates=2),
    AdmmSync(every_updates=2),
    GossipSync(),
    ServerSync(shards=2),  # moments live in the shards: partners' own are as they were
    ServerSync(shards=2, codec=Int8Codec()),
    ServerSync(max_staleness=4),
    WindowSync(slow_down=True),
    WindowSync(num_gradients=3, window_seconds=0.01, reduce="sum"),
    ServerSync(spare=1),
)
LOSSES = (
    AllreduceSync(),
    GossipSync(),
    LocalSync(every_updates=1),
    ServerSync(shards=2),
    ServerSync(max_staleness=4),
)

STRIKES = [
    pytest.param(
        sync,
        how,
        id=f"{sync.__struct_config__.tag}-{how.name}-{number}",
        marks=() if (how == signal.SIGKILL and number < 4) or number == 0 else pytest.mark.slow,  # some take long
    )
    for number, sync in enumerate(LOSSES)
    for how in (signal.SIGKILL, signal.SIGSTOP)
]


def small_plan(num: int, env: str = "CartPole-v1", more: Settings | None = None) -> Plan:
    settings = {"learners.num": num, "algo.batch_size": 32}
    asked = {name: value for name, value in {**SMALL, **settings, **(more or {})}.items() if value is not LEFT_OUT}
    plan = make_plan(env, overrides=asked)
    return resolve(plan, make_train_world(plan).spec)


def spec_of(plan: Plan) -> Spec:
    return make_train_world(plan).spec


def alone(plan: Plan) -> Learner:
    return lone_learner(plan, spec_of(plan), spec_of(plan), None)


@contextmanager
def teamed(plan: Plan) -> Iterator[LearnerGroup]:
    team = LearnerGroup(
        plan, alone(plan), LocalLearnerLauncher(plan, spec_of(plan), spec_of(plan), make_cut(plan.algo))
    )
    try:
        yield team
    finally:
        team.close()


def made_up(num: int, seed: int = 0, spec: Spec = LINE) -> Batch:
    rng = np.random.default_rng(seed)

    def looks() -> Array:
        if spec.dtype == "uint8":
            return rng.integers(0, 2, (num, *spec.input_shape)).astype(np.uint8)
        return rng.normal(size=(num, *spec.input_shape)).astype(np.float32)

    ones, weight = np.ones(num, np.float32), rng.random(num).astype(np.float32)
    return Batch(looks(), rng.integers(0, spec.num_actions, num), ones, ones * 0.9, looks(), weight, np.arange(num))


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.distributed.learners.group.GRACE_SECONDS", 1.0)


@pytest.fixture
def team() -> Iterator[LearnerGroup]:
    with teamed(small_plan(3)) as made:
        yield made


@pytest.fixture
def hasty() -> Iterator[LearnerGroup]:
    """A team that does not wait long for anybody."""
    with teamed(small_plan(3, more={"learners.timeout_seconds": LIMIT_SECONDS})) as made:
        yield made


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in learner.online_tensors])


def strike(pid: int | None, how: signal.Signals) -> None:
    assert pid is not None
    os.kill(pid, how)


def lost(team: LearnerGroup) -> list[int]:
    return [event["learner"] for event in team.take_events() if event["kind"] == "learner_lost"]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit


@pytest.mark.parametrize(
    ("env", "more"),
    [
        ("CartPole-v1", {}),
        pytest.param("MinAtar/Breakout-v0", CONVOLUTIONS, marks=pytest.mark.slow),  # weights laid out otherwise
        ("CartPole-v1", {"learners.backend": "gloo"}),
        ("CartPole-v1", {"learners.backend": "gloo", "sync.bucket_bytes": 200}),
        pytest.param(
            "MinAtar/Breakout-v0",
            {**CONVOLUTIONS, "learners.backend": "gloo", "sync.bucket_bytes": 20_000},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "CartPole-v1",
            {"learners.backend": "gloo", "sync.bucket_bytes": 200, "net.dueling": True},
            marks=pytest.mark.slow,
        ),
        ("CartPole-v1", {"sync.type": "server", "sync.shards": 2, "optim.clip_norm": None}),
        ("CartPole-v1", {"sync.type": "local", "sync.every_updates": 1, "optim.type": "sgd"}),
    ],
    ids=["allreduce", "convolutions", "gloo", "buckets", "buckets of convolutions", "autograd", "server", "local"],
)
def test_three_learners_make_the_steps_of_one(env: str, more: dict[str, Any]) -> None:
    plan = small_plan(3, env, more)
    spec, one = spec_of(plan), alone(plan)
    with teamed(plan) as team:
        for seed in range(20):
            expected, report = one.update(made_up(33, seed, spec)), team.update(made_up(33, seed, spec))
            np.testing.assert_allclose(report.priority, expected.priority, rtol=5e-3, atol=2e-4)
        torch.testing.assert_close(weights(team.learner), weights(one), rtol=1e-3, atol=2e-4)
        team.rest()
        for own, other in zip(team.learner.everything(), one.everything(), strict=True):
            torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-4)
        assert team.learner.updates == one.updates == 20


def test_parts_of_different_sizes_count_by_their_items(team: LearnerGroup) -> None:
    one = alone(small_plan(1))
    for seed in range(5):
        expected, report = one.update(made_up(32, seed)), team.update(made_up(32, seed))  # 11, 11 and 10 items
        assert math.isclose(report.stats["gradient_norm"], expected.stats["gradient_norm"], rel_tol=1e-3)


def test_everybody_agrees_in_every_way_one_after_the_other() -> None:
    # Targets follow when all have met.
    with teamed(small_plan(3, more={"algo.target.every_updates": 2})) as team:
        ways = (*APART, *OWN_MOMENTS, *ALIKE)
        for sync in ways:
            team.switch(sync)
            before, heard = weights(team.learner).clone(), 0
            for seed in range(4):
                report = team.update(made_up(32, seed))
                heard += int(np.isfinite(report.priority).sum()) + sum(len(ids) for ids, _ in report.late)
            assert team.alike("targets" if sync in OWN_MOMENTS else "all") or sync in APART, sync
            assert heard + sum(len(ids) for ids, _ in team.late) == 4 * 32, sync
            team.late.clear()
            assert not torch.equal(weights(team.learner), before)
        assert not lost(team)
        assert team.learner.updates == 4 * len(ways)
        assert team.number == len(ways)  # a new group for each


def test_one_that_is_slow_is_not_left_waiting_when_all_come_to_rest(team: LearnerGroup) -> None:
    """The slow one has the newest weights by the time it pushes, and waits for a step that nobody makes."""
    team.switch(ServerSync(spare=1))
    team.update(made_up(32))
    team.rest()
    slow = team.mates[2]
    for rounds in range(3):
        strike(process_of(slow).pid, signal.SIGSTOP)
        for seed in range(2):  # both are made without it
            team.update(made_up(32, seed))
        strike(process_of(slow).pid, signal.SIGCONT)
        begun = time.monotonic()
        team.rest()
        assert time.monotonic() - begun < 5, rounds
        assert slow in team.group
    assert not lost(team)
    assert team.number == 1
    assert team.learner.updates == 7


def test_one_that_is_slow_is_let_go_before_a_switch(team: LearnerGroup) -> None:
    """It waits at the server that is there, whatever comes after it."""
    team.switch(ServerSync(spare=1))
    team.update(made_up(32))
    team.rest()
    slow = team.mates[2]
    strike(process_of(slow).pid, signal.SIGSTOP)
    for seed in range(2):
        team.update(made_up(32, seed))
    strike(process_of(slow).pid, signal.SIGCONT)
    team.switch(AllreduceSync())
    begun = time.monotonic()
    team.rest()
    assert time.monotonic() - begun < 5
    assert slow in team.group
    team.update(made_up(32))
    assert not lost(team)


@pytest.mark.slow
def test_one_that_is_slow_is_let_go_while_rank_0_pauses(hasty: LearnerGroup) -> None:
    """Rank 0 judges, or waits for experience, for longer than anybody is waited for."""
    hasty.switch(ServerSync(spare=1))
    hasty.update(made_up(32))
    hasty.rest()
    slow = hasty.mates[1]
    strike(process_of(slow).pid, signal.SIGSTOP)
    for seed in range(2):
        hasty.update(made_up(32, seed))
    strike(process_of(slow).pid, signal.SIGCONT)
    time.sleep(1.5 * hasty.plan.learners.timeout_seconds)
    hasty.update(made_up(32))
    hasty.rest()
    assert not lost(hasty)
    assert hasty.number == 1


def test_a_switch_with_words_still_due_loses_nobody(team: LearnerGroup) -> None:
    for _ in range(3):
        for sync in (ServerSync(max_staleness=None), AllreduceSync()):
            team.switch(sync)
            for seed in range(3):
                team.update(made_up(32, seed))
    assert not lost(team)
    assert team.learner.updates == 18


@pytest.mark.parametrize(("sync", "how"), STRIKES)
def test_who_is_lost_is_done_without_and_replaced(hasty: LearnerGroup, sync: Sync, how: signal.Signals) -> None:
    team = hasty
    team.switch(sync)
    team.update(made_up(32))
    gone, healthy = team.mates[1], team.mates[2]
    strike(process_of(gone).pid, how)
    begun, made = time.monotonic(), 1
    while team.mates[1] is gone:
        team.update(made_up(32, made))
        made += 1
    noticed = LIMIT_SECONDS + 1.0 if how == signal.SIGSTOP else 0.0  # the grace of these tests is a second
    assert time.monotonic() - begun < noticed + 5  # and somebody else is started
    assert team.learner.updates == made
    assert lost(team) == [1]
    assert team.mates[2] is healthy
    assert not gone.life.is_alive()
    until(lambda: len(team.group) == 2 or not team.update(made_up(32, 2)))
    report = team.update(made_up(32, 3))
    team.rest()
    assert np.isfinite(report.priority).sum() + sum(len(ids) for ids, _ in (*report.late, *team.late)) >= 32


def test_one_that_died_while_nobody_looked_takes_nobody_along(team: LearnerGroup) -> None:
    team.update(made_up(32))
    healthy = team.mates[2]
    strike(process_of(team.mates[1]).pid, signal.SIGKILL)
    time.sleep(1.0)
    begun = time.monotonic()
    team.update(made_up(32, 1))
    assert time.monotonic() - begun < LIMIT_SECONDS
    assert team.mates[2] is healthy
    assert lost(team) == [1]


@pytest.mark.parametrize("sync", [ServerSync(shards=2), ServerSync(shards=2, max_staleness=4)], ids=["step", "loose"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_shard_that_is_lost_comes_back_with_what_rank_0_has(
    hasty: LearnerGroup, how: signal.Signals, sync: Sync
) -> None:
    team = hasty
    team.switch(sync)
    team.update(made_up(32))
    team.rest()
    assert isinstance(team.servers, ShardProcesses)
    strike(team.servers.shards[1].process.pid, how)
    for seed in range(4):
        team.update(made_up(32, seed))
    team.rest()
    assert team.learner.updates == 5
    events = team.take_events()
    kinds = [event["kind"] for event in events]
    assert "learner_lost" not in kinds  # it was nobody's fault among the learners
    assert kinds.count("group_failed") == 1
    told = [event["versions"] for event in events if event["kind"] == "server"]
    assert team.number == 2  # all shards began anew, from what rank 0 had
    assert len(told) >= 2
    assert len(set(told[-1])) == 1 or not team.in_step
    assert max(told[-1]) <= (4 if team.in_step else 4 * 3)  # counted from there


def test_a_shard_that_is_stopped_while_it_starts_is_not_waited_for_long(
    hasty: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = ShardProcess.start, list[ShardProcess]()

    def stopped(shard: ShardProcess) -> None:
        start(shard)
        started.append(shard)
        if len(started) <= 2:  # both shards of the first server
            strike(shard.process.pid, signal.SIGSTOP)

    monkeypatch.setattr(ShardProcess, "start", stopped)
    monkeypatch.setattr(driver, "START_SECONDS", 1.0)
    hasty.switch(ServerSync(shards=2))
    begun = time.monotonic()
    hasty.update(made_up(32))
    assert time.monotonic() - begun < LIMIT_SECONDS + 1.0 + 5  # once, however many are stopped
    assert len(started) == 4
    assert hasty.learner.updates == 1
    assert not any(shard.process.is_alive() for shard in started[:2])
    kinds = [event["kind"] for event in hasty.take_events()]
    assert kinds.count("group_failed") == 1
    assert "learner_lost" not in kinds


def test_nobody_is_left_and_the_run_goes_on_alone() -> None:
    with teamed(small_plan(2, more={"learners.restarts": 0})) as team:
        strike(process_of(team.mates[1]).pid, signal.SIGKILL)
        team.update(made_up(32))
        report = team.update(made_up(32, 1))
        assert team.learner.updates == 2
        assert not team.mates
        assert np.isfinite(report.priority).all()


def taken(team: LearnerGroup) -> list[int]:
    """Gradients that shards had taken in whenever they were asked since the last time."""
    return [max(event["taken"]) for event in team.take_events() if event["kind"] == "server"]


def test_one_that_is_found_lost_before_its_part_is_dealt_has_nobody_learn_twice(
    team: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.switch(ServerSync(max_staleness=None, shards=1))
    team.update(made_up(32))
    team.rest()
    assert taken(team) == [3]
    quick, slow = team.mates[1], team.mates[2]
    strike(process_of(slow).pid, signal.SIGSTOP)
    for seed in range(2):
        team.update(made_up(32, seed))
        until(lambda: not quick.dealt or quick.talk.waits(0.1))
    hear = team.hear

    def lost_meanwhile(mate: LearnerHandle) -> None:
        if mate is slow and process_of(slow).is_alive():
            time.sleep(0.5)  # whoever has a part of this batch has pushed its gradient
            process_of(slow).kill()
        hear(mate)

    monkeypatch.setattr(team, "hear", lost_meanwhile)
    team.update(made_up(32, 2))
    assert taken(team)[0] == 3 + 2 * 2  # nothing of the batch that the next group learns from
    assert team.learner.updates == 4


def test_one_that_cannot_be_reached_has_nobody_learn_twice(team: LearnerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    team.switch(ServerSync(max_staleness=None, shards=1))
    team.update(made_up(32))
    team.rest()
    gone = team.mates[2]
    order = gone.order

    def lost_meanwhile(*given: Any) -> None:
        time.sleep(0.5)  # the other has pushed its gradient
        process_of(gone).kill()
        process_of(gone).join()
        order(*given)

    monkeypatch.setattr(gone, "order", lost_meanwhile)
    team.take_events()
    team.update(made_up(32, 1))
    assert taken(team) == [3 + 2]  # rank 0's own and the other's, in the group that was
    assert (team.number, team.learner.updates) == (1, 2)


def test_one_that_dies_while_a_group_forms_keeps_nobody_waiting(
    team: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, healthy = team.mates[2], team.mates[1]
    order = gone.order

    def lost_meanwhile(*given: Any) -> None:
        process_of(gone).kill()
        process_of(gone).join()
        order(*given)

    monkeypatch.setattr(gone, "order", lost_meanwhile)
    begun = time.monotonic()
    team.update(made_up(32))
    assert time.monotonic() - begun < 5 < team.plan.learners.timeout_seconds
    assert lost(team) == [2]
    assert team.mates[1] is healthy


def test_a_team_that_is_interrupted_while_it_gathers_leaves_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(3)
    quarters = LocalLearnerLauncher(plan, spec_of(plan), spec_of(plan), make_cut(plan.algo))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LearnerGroup, "await_everybody", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LearnerGroup(plan, alone(plan), quarters)
    assert [life.is_alive() for life in quarters.lives.values()] == [False, False]


def test_one_that_is_still_starting_is_not_asked_to_draw_anew(
    team: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "batch_source", object())
    for mate in team.mates.values():
        monkeypatch.setattr(mate, "ready", False)
    team.reseed(1)
    assert [mate.owed for mate in team.mates.values()] == [0, 0]
    assert not lost(team)


def test_rank_0_has_the_versions_of_the_weights_it_gathered(team: LearnerGroup) -> None:
    team.switch(ServerSync(max_staleness=2, shards=2))
    for seed in range(3):
        team.update(made_up(32, seed))
    team.rest()
    told = [event["versions"] for event in team.take_events() if event["kind"] == "server"]
    assert isinstance(team.sync, ServerClient)
    assert team.sync.versions == told[-1] == [9, 9]


def test_one_that_is_stopped_before_a_switch_is_charged_once(hasty: LearnerGroup) -> None:
    team = hasty
    team.switch(ServerSync(max_staleness=None))
    team.update(made_up(32))
    team.rest()
    healthy = team.mates[2]
    strike(process_of(team.mates[1]).pid, signal.SIGSTOP)
    team.update(made_up(32))  # it owes a word, and nobody waits for it
    team.switch(AllreduceSync())
    team.update(made_up(32))
    kinds = [event["kind"] for event in team.take_events()]
    assert kinds.count("learner_lost") == 1
    assert "group_failed" not in kinds
    assert len(team.budget.faults) == 1
    assert team.mates[2] is healthy


def test_a_group_that_fails_while_it_forms_has_no_history_of_its_own(
    team: LearnerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.plan = replace(team.plan, log=replace(team.plan.log, history=True))
    team.settle(tmp_path)
    serve, struck = team.quarters.serve, list[int]()

    def once(*given: Any) -> Any:
        found = serve(*given)
        if not struck:
            struck.append(process_of(team.mates[1]).pid or 0)
            strike(struck[0], signal.SIGKILL)
        return found

    monkeypatch.setattr(team.quarters, "serve", once)
    team.switch(ServerSync(shards=2))
    for seed in range(3):
        team.update(made_up(32, seed))
    team.rest()
    team.history.close()
    assert struck
    assert team.learner.updates == 3
    assert check_history(tmp_path / "history") == []


@pytest.mark.slow
@pytest.mark.parametrize("sync", [AllreduceSync(), ServerSync(max_staleness=None)], ids=["step", "loose"])
def test_each_loss_is_charged_once(sync: Sync) -> None:
    more = {"learners.restarts": 2, "learners.timeout_seconds": LIMIT_SECONDS}
    with teamed(small_plan(3, more=more)) as team:
        team.switch(sync)
        replaced: list[bool] = []
        while len(replaced) < 3:
            until(lambda: len(team.group) == 2 or not team.update(made_up(32)))
            strike(process_of(team.mates[1]).pid, signal.SIGKILL)
            seen = len(replaced)
            while len(replaced) == seen:
                team.update(made_up(32, 1))
                replaced += [row["replaced"] for row in team.take_events() if row["kind"] == "learner_lost"]
        assert replaced == [True, True, False]
        assert list(team.mates) == [2]  # who was well is kept


def test_a_group_that_fails_again_and_again_is_given_up_and_rank_0_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with teamed(small_plan(2, more={"learners.restarts": 1})) as team:
        team.update(made_up(32))

        def fail(*_: Any) -> float:
            raise CommLost("the link is down")

        monkeypatch.setattr(team, "agreed", fail)
        team.update(made_up(32, 1))
        kinds = [event["kind"] for event in team.take_events()]
        assert kinds.count("learners_given_up") == 1
        assert not team.mates
        assert team.learner.updates == 2


def test_a_partner_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(2, more={"learners.restarts": 0})
    spec = spec_of(plan)
    quarters = LocalLearnerLauncher(plan, spec, spec, make_cut(plan.algo))
    quarters.shown = None  # type: ignore[assignment]  nobody can make a network for that
    team = LearnerGroup(plan, alone(plan), quarters)
    try:
        team.update(made_up(32))
        (lost,) = [event for event in team.take_events() if event["kind"] == "learner_lost"]
        assert "AttributeError" in lost["what"]
    finally:
        team.close()


def test_a_codec_that_was_given_up_stays_so_in_the_next_group() -> None:
    misled = {"sync.codec.type": "top_k", "sync.check_every_rounds": 2, "sync.least_cosine": 1.0}
    with teamed(small_plan(2, more=misled)) as team:
        for seed in range(4):
            team.update(made_up(32, seed))
        assert "codec_given_up" in [event["kind"] for event in team.take_events()]
        team.leave()
        team.update(made_up(32))
        assert isinstance(team.agreement, AllreduceSync)
        assert isinstance(team.agreement.codec, NoCodec)
        team.switch(LocalSync(codec=TopKCodec()))  # by a schedule that knows nothing of it
        assert team.agreement == LocalSync()
        team.switch(LocalSync(codec=Int8Codec()))
        assert team.agreement == LocalSync(codec=Int8Codec())  # nobody has found fault with that one
        team.tell("codec_given_up", cosine=-1.0)  # a late word of the group that is, not of the one to come
        assert team.agreement == LocalSync(codec=Int8Codec())
        saved = together(team)
    with teamed(small_plan(2, more=misled)) as resumed:
        rejoin(resumed, {name: saved[name] for name in ("sync", "learners")})  # as it was once saved
        assert resumed.agreement == LocalSync(codec=Int8Codec())
        assert not resumed.mistrusted
        rejoin(resumed, saved)
        resumed.switch(LocalSync(codec=TopKCodec()))
        assert resumed.agreement == LocalSync()


@pytest.mark.parametrize("who", [0, 1])
def test_with_a_server_a_codec_is_given_up_by_everybody(who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coded = {"sync.type": "server", "sync.codec.type": "top_k", "sync.check_every_rounds": 2}
    with teamed(small_plan(2, more=coded)) as team:
        team.update(made_up(32))
        if who == 0:
            team.tell("codec_given_up", cosine=-1.0)
        else:
            (mate,) = team.group
            answer = mate.answer

            def misled(kind: str, limit_seconds: float) -> Parts:
                facts, arrays = answer(kind, limit_seconds)
                return {**facts, "given_up": -1.0}, arrays

            monkeypatch.setattr(mate, "answer", misled)
            team.update(made_up(32))
            monkeypatch.undo()
        team.update(made_up(32))
        assert isinstance(team.formed, ServerSync)
        assert team.formed.codec == NoCodec()
        assert team.number == 2
        assert not lost(team)


def test_a_partner_says_that_its_codec_was_given_up() -> None:
    coded = {"sync.type": "server", "sync.codec.type": "top_k", "sync.check_every_rounds": 2, "sync.least_cosine": 1.0}
    with teamed(small_plan(2, more=coded)) as team:
        told = list[dict[str, Any]]()
        for seed in range(3):
            team.update(made_up(32, seed))
            told += [event for event in team.take_events() if event["kind"] == "codec_given_up"]
        assert [event.get("learner") for event in told] == [None, 1]  # both judged in their second round
        assert team.number == 2


def test_a_stale_gradient_makes_a_smaller_step_of_the_optimiser() -> None:
    block = WeightBlock(
        small_plan(2, more={"optim.type": "sgd"}), ServerSync(max_staleness=None, slow_down=True, shards=1), [3]
    )
    block.load([np.zeros(3, np.float32) for _ in block.kept])
    block.rate = 0.5
    for sequence in range(3):  # all of the first version: 0, 1 and 2 steps old
        block.shard.push(Push((0, 0, sequence), 0, torch.ones(3)), 0.0)
    assert block.shard.weights.tolist() == [-0.5 - 0.5 - 0.25] * 3


def test_words_of_a_time_that_is_taken_back_are_heard_before_it_is(team: LearnerGroup) -> None:
    team.switch(ServerSync(max_staleness=None))
    team.update(made_up(32))
    strike(process_of(team.mates[1]).pid, signal.SIGSTOP)
    team.update(made_up(32))
    assert team.mates[1].owed > 0
    strike(process_of(team.mates[1]).pid, signal.SIGCONT)
    team.forget()
    assert [mate.owed for mate in team.mates.values()] == [0, 0]
    assert not lost(team)


@pytest.mark.parametrize("sync", [AllreduceSync(), ServerSync(shards=2), LocalSync(every_updates=1)], ids=str)
def test_weights_that_are_replaced_reach_everybody(team: LearnerGroup, sync: Sync) -> None:
    team.switch(sync)
    team.update(made_up(32))
    team.rest()
    saved, moments = team.learner.model_arrays(), team.learner.optim_arrays()
    for seed in range(3):
        team.update(made_up(32, seed))
    after = weights(team.learner).clone()
    team.forget()
    team.learner.load_model_arrays(saved)
    team.learner.load_optim_arrays(moments)
    team.learner.updates = 1
    for seed in range(3):
        team.update(made_up(32, seed))
    torch.testing.assert_close(weights(team.learner), after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "sync",
    [
        AllreduceSync(),
        ServerSync(shards=2),
        AllreduceSync(send="steps"),
        *(pytest.param(AllreduceSync(codec=codec, send="gradients"), marks=pytest.mark.slow) for codec in CODECS),
        *(pytest.param(AllreduceSync(codec=codec, send="steps"), marks=pytest.mark.slow) for codec in CODECS),
    ],
    ids=str,
)
def test_a_batch_that_is_not_finite_moves_nobody_then_or_later(team: LearnerGroup, sync: Sync) -> None:
    team.switch(sync)
    team.update(made_up(32))
    before, bad = weights(team.learner).clone(), made_up(32)
    bad.reward[1] = np.nan  # in the part of rank 1
    with pytest.raises(NonFiniteUpdate):
        team.update(bad)
    assert torch.equal(weights(team.learner), before)
    for seed in range(3):
        team.update(made_up(32, seed))
    assert team.learner.updates == 4
    assert team.learner.finite()


def test_a_gradient_that_is_not_finite_leaves_the_others_of_its_window(team: LearnerGroup, tmp_path: Path) -> None:
    team.plan = replace(team.plan, log=replace(team.plan.log, history=True))
    team.settle(tmp_path)
    team.switch(WindowSync(num_gradients=3))
    team.update(made_up(32))
    team.rest()
    before, bad = weights(team.learner).clone(), made_up(32)
    bad.reward[1] = np.nan  # in the part of rank 1
    team.update(bad)  # rank 0's own is taken
    team.rest()
    assert not torch.equal(weights(team.learner), before)
    assert team.learner.finite()
    told = [event for event in team.take_events() if event["kind"] == "server"]
    assert (told[-1]["versions"], told[-1]["refused"]) == ([2], {"skipped": 1})
    team.history.close()
    assert check_history(tmp_path / "history") == []


@pytest.mark.parametrize("sync", [AllreduceSync(), ServerSync(), EasgdSync()], ids=str)
def test_a_reset_is_everybodys(sync: Sync) -> None:
    resets = {"algo.reset.type": "periodic", "algo.reset.every_updates": 3, "algo.reset.keep": 0.0}
    plan = small_plan(2, more=resets)
    with teamed(plan) as team:
        team.switch(sync)
        for seed in range(3):
            report = team.update(made_up(32, seed))
        assert report.stats["reset"] == 1
        fresh = weights(team.learner).clone()
        team.update(made_up(32, 5))
        # A step from the fresh weights, not from the old ones.
        assert float((weights(team.learner) - fresh).abs().max()) < 0.1
        if isinstance(sync, AllreduceSync):
            assert team.alike()
        else:  # shards and centres begin anew, with everybody at rank 0's weights
            assert team.number == 2


class Sleepy(nn.Module):
    """A torso that takes its time everywhere but where it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.home, self.layer = os.getpid(), nn.Linear(4, 8)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.home:
            time.sleep(0.001 * len(obs))
        return torch.relu(self.layer(obs))


@pytest.mark.parametrize("balance", [True, False])
def test_a_learner_that_is_slower_is_named_and_gets_less_if_shares_follow(balance: bool) -> None:
    asked = {name: value for name, value in SMALL.items() if not name.startswith("net.torso")}
    asked |= {"learners.num": 2, "algo.batch_size": 32, "learners.balance": balance}
    plan = make_plan("CartPole-v1", overrides=asked)
    plan = resolve(plan, spec_of(plan), own_torso=True)
    torso, spec = Sleepy(), spec_of(plan)
    learner = lone_learner(plan, spec, spec, torso)
    team = LearnerGroup(plan, learner, LocalLearnerLauncher(plan, spec, spec, make_cut(plan.algo), (None, torso, None)))
    with closing(team):
        for at in range(51):
            report = team.update(made_up(32, at))
        assert np.isfinite(report.priority).all()
        told = [event for event in team.take_events() if event["kind"] == "learner_slow"]
        assert [event["learner"] for event in told] == [1]
        assert told[0]["speed"] < 0.6
        assert isinstance(team.dealing, SplitScatter)
        assert (int((team.dealing.owners == 1).sum()) < 16) == balance
