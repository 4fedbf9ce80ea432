"""Bundles: learners with environments and a replay of their own. Real processes."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from qfleet import resume, train
from qfleet.audit.checks import check_history
from qfleet.build.worlds import make_train_world
from qfleet.distributed.learners.actor_learner import ActorLearner, make_actor_learner
from qfleet.distributed.learners.actor_learner_state import complete_files
from qfleet.distributed.learners.group import LearnerGroup
from qfleet.distributed.learners.messages import LearnOwn
from qfleet.errors import UsageError
from qfleet.learn import Learner
from qfleet.plan import make_plan, updates_per_step
from qfleet.plan.schema import BufferReplay, Plan
from qfleet.plan.sync_schema import ServerSync
from qfleet.plan.validate.placement import actor_learner_plan
from qfleet.replay import Prioritized
from qfleet.training import requests
from qfleet.training.evaluator import Evaluator
from qfleet.watch import read_json, read_rows
from tests.distributed.learners.test_runs import ends, events, saved, updates_due
from tests.support.runs import JUDGED, RANDOM, SMALL, kill_first_learner

pytestmark = pytest.mark.timeout(110)
TWO = {**SMALL, "learners.num": 2, "learners.bundles": True, "learners.timeout_seconds": 5.0, "until.steps": 600}
PRIORITIES = {"replay.sampler.type": "prioritized"}
GORILA = {"sync.type": "server", "sync.shards": 2, "sync.max_staleness": None}


def two(**more: Any) -> Plan:
    named = {name.replace("__", "."): value for name, value in more.items()}
    return make_plan("CartPole-v1", overrides={**TWO, **named})


def files_of(folder: Path, number: int) -> list[str]:
    newest = max((folder / "checkpoints").iterdir())
    return sorted(str(path.relative_to(newest)) for path in newest.glob(f"bundles/{number}-*/**/*") if path.is_file())


def test_an_actor_learner_has_its_part_of_the_plan() -> None:
    plan = two(learners__num=4, env__num=8, algo__batch_size=64, replay__capacity=1000, algo__learn_start_steps=30)
    part = actor_learner_plan(plan)
    assert isinstance(part.replay, BufferReplay)
    assert (part.env.num, part.algo.batch_size, part.replay.capacity, part.algo.learn_start_steps) == (2, 16, 250, 8)
    assert updates_per_step(part) == 4 * updates_per_step(plan)  # of its own steps; of all steps the same
    assert actor_learner_plan(make_plan("CartPole-v1")) == make_plan("CartPole-v1")


@pytest.mark.parametrize(
    "more",
    [{}, *(pytest.param(more, marks=pytest.mark.slow) for more in (PRIORITIES, RANDOM))],
    ids=["uniform", "prioritized", "drawing"],
)
def test_a_run_of_actor_learners_repeats_and_resumes_exactly(tmp_path: Path, more: dict[str, Any]) -> None:
    plan = make_plan("CartPole-v1", overrides={**TWO, **more, "log.history": True})
    whole = train(plan, out=tmp_path / "whole")
    half = train(make_plan("CartPole-v1", overrides={**TWO, **more, "until.steps": 304}), out=tmp_path / "half")
    names = files_of(half.path, 1)
    assert any(name.endswith("state.json") for name in names)
    assert any("/replay/rows_" in name for name in names)
    resumed = resume(half.path, steps=600)
    one, other = saved(whole.path), saved(resumed.path)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert whole.status["exact"]
    assert resumed.status["exact"]
    assert whole.status["env_steps"] == resumed.status["env_steps"]
    assert check_history(whole.path / "history") == []


def test_steps_and_episodes_of_all_actor_learners_count(tmp_path: Path) -> None:
    more = {"until.steps": 3_000, "log.every_steps": 100}
    found = train(make_plan("qfleet.testing.toys:toys/Traced-v0", overrides={**TWO, **more}), out=tmp_path)
    end = ends(found.path)
    assert 3_000 <= end["env_steps"] < 3_000 + 8 * found.plan.env.num
    part = actor_learner_plan(found.plan)
    own = end["env_steps"] // 2  # both make as many
    due = int((own - part.algo.learn_start_steps) * updates_per_step(part))
    assert abs(end["updates"] - due) <= 2
    row = [row for row in read_rows(found.path / "metrics.jsonl") if row["kind"] == "progress"][-1]
    assert row["episodes"] == pytest.approx(row["env_steps"] / 6, rel=0.1)  # they last six steps in the mean


@pytest.mark.slow
def test_environment_faults_of_any_actor_learner_are_logged(tmp_path: Path) -> None:
    more: dict[str, Any] = {"env.workers": 2, "env.options": {"every": 5}, "env.rebuilds": 1_000, "until.steps": 1_500}
    plan = make_plan(
        "qfleet.testing.toys:toys/Breaking-v0", overrides={**TWO, **more, "learners.timeout_seconds": 20.0}
    )
    found = train(plan, out=tmp_path)
    assert {event.get("actor") for event in events(found.path, "env_fault")} == {None, 1}


def test_a_killed_actor_learner_is_restarted_with_an_empty_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles, strike = kill_first_learner(monkeypatch)

    def enough(row: dict[str, Any]) -> bool:
        """The new one is there."""
        return row["kind"] == "progress" and len(events(next(tmp_path.iterdir()), "group_formed")) == 2

    more = {"until.steps": 1_000_000, "log.every_steps": 400, "log.history": True, **PRIORITIES}
    found = train(make_plan("CartPole-v1", overrides={**TWO, **more}), out=tmp_path, callbacks=[strike, enough])
    assert found.status["state"] == "stopped"
    (lost,) = events(found.path, "learner_lost")
    assert lost["replaced"]
    assert not found.status["exact"]
    assert check_history(found.path / "history") == []
    assert all(not handle.control.is_alive() for handle in handles)


def test_an_actor_learner_missing_from_a_checkpoint_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as lost:
        lost.setattr(LearnerGroup, "state_files", lambda group: iter(()))  # as if it had been lost while it was read
        half = train(two(until__steps=300), out=tmp_path)
    resumed = resume(half.path, steps=500)
    assert [event["learner"] for event in events(resumed.path, "bundle_inexact")] == [1]
    assert resumed.status["state"] == "done"
    assert not resumed.status["exact"]


def test_only_a_complete_set_of_files_is_restored() -> None:
    whole = ["bundles/2-ab12/replay/rows_0_1.zst", "bundles/2-ab12/state.json", "bundles/2-ab12/state.safetensors"]
    found = complete_files([*whole, "model.safetensors", "bundles/12-ff/state.json"], 2)
    assert found == {name.removeprefix("bundles/2-ab12/"): name for name in whole}
    assert complete_files(whole[:2], 2) == {}
    assert complete_files(whole, 1) == {}


# A single one


def actor_learner_of(plan: Plan, number: int = 1, incarnation: int = 0) -> ActorLearner:
    return make_actor_learner(plan, make_train_world(plan).spec, number, incarnation)


def all_hold(actor_learner: ActorLearner, times: float, steps: int = 100) -> LearnOwn:
    """A request to learn, by which all replays together hold `times` the items of this one."""
    stock = actor_learner.batch_source.replay.totals()
    items, mass = round(times * stock.items), times * stock.mass
    return LearnOwn(0, 1e-3, learners=2, items=items, mass=mass, top=1.0, steps=steps)


def test_an_actor_learners_gradient_counts_by_its_replay_totals() -> None:
    actor_learner = actor_learner_of(two(learners__timeout_seconds=40.0))
    actor_learner.on_joined(0, 0)
    for times, share in ((1.0, 2.0), (2.0, 1.0), (8.0, 0.25)):
        assert actor_learner.act_until_ready()
        batch, counts = actor_learner.draw_batch(all_hold(actor_learner, times))
        assert counts == pytest.approx(share)
        actor_learner.batch_source.after_update(batch, np.ones(len(batch.ids), np.float32))
    assert not actor_learner.last_totals.behind  # type: ignore[union-attr]
    assert actor_learner.batch_source.limiter.updates == 3


@pytest.mark.parametrize("incarnation", [7, 0], ids=["late", "not in the checkpoint"])
def test_a_late_actor_learner_catches_up_with_the_others(incarnation: int) -> None:
    more = {"algo.learn_start_steps": 4_000, "replay.capacity": 9_000, **PRIORITIES}
    plan = make_plan("CartPole-v1", overrides={**TWO, **more, "until.steps": 10_000})
    late, first = actor_learner_of(plan, incarnation=incarnation), actor_learner_of(plan)
    assert late.paused  # it has no weights to act with
    late.on_joined(500, 6_000)
    first.on_joined(0, 0)
    batch, _ = late.draw_batch(replace(all_hold(late, 1.0), items=100, mass=100.0))
    assert late.batch_source.steps < 50  # it does not wait for a full replay
    assert late.exploration_step() == 100  # by the request
    assert isinstance(late.batch_source.replay.sampler, Prioritized)
    assert late.batch_source.replay.sampler.draws == 501
    assert late.batch_source.limiter.updates == 500
    assert len(batch.ids) == 8
    first.timeout_seconds = 0.0
    first.act()
    while not len(first.batch_source.replay):
        first.act()
    first.draw_batch(replace(all_hold(first, 1.0), items=100, mass=100.0))
    assert first.report().totals.behind  # type: ignore[union-attr]  # it was cut short, and reports so


def test_a_late_actor_learner_restores_its_own_state() -> None:
    plan = make_plan("CartPole-v1", overrides={**TWO, **PRIORITIES})
    late, other = actor_learner_of(plan, incarnation=3), actor_learner_of(plan, incarnation=4)
    late.on_joined(500, 6_000)  # its limiter counts the updates that others have made
    assert late.act_until_ready()
    names = msgspec.json.decode(late.read_file(""))[1:]
    for name in names:
        other.write_file(name, late.read_file(name))
    assert other.load_written() == 0
    assert other.batch_source.limiter.forgiven == late.batch_source.limiter.forgiven == -500


def test_an_actor_learners_state_is_read_and_restored_as_files() -> None:
    plan = make_plan("CartPole-v1", overrides={**TWO, **PRIORITIES})
    one, other = actor_learner_of(plan), actor_learner_of(plan, incarnation=3)
    one.on_joined(0, 0)
    assert one.act_until_ready()
    batch, _ = one.draw_batch(all_hold(one, 1.0))
    one.batch_source.after_update(batch, np.ones(len(batch.ids), np.float32))

    instance_id, *names = msgspec.json.decode(one.read_file(""))
    assert not one.act_when_idle()  # it does not act
    assert instance_id == one.instance_id != other.instance_id
    files = {name: one.read_file(name) for name in names}
    assert one.act_when_idle()  # the last of them was read
    files = {name: one.read_file(name) for name in msgspec.json.decode(one.read_file(""))[1:]}
    other.write_file("state.json", b"left over from a damaged checkpoint")
    other.write_file("", b"")
    for name, data in files.items():
        other.write_file(name, data)
    assert other.load_written() == 0
    assert other.paused
    assert replace(other.report(), instance_id="") == replace(one.report(), instance_id="")
    other.on_joined(9, 9)
    for actor_learner in (one, other):
        actor_learner.act()
    assert one.batch_source.steps == other.batch_source.steps
    drawn = [actor_learner.batch_source.replay.sample(8) for actor_learner in (one, other)]
    assert drawn[0] is not None
    assert drawn[1] is not None
    assert np.array_equal(drawn[0].ids, drawn[1].ids)
    assert np.array_equal(drawn[0].obs, drawn[1].obs)
    one.reseed(1)
    assert not np.array_equal(one.batch_source.replay.sample(8).ids, other.batch_source.replay.sample(8).ids)  # type: ignore[union-attr]


# Several of them


@pytest.mark.parametrize(
    "sync",
    [
        pytest.param({"sync.type": "local", "sync.every_updates": 3}, marks=pytest.mark.slow),
        pytest.param({"sync.codec.type": "int8"}, marks=pytest.mark.slow),
        pytest.param(GORILA, marks=pytest.mark.slow),
    ],
    ids=["local", "int8", "gorila"],
)
def test_a_run_of_actor_learners_rolls_back_and_continues(
    tmp_path: Path, sync: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_gradients = Learner.compute_gradients
    left = [40]

    def poisoned(learner: Learner, batch: Any, *more: Any) -> Any:
        loss, priority, value, gradients = compute_gradients(learner, batch, *more)
        left[0] -= 1
        if -6 <= left[0] < 0:
            loss = loss * float("nan")
        return loss, priority, value, gradients

    monkeypatch.setattr(Learner, "compute_gradients", poisoned)
    plan = make_plan("CartPole-v1", overrides={**TWO, **sync, "log.history": True})
    found = train(plan, out=tmp_path)
    assert found.status["state"] == "done"
    assert len(events(found.path, "rollback")) == 1
    # Steps after the checkpoint do not count twice: as many updates were made as all steps allow.
    part, end = actor_learner_plan(plan), ends(found.path)
    assert end["updates"] == pytest.approx(updates_due(part, end["env_steps"] // 2), abs=6)
    assert not events(found.path, "learner_lost")
    assert not events(found.path, "bundle_inexact")
    assert check_history(found.path / "history") == []


@pytest.mark.slow
def test_actor_learners_are_added_and_removed_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.training.requests.POLL_SECONDS", 0.0)
    wanted = [
        requests.SyncRequest(ServerSync(max_staleness=None), 3),
        requests.SyncRequest(ServerSync(max_staleness=None), 2),
    ]

    def write_next_request(row: dict[str, Any]) -> None:
        folder = next(tmp_path.iterdir())
        met = {event["learners"] for event in events(folder, "group_formed")}
        if row["kind"] == "progress" and wanted and (len(wanted) == 2 or 3 in met):
            requests.write_request(folder, wanted.pop(0))

    plan = two(until__steps=8_000, log__every_steps=200, save__every_steps=2_000)
    found = train(plan, out=tmp_path, callbacks=[write_next_request])
    assert found.status["state"] == "done"
    assert {event["learners"] for event in events(found.path, "group_formed")} == {2, 3}
    assert not events(found.path, "learner_lost")
    assert [event["learner"] for event in events(found.path, "learner_left")] == [2]


@pytest.mark.slow
def test_the_best_checkpoint_holds_the_weights_that_were_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, validate = list[dict[str, Any]](), Evaluator.validate

    def noted(judge: Evaluator, policy: Any, **options: Any) -> Any:
        seen.append({name: value.clone().numpy() for name, value in policy.net.state_dict().items()})
        return validate(judge, policy, **options)

    monkeypatch.setattr(Evaluator, "validate", noted)
    found = train(two(**{**GORILA, **JUDGED, "until.steps": 900}), out=tmp_path)
    best, rows = read_json(found.path / "best.json"), read_rows(found.path / "metrics.jsonl")
    judged = [row["env_steps"] for row in rows if row["kind"] == "eval" and row["split"] == "validation"]
    held = load_file(found.path / "checkpoints" / f"step_{best['step']:012d}" / "model.safetensors")
    weights = seen[judged.index(best["step"])]
    assert all(np.array_equal(held[name], value) for name, value in weights.items())


@pytest.mark.slow
def test_gorila_learns_asynchronously_and_resumes(tmp_path: Path) -> None:
    small = {name: value for name, value in TWO.items() if not name.startswith("learners.num")}
    plan = make_plan("CartPole-v1", "gorila", {**small, "log.history": True, "until.steps": 400})
    found = train(plan, out=tmp_path)
    before = ends(found.path)["updates"]
    assert not found.status["exact"]
    again = resume(found.path, steps=900)
    assert again.status["env_steps"] >= 900
    assert again.status["updates"] > before > 0
    assert check_history(again.path / "history") == []
    (versions,) = {tuple(event["versions"]) for event in events(again.path, "server")[-1:]}
    assert len(versions) == 2  # shards
    assert versions[0] > again.status["updates"] - before  # the other actor-learner's gradients are steps too


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"env.num": 5}, "env.num=5"),
        ({"algo.batch_size": 15}, "algo.batch_size=15"),
        ({"env.workers": 3}, "env.workers=3"),
    ],
)
def test_plans_that_do_not_divide_evenly_are_refused(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(UsageError, match=path):
        make_plan("CartPole-v1", overrides={**TWO, **changes})
