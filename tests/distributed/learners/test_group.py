"""Several learners: the same updates as by one, whichever is lost meanwhile. Real processes."""

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
from qfleet.build.custom_parts import NO_CUSTOM_PARTS, CustomParts, record_parts
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_train_world
from qfleet.data import Array, Batch, Spec
from qfleet.data.wire_format import Parts
from qfleet.distributed.learners.actor_learner_state import ActorLearnerStates
from qfleet.distributed.learners.batch_scatter import SplitScatter
from qfleet.distributed.learners.group import LearnerGroup
from qfleet.distributed.learners.launcher import LocalLearnerLauncher
from qfleet.distributed.learners.pool import LearnerPool
from qfleet.distributed.learners.worker import build_learner
from qfleet.distributed.parameter_server import driver
from qfleet.distributed.parameter_server.driver import ShardProcesses
from qfleet.distributed.parameter_server.shard import WeightBlock
from qfleet.distributed.worker.handle import WorkerHandle
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
from qfleet.sync.gradient_rule import Push
from qfleet.sync.served import ServerClient
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
ALIKE: tuple[Sync, ...] = (  # after every second update all learners have the same state
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
    ServerSync(shards=2),  # moments live in the shards: those of the other learners do not change
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


def single_learner(plan: Plan) -> Learner:
    return build_learner(plan, spec_of(plan), spec_of(plan), NO_CUSTOM_PARTS)


@contextmanager
def learner_group(plan: Plan) -> Iterator[LearnerGroup]:
    group = LearnerGroup(
        plan, single_learner(plan), LocalLearnerLauncher(plan, spec_of(plan), spec_of(plan), make_cut(plan.algo))
    )
    try:
        yield group
    finally:
        group.close()


def random_batch(num: int, seed: int = 0, spec: Spec = LINE) -> Batch:
    rng = np.random.default_rng(seed)

    def looks() -> Array:
        if spec.dtype == "uint8":
            return rng.integers(0, 2, (num, *spec.input_shape)).astype(np.uint8)
        return rng.normal(size=(num, *spec.input_shape)).astype(np.float32)

    ones, weight = np.ones(num, np.float32), rng.random(num).astype(np.float32)
    return Batch(looks(), rng.integers(0, spec.num_actions, num), ones, ones * 0.9, looks(), weight, np.arange(num))


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.distributed.learners.pool.GRACE_SECONDS", 1.0)


@pytest.fixture
def group() -> Iterator[LearnerGroup]:
    with learner_group(small_plan(3)) as made:
        yield made


@pytest.fixture
def hasty() -> Iterator[LearnerGroup]:
    """A group with a short timeout."""
    with learner_group(small_plan(3, more={"learners.timeout_seconds": LIMIT_SECONDS})) as made:
        yield made


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in learner.online_tensors])


def strike(pid: int | None, how: signal.Signals) -> None:
    assert pid is not None
    os.kill(pid, how)


def lost(group: LearnerGroup) -> list[int]:
    return [event["learner"] for event in group.take_events() if event["kind"] == "learner_lost"]


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
    spec, one = spec_of(plan), single_learner(plan)
    with learner_group(plan) as group:
        for seed in range(20):
            expected, report = one.update(random_batch(33, seed, spec)), group.update(random_batch(33, seed, spec))
            np.testing.assert_allclose(report.priority, expected.priority, rtol=5e-3, atol=2e-4)
        torch.testing.assert_close(weights(group.learner), weights(one), rtol=1e-3, atol=2e-4)
        group.quiesce()
        for own, other in zip(group.learner.synced_tensors(), one.synced_tensors(), strict=True):
            torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-4)
        assert group.learner.updates == one.updates == 20


def test_shares_of_different_sizes_count_by_their_items(group: LearnerGroup) -> None:
    one = single_learner(small_plan(1))
    for seed in range(5):
        expected, report = (
            one.update(random_batch(32, seed)),
            group.update(random_batch(32, seed)),
        )  # 11, 11 and 10 items
        assert math.isclose(report.stats["gradient_norm"], expected.stats["gradient_norm"], rel_tol=1e-3)


def test_all_strategies_one_after_the_other() -> None:
    # Targets are updated when all have synchronised.
    with learner_group(small_plan(3, more={"algo.target.every_updates": 2})) as group:
        ways = (*APART, *OWN_MOMENTS, *ALIKE)
        for sync in ways:
            group.set_sync_plan(sync)
            before, num_priorities = weights(group.learner).clone(), 0
            for seed in range(4):
                report = group.update(random_batch(32, seed))
                num_priorities += int(np.isfinite(report.priority).sum()) + sum(len(ids) for ids, _ in report.late)
            assert group.states_equal("targets" if sync in OWN_MOMENTS else "all") or sync in APART, sync
            assert num_priorities + sum(len(ids) for ids, _ in group.process_group.late_priorities) == 4 * 32, sync
            group.process_group.late_priorities.clear()
            assert not torch.equal(weights(group.learner), before)
        assert not lost(group)
        assert group.learner.updates == 4 * len(ways)
        assert group.process_group.number == len(ways)  # a new group for each


def test_a_slow_learner_is_released_when_the_group_quiesces(group: LearnerGroup) -> None:
    """The slow one has the newest weights by the time it pushes, and waits for a step that does not come."""
    group.set_sync_plan(ServerSync(spare=1))
    group.update(random_batch(32))
    group.quiesce()
    slow = group.pool.handles[2]
    for rounds in range(3):
        strike(process_of(slow).pid, signal.SIGSTOP)
        for seed in range(2):  # both are made without it
            group.update(random_batch(32, seed))
        strike(process_of(slow).pid, signal.SIGCONT)
        begun = time.monotonic()
        group.quiesce()
        assert time.monotonic() - begun < 5, rounds
        assert slow in group.process_group.members
    assert not lost(group)
    assert group.process_group.number == 1
    assert group.learner.updates == 7


def test_a_slow_learner_is_released_before_a_switch(group: LearnerGroup) -> None:
    """It waits at the current server, whatever strategy comes next."""
    group.set_sync_plan(ServerSync(spare=1))
    group.update(random_batch(32))
    group.quiesce()
    slow = group.pool.handles[2]
    strike(process_of(slow).pid, signal.SIGSTOP)
    for seed in range(2):
        group.update(random_batch(32, seed))
    strike(process_of(slow).pid, signal.SIGCONT)
    group.set_sync_plan(AllreduceSync())
    begun = time.monotonic()
    group.quiesce()
    assert time.monotonic() - begun < 5
    assert slow in group.process_group.members
    group.update(random_batch(32))
    assert not lost(group)


@pytest.mark.slow
def test_a_slow_learner_is_released_while_rank_0_pauses(hasty: LearnerGroup) -> None:
    """Rank 0 evaluates, or waits for experience, for longer than the timeout."""
    hasty.set_sync_plan(ServerSync(spare=1))
    hasty.update(random_batch(32))
    hasty.quiesce()
    slow = hasty.pool.handles[1]
    strike(process_of(slow).pid, signal.SIGSTOP)
    for seed in range(2):
        hasty.update(random_batch(32, seed))
    strike(process_of(slow).pid, signal.SIGCONT)
    time.sleep(1.5 * hasty.plan.learners.timeout_seconds)
    hasty.update(random_batch(32))
    hasty.quiesce()
    assert not lost(hasty)
    assert hasty.process_group.number == 1


def test_a_switch_with_outstanding_replies_loses_no_learner(group: LearnerGroup) -> None:
    for _ in range(3):
        for sync in (ServerSync(max_staleness=None), AllreduceSync()):
            group.set_sync_plan(sync)
            for seed in range(3):
                group.update(random_batch(32, seed))
    assert not lost(group)
    assert group.learner.updates == 18


@pytest.mark.parametrize(("sync", "how"), STRIKES)
def test_a_lost_learner_is_restarted_while_the_others_continue(
    hasty: LearnerGroup, sync: Sync, how: signal.Signals
) -> None:
    group = hasty
    group.set_sync_plan(sync)
    group.update(random_batch(32))
    lost_handle, healthy = group.pool.handles[1], group.pool.handles[2]
    strike(process_of(lost_handle).pid, how)
    begun, made = time.monotonic(), 1
    while group.pool.handles[1] is lost_handle:
        group.update(random_batch(32, made))
        made += 1
    noticed = LIMIT_SECONDS + 1.0 if how == signal.SIGSTOP else 0.0  # the grace of these tests is a second
    assert time.monotonic() - begun < noticed + 5  # and another one is started
    assert group.learner.updates == made
    assert lost(group) == [1]
    assert group.pool.handles[2] is healthy
    assert not lost_handle.control.is_alive()
    until(lambda: len(group.process_group.members) == 2 or not group.update(random_batch(32, 2)))
    report = group.update(random_batch(32, 3))
    group.quiesce()
    assert (
        np.isfinite(report.priority).sum()
        + sum(len(ids) for ids, _ in (*report.late, *group.process_group.late_priorities))
        >= 32
    )


def test_a_learner_that_died_between_updates_does_not_harm_the_others(group: LearnerGroup) -> None:
    group.update(random_batch(32))
    healthy = group.pool.handles[2]
    strike(process_of(group.pool.handles[1]).pid, signal.SIGKILL)
    time.sleep(1.0)
    begun = time.monotonic()
    group.update(random_batch(32, 1))
    assert time.monotonic() - begun < LIMIT_SECONDS
    assert group.pool.handles[2] is healthy
    assert lost(group) == [1]


@pytest.mark.parametrize("sync", [ServerSync(shards=2), ServerSync(shards=2, max_staleness=4)], ids=["step", "loose"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_shard_is_restarted_with_rank_0s_state(hasty: LearnerGroup, how: signal.Signals, sync: Sync) -> None:
    group = hasty
    group.set_sync_plan(sync)
    group.update(random_batch(32))
    group.quiesce()
    assert isinstance(group.process_group.server, ShardProcesses)
    strike(process_of(group.process_group.server.shards[1].handle).pid, how)
    for seed in range(4):
        group.update(random_batch(32, seed))
    group.quiesce()
    assert group.learner.updates == 5
    events = group.take_events()
    kinds = [event["kind"] for event in events]
    assert "learner_lost" not in kinds  # no learner was at fault
    assert kinds.count("group_failed") == 1
    logged = [event["versions"] for event in events if event["kind"] == "server"]
    assert group.process_group.number == 2  # all shards were restarted with rank 0's state
    assert len(logged) >= 2
    assert len(set(logged[-1])) == 1 or not group.process_group.synchronous
    assert max(logged[-1]) <= (4 if group.process_group.synchronous else 4 * 3)  # counted from there


def test_a_shard_that_is_stopped_while_it_starts_times_out_soon(
    hasty: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, started = driver.launch_local, list[WorkerHandle]()

    def stopped(*given: Any, **more: Any) -> WorkerHandle:
        started.append(launch(*given, **more))
        if len(started) <= 2:  # both shards of the first server
            strike(process_of(started[-1]).pid, signal.SIGSTOP)
        return started[-1]

    monkeypatch.setattr(driver, "launch_local", stopped)
    monkeypatch.setattr(driver, "START_SECONDS", 1.0)
    hasty.set_sync_plan(ServerSync(shards=2))
    begun = time.monotonic()
    hasty.update(random_batch(32))
    assert time.monotonic() - begun < LIMIT_SECONDS + 1.0 + 5  # once, however many are stopped
    assert len(started) == 4
    assert hasty.learner.updates == 1
    assert not any(handle.control.is_alive() for handle in started[:2])
    kinds = [event["kind"] for event in hasty.take_events()]
    assert kinds.count("group_failed") == 1
    assert "learner_lost" not in kinds


def test_rank_0_continues_alone_when_no_learner_is_left() -> None:
    with learner_group(small_plan(2, more={"learners.restarts": 0})) as group:
        strike(process_of(group.pool.handles[1]).pid, signal.SIGKILL)
        group.update(random_batch(32))
        report = group.update(random_batch(32, 1))
        assert group.learner.updates == 2
        assert not group.pool.handles
        assert np.isfinite(report.priority).all()


def taken(group: LearnerGroup) -> list[int]:
    """Gradients that the shards had taken, at each pull since the last call."""
    return [max(event["taken"]) for event in group.take_events() if event["kind"] == "server"]


def test_a_learner_found_lost_before_the_scatter_makes_no_other_learn_twice(
    group: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.set_sync_plan(ServerSync(max_staleness=None, shards=1))
    group.update(random_batch(32))
    group.quiesce()
    assert taken(group) == [3]
    quick, slow = group.pool.handles[1], group.pool.handles[2]
    strike(process_of(slow).pid, signal.SIGSTOP)
    for seed in range(2):
        group.update(random_batch(32, seed))
        until(lambda: not quick.num_outstanding or quick.transport.poll(0.1))
    collect_report = group.updater.collect_report

    def lost_meanwhile(handle: WorkerHandle) -> None:
        if handle is slow and process_of(slow).is_alive():
            time.sleep(0.5)  # learners with a share of this batch have pushed their gradient
            process_of(slow).kill()
        collect_report(handle)

    monkeypatch.setattr(group.updater, "collect_report", lost_meanwhile)
    group.update(random_batch(32, 2))
    assert taken(group)[0] == 3 + 2 * 2  # without the batch that the next group learns from
    assert group.learner.updates == 4


def test_a_learner_that_cannot_be_reached_makes_no_other_learn_twice(
    group: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.set_sync_plan(ServerSync(max_staleness=None, shards=1))
    group.update(random_batch(32))
    group.quiesce()
    lost_handle = group.pool.handles[2]
    ask = lost_handle.ask

    def lost_meanwhile(*given: Any) -> None:
        time.sleep(0.5)  # the other learner has pushed its gradient
        process_of(lost_handle).kill()
        process_of(lost_handle).join()
        ask(*given)

    monkeypatch.setattr(lost_handle, "ask", lost_meanwhile)
    group.take_events()
    group.update(random_batch(32, 1))
    assert taken(group) == [3 + 2]  # rank 0's own and the other's, in the first group
    assert (group.process_group.number, group.learner.updates) == (1, 2)


def test_a_learner_that_dies_while_a_group_forms_delays_no_other(
    group: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_handle, healthy = group.pool.handles[2], group.pool.handles[1]
    ask = lost_handle.ask

    def lost_meanwhile(*given: Any) -> None:
        process_of(lost_handle).kill()
        process_of(lost_handle).join()
        ask(*given)

    monkeypatch.setattr(lost_handle, "ask", lost_meanwhile)
    begun = time.monotonic()
    group.update(random_batch(32))
    assert time.monotonic() - begun < 5 < group.plan.learners.timeout_seconds
    assert lost(group) == [2]
    assert group.pool.handles[1] is healthy


def test_a_broken_connection_is_a_lost_learner_though_its_process_has_not_ended_yet(
    group: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.update(random_batch(33))
    handle = group.process_group.members[0]
    group.quiesce()
    group.take_events()

    def broken(*_: object) -> None:
        raise BrokenPipeError("Broken pipe")

    monkeypatch.setattr(handle.transport, "send", broken)  # a process closes its pipes before it ends
    group.update(random_batch(33, 1))
    events = group.take_events()
    assert [event["learner"] for event in events if event["kind"] == "learner_lost"] == [1]
    assert "group_failed" not in [event["kind"] for event in events]


def test_an_interrupt_while_learners_start_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(3)
    launcher = LocalLearnerLauncher(plan, spec_of(plan), spec_of(plan), make_cut(plan.algo))
    launch, launched = launcher.launch, list[WorkerHandle]()

    def watched(number: int, incarnation: int) -> WorkerHandle:
        launched.append(launch(number, incarnation))
        return launched[-1]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "launch", watched)
    monkeypatch.setattr(LearnerPool, "await_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LearnerGroup(plan, single_learner(plan), launcher)
    assert [handle.control.is_alive() for handle in launched] == [False, False]


def test_a_learner_that_is_still_starting_is_not_reseeded(group: LearnerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for handle in group.pool.handles.values():
        monkeypatch.setattr(handle, "ready", False)
    ActorLearnerStates(group.pool).reseed(1)
    assert [handle.num_outstanding for handle in group.pool.handles.values()] == [0, 0]
    assert not lost(group)


def test_rank_0_has_the_versions_of_the_weights_it_pulled(group: LearnerGroup) -> None:
    group.set_sync_plan(ServerSync(max_staleness=2, shards=2))
    for seed in range(3):
        group.update(random_batch(32, seed))
    group.quiesce()
    logged = [event["versions"] for event in group.take_events() if event["kind"] == "server"]
    assert isinstance(group.process_group.sync, ServerClient)
    assert group.process_group.sync.versions == logged[-1] == [9, 9]


def test_a_learner_that_is_stopped_before_a_switch_is_charged_once(hasty: LearnerGroup) -> None:
    group = hasty
    group.set_sync_plan(ServerSync(max_staleness=None))
    group.update(random_batch(32))
    group.quiesce()
    healthy = group.pool.handles[2]
    strike(process_of(group.pool.handles[1]).pid, signal.SIGSTOP)
    group.update(random_batch(32))  # its reply is outstanding, and not waited for
    group.set_sync_plan(AllreduceSync())
    group.update(random_batch(32))
    kinds = [event["kind"] for event in group.take_events()]
    assert kinds.count("learner_lost") == 1
    assert "group_failed" not in kinds
    assert len(group.pool.budget.faults) == 1
    assert group.pool.handles[2] is healthy


def test_a_group_that_fails_while_it_forms_leaves_a_valid_history(
    group: LearnerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.plan = replace(group.plan, log=replace(group.plan.log, history=True))
    group.use_run_folder(tmp_path)
    start_server, struck = group.pool.launcher.start_server, list[int]()

    def once(*given: Any) -> Any:
        found = start_server(*given)
        if not struck:
            struck.append(process_of(group.pool.handles[1]).pid or 0)
            strike(struck[0], signal.SIGKILL)
        return found

    monkeypatch.setattr(group.pool.launcher, "start_server", once)
    group.set_sync_plan(ServerSync(shards=2))
    for seed in range(3):
        group.update(random_batch(32, seed))
    group.quiesce()
    group.process_group.history.close()
    assert struck
    assert group.learner.updates == 3
    assert check_history(tmp_path / "history") == []


@pytest.mark.slow
@pytest.mark.parametrize("sync", [AllreduceSync(), ServerSync(max_staleness=None)], ids=["step", "loose"])
def test_each_loss_is_charged_once(sync: Sync) -> None:
    more = {"learners.restarts": 2, "learners.timeout_seconds": LIMIT_SECONDS}
    with learner_group(small_plan(3, more=more)) as group:
        group.set_sync_plan(sync)
        replaced: list[bool] = []
        while len(replaced) < 3:
            until(lambda: len(group.process_group.members) == 2 or not group.update(random_batch(32)))
            strike(process_of(group.pool.handles[1]).pid, signal.SIGKILL)
            seen = len(replaced)
            while len(replaced) == seen:
                group.update(random_batch(32, 1))
                replaced += [row["replaced"] for row in group.take_events() if row["kind"] == "learner_lost"]
        assert replaced == [True, True, False]
        assert list(group.pool.handles) == [2]  # the healthy one is kept


def test_a_group_that_keeps_failing_is_given_up_and_rank_0_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    with learner_group(small_plan(2, more={"learners.restarts": 1})) as group:
        group.update(random_batch(32))

        def fail(*_: Any) -> float:
            raise CommLost("the link is down")

        monkeypatch.setattr(group.process_group, "sync_step", fail)
        group.update(random_batch(32, 1))
        kinds = [event["kind"] for event in group.take_events()]
        assert kinds.count("learners_given_up") == 1
        assert not group.pool.handles
        assert group.learner.updates == 2


def test_a_learner_that_cannot_start_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(2, more={"learners.restarts": 0})
    spec = spec_of(plan)
    launcher = LocalLearnerLauncher(plan, spec, spec, make_cut(plan.algo))
    launcher.env_spec = None  # type: ignore[assignment]  no network can be made for that
    group = LearnerGroup(plan, single_learner(plan), launcher)
    try:
        group.update(random_batch(32))
        (lost,) = [event for event in group.take_events() if event["kind"] == "learner_lost"]
        assert "AttributeError" in lost["what"]
    finally:
        group.close()


def test_a_rejected_codec_stays_rejected_in_the_next_group() -> None:
    misled = {"sync.codec.type": "top_k", "sync.check_every_rounds": 2, "sync.least_cosine": 1.0}
    with learner_group(small_plan(2, more=misled)) as group:
        for seed in range(4):
            group.update(random_batch(32, seed))
        assert "codec_given_up" in [event["kind"] for event in group.take_events()]
        group.process_group.disband()
        group.update(random_batch(32))
        assert isinstance(group.sync_plan, AllreduceSync)
        assert isinstance(group.sync_plan.codec, NoCodec)
        group.set_sync_plan(LocalSync(codec=TopKCodec()))  # as a schedule would
        assert group.sync_plan == LocalSync()
        group.set_sync_plan(LocalSync(codec=Int8Codec()))
        assert group.sync_plan == LocalSync(codec=Int8Codec())  # that one was not rejected
        # A late report of the current group, which has another codec than the next one.
        group.process_group.on_strategy_event("codec_given_up", cosine=-1.0)
        assert group.sync_plan == LocalSync(codec=Int8Codec())
        saved = group.state_dict()
    with learner_group(small_plan(2, more=misled)) as resumed:
        resumed.load_state_dict({name: saved[name] for name in ("sync", "learners")})  # as older versions saved it
        assert resumed.sync_plan == LocalSync(codec=Int8Codec())
        assert not resumed.process_group.rejected_codecs
        resumed.load_state_dict(saved)
        resumed.set_sync_plan(LocalSync(codec=TopKCodec()))
        assert resumed.sync_plan == LocalSync()


@pytest.mark.parametrize("giving_up", [0, 1])
def test_with_a_server_one_learner_rejects_a_codec_for_all(giving_up: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coded = {"sync.type": "server", "sync.codec.type": "top_k", "sync.check_every_rounds": 2}
    with learner_group(small_plan(2, more=coded)) as group:
        group.update(random_batch(32))
        if giving_up == 0:
            group.process_group.on_strategy_event("codec_given_up", cosine=-1.0)
        else:
            (handle,) = group.process_group.members
            reply = handle.reply

            def misled(kind: Any, timeout_seconds: float) -> Parts:
                learned, arrays = reply(kind, timeout_seconds)
                return replace(learned, given_up=-1.0), arrays

            monkeypatch.setattr(handle, "reply", misled)
            group.update(random_batch(32))
            monkeypatch.undo()
        group.update(random_batch(32))
        assert isinstance(group.process_group.sync_plan, ServerSync)
        assert group.process_group.sync_plan.codec == NoCodec()
        assert group.process_group.number == 2
        assert not lost(group)


def test_a_learner_reports_that_it_gave_up_its_codec() -> None:
    coded = {"sync.type": "server", "sync.codec.type": "top_k", "sync.check_every_rounds": 2, "sync.least_cosine": 1.0}
    with learner_group(small_plan(2, more=coded)) as group:
        logged = list[dict[str, Any]]()
        for seed in range(3):
            group.update(random_batch(32, seed))
            logged += [event for event in group.take_events() if event["kind"] == "codec_given_up"]
        assert [event.get("learner") for event in logged] == [None, 1]  # both checked it in their second round
        assert group.process_group.number == 2


def test_a_stale_gradient_makes_a_smaller_step_of_the_optimiser() -> None:
    block = WeightBlock(
        small_plan(2, more={"optim.type": "sgd"}), ServerSync(max_staleness=None, slow_down=True, shards=1), [3]
    )
    block.load([np.zeros(3, np.float32) for _ in block.state_tensors])
    block.rate = 0.5
    for sequence in range(3):  # all of the first version: 0, 1 and 2 steps old
        block.shard.push(Push((0, 0, sequence), 0, torch.ones(3)), 0.0)
    assert block.shard.weights.tolist() == [-0.5 - 0.5 - 0.25] * 3


def test_outstanding_replies_are_drained_before_a_rollback(group: LearnerGroup) -> None:
    group.set_sync_plan(ServerSync(max_staleness=None))
    group.update(random_batch(32))
    strike(process_of(group.pool.handles[1]).pid, signal.SIGSTOP)
    group.update(random_batch(32))
    assert group.pool.handles[1].num_outstanding > 0
    strike(process_of(group.pool.handles[1]).pid, signal.SIGCONT)
    group.discard_state()
    assert [handle.num_outstanding for handle in group.pool.handles.values()] == [0, 0]
    assert not lost(group)


@pytest.mark.parametrize("sync", [AllreduceSync(), ServerSync(shards=2), LocalSync(every_updates=1)], ids=str)
def test_replaced_weights_reach_all_learners(group: LearnerGroup, sync: Sync) -> None:
    group.set_sync_plan(sync)
    group.update(random_batch(32))
    group.quiesce()
    saved, moments = group.learner.model_arrays(), group.learner.optim_arrays()
    for seed in range(3):
        group.update(random_batch(32, seed))
    after = weights(group.learner).clone()
    group.discard_state()
    group.learner.load_model_arrays(saved)
    group.learner.load_optim_arrays(moments)
    group.learner.updates = 1
    for seed in range(3):
        group.update(random_batch(32, seed))
    torch.testing.assert_close(weights(group.learner), after, rtol=1e-5, atol=1e-6)


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
def test_a_batch_that_is_not_finite_changes_no_weights_then_or_later(group: LearnerGroup, sync: Sync) -> None:
    group.set_sync_plan(sync)
    group.update(random_batch(32))
    before, bad = weights(group.learner).clone(), random_batch(32)
    bad.reward[1] = np.nan  # in the part of rank 1
    with pytest.raises(NonFiniteUpdate):
        group.update(bad)
    assert torch.equal(weights(group.learner), before)
    for seed in range(3):
        group.update(random_batch(32, seed))
    assert group.learner.updates == 4
    assert group.learner.is_finite()


def test_a_gradient_that_is_not_finite_does_not_spoil_the_others_of_its_window(
    group: LearnerGroup, tmp_path: Path
) -> None:
    group.plan = replace(group.plan, log=replace(group.plan.log, history=True))
    group.use_run_folder(tmp_path)
    group.set_sync_plan(WindowSync(num_gradients=3))
    group.update(random_batch(32))
    group.quiesce()
    before, bad = weights(group.learner).clone(), random_batch(32)
    bad.reward[1] = np.nan  # in the part of rank 1
    group.update(bad)  # rank 0's own is taken
    group.quiesce()
    assert not torch.equal(weights(group.learner), before)
    assert group.learner.is_finite()
    logged = [event for event in group.take_events() if event["kind"] == "server"]
    assert (logged[-1]["versions"], logged[-1]["refused"]) == ([2], {"skipped": 1})
    group.process_group.history.close()
    assert check_history(tmp_path / "history") == []


@pytest.mark.parametrize("sync", [AllreduceSync(), ServerSync(), EasgdSync()], ids=str)
def test_a_reset_applies_to_all_learners(sync: Sync) -> None:
    resets = {"algo.reset.type": "periodic", "algo.reset.every_updates": 3, "algo.reset.keep": 0.0}
    plan = small_plan(2, more=resets)
    with learner_group(plan) as group:
        group.set_sync_plan(sync)
        for seed in range(3):
            report = group.update(random_batch(32, seed))
        assert report.stats["reset"] == 1
        fresh = weights(group.learner).clone()
        group.update(random_batch(32, 5))
        # A step from the fresh weights, not from the old ones.
        assert float((weights(group.learner) - fresh).abs().max()) < 0.1
        if isinstance(sync, AllreduceSync):
            assert group.states_equal()
        else:  # shards and centres start anew, with rank 0's weights
            assert group.process_group.number == 2


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
def test_a_slow_learner_is_logged_and_gets_fewer_items_if_balanced(balance: bool) -> None:
    asked = {name: value for name, value in SMALL.items() if not name.startswith("net.torso")}
    asked |= {"learners.num": 2, "algo.batch_size": 32, "learners.balance": balance}
    plan = make_plan("CartPole-v1", overrides=asked)
    spec = spec_of(plan)
    parts = CustomParts(torso=Sleepy())
    plan = resolve(record_parts(plan, parts), spec)
    learner = build_learner(plan, spec, spec, parts)
    group = LearnerGroup(plan, learner, LocalLearnerLauncher(plan, spec, spec, make_cut(plan.algo), parts))
    with closing(group):
        for at in range(51):
            report = group.update(random_batch(32, at))
        assert np.isfinite(report.priority).all()
        logged = [event for event in group.take_events() if event["kind"] == "learner_slow"]
        assert [event["learner"] for event in logged] == [1]
        assert logged[0]["speed"] < 0.6
        assert isinstance(group.process_group.scatter, SplitScatter)
        assert (int((group.process_group.scatter.owners == 1).sum()) < 16) == balance
