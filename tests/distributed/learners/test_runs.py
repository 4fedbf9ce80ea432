"""Runs with several learners: from the plan to the last checkpoint, switched on the way, stopped and resumed."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from qfleet import resume, train
from qfleet.audit.checks import check_history
from qfleet.learn import Learner
from qfleet.plan import make_plan, updates_per_step
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import AllreduceSync, Int8Codec, LocalSync, ServerSync, Sync
from qfleet.training import requests
from qfleet.watch import read_json, read_rows
from qfleet.watch.text import end_lines
from tests.support.runs import SMALL, kill_first_learner

pytestmark = pytest.mark.timeout(110)
TWO = {**SMALL, "learners.num": 2, "learners.timeout_seconds": 5.0, "until.steps": 600}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "events.jsonl") if row["kind"] == kind]


def ends(folder: Path) -> dict[str, Any]:
    (row,) = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "end"]
    return row


def updates_due(plan: Plan, steps: int) -> int:
    return int((steps - plan.algo.learn_start_steps) * updates_per_step(plan))


def saved(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    newest = max((folder / "checkpoints").iterdir())
    return {**load_file(newest / "model.safetensors"), **load_file(newest / "optim.safetensors")}


def test_a_run_of_two_learners_repeats_and_resumes_exactly(tmp_path: Path) -> None:
    whole = train(make_plan("CartPole-v1", overrides=TWO), out=tmp_path / "whole")
    half = train(make_plan("CartPole-v1", overrides={**TWO, "until.steps": 304}), out=tmp_path / "half")
    assert read_json(half.path / "status.json")["together"]["sync"]["type"] == "allreduce"
    resumed = resume(half.path, steps=600)
    one, other = saved(whole.path), saved(resumed.path)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert read_json(resumed.path / "status.json")["exact"]


@pytest.mark.parametrize("runtime", [pytest.param("inline", marks=pytest.mark.slow), "processes"])
def test_the_strategy_is_switched_during_a_run(tmp_path: Path, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.training.requests.POLL_SECONDS", 0.0)
    wanted: list[Sync] = [
        ServerSync(shards=2, max_staleness=4),
        LocalSync(every_updates=8),
        AllreduceSync(codec=Int8Codec()),
    ]
    asked = list(wanted)

    def write_next_request(row: dict[str, Any]) -> None:
        folder = next(tmp_path.iterdir())
        if row["kind"] == "progress" and wanted and not requests.is_pending(folder):
            requests.write_request(folder, requests.SyncRequest(wanted.pop(0), 2))

    more = {"runtime.type": runtime, "until.steps": 4_000, "log.every_steps": 200, "eval.every_steps": 4_000}
    plan = make_plan("CartPole-v1", overrides={**TWO, **more, "log.history": True})
    found = train(plan, out=tmp_path, callbacks=[write_next_request])
    strategies = [event["after"] for event in events(found.path, "sync")]
    assert strategies == ["server", "local", "allreduce"]
    assert [event["sync"] for event in events(found.path, "group_formed")] == ["allreduce", *strategies]
    status = read_json(found.path / "status.json")
    assert status["together"]["sync"]["codec"]["type"] == "int8"
    assert requests.current_plan(found.path, plan).sync == asked[-1]
    assert ends(found.path)["updates"] == updates_due(plan, ends(found.path)["env_steps"])  # none lost, none twice
    assert len(read_rows(found.path / "history" / "team.jsonl")) > 1_000
    assert check_history(found.path / "history") == []


def test_a_schedule_is_followed_at_its_updates_and_again_after_a_resume(tmp_path: Path) -> None:
    entries = ("50 sync.type=local sync.every_updates=4", "90 sync.type=server", "130 sync.type=allreduce")
    plan = make_plan("CartPole-v1", overrides={**TWO, "learners.schedule": entries, "log.history": True})
    whole, again = (train(plan, out=tmp_path / name) for name in ("whole", "again"))
    half = train(replace(plan, until=replace(plan.until, steps=256)), out=tmp_path / "half")  # in the first stretch
    assert read_json(half.path / "status.json")["together"]["sync"]["type"] == "local"
    for found in (whole, again, resume(half.path, steps=600)):
        rows = [row for row in read_rows(found.path / "metrics.jsonl") if row["kind"] == "sync"]
        strategies = [(row["after"], row["updates"]) for row in rows]
        assert [name for name, _ in strategies] == ["local", "server", "allreduce"]
        # Between two turns, so not before, and at most the updates of a turn after.
        assert all(due <= made < due + 5 for due, (_, made) in zip((50, 90, 130), strategies, strict=True)), strategies
        assert ends(found.path)["updates"] == updates_due(plan, ends(found.path)["env_steps"])
        assert check_history(found.path / "history") == []
    one, other = saved(whole.path), saved(again.path)
    assert all(np.array_equal(one[name], other[name]) for name in one)  # its moments are the plan's, not the clock's
    assert whole.status["exact"]


def test_a_switch_survives_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.training.requests.POLL_SECONDS", 0.0)
    compute_gradients, wanted, left = Learner.compute_gradients, [LocalSync(every_updates=4)], list[int]()

    def write_next_request(row: dict[str, Any]) -> None:
        folder = next(tmp_path.iterdir())
        if row["kind"] == "progress" and wanted:
            requests.write_request(folder, requests.SyncRequest(wanted.pop(), 2))
            return
        if row["kind"] == "progress" and not left and events(folder, "sync"):
            left.append(6)  # batches in a row, some rows after the switch: the run goes back

    def poisoned(learner: Learner, batch: Any, *more: Any) -> Any:
        loss, *rest = compute_gradients(learner, batch, *more)
        if not left or not left[0]:
            return (loss, *rest)
        left[0] -= 1
        return (loss * float("nan"), *rest)

    monkeypatch.setattr(Learner, "compute_gradients", poisoned)
    far = {"save.every_steps": 10**6, "save.every_seconds": 10**6}  # the switch is in the commit of its own
    found = train(make_plan("CartPole-v1", overrides={**TWO, **far}), out=tmp_path, callbacks=[write_next_request])
    assert len(events(found.path, "rollback")) == 1
    assert found.status["together"]["sync"]["type"] == "local"
    assert events(found.path, "group_formed")[-1]["sync"] == "local"
    assert ends(found.path)["updates"] == updates_due(found.plan, ends(found.path)["env_steps"])


def test_a_switch_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.training.requests.POLL_SECONDS", 0.0)
    wanted = [LocalSync(every_updates=4)]

    def write_next_request(row: dict[str, Any]) -> bool:
        folder = next(tmp_path.iterdir())
        if row["kind"] == "progress" and wanted:
            requests.write_request(folder, requests.SyncRequest(wanted.pop(), 3))
            return False
        return row["kind"] == "progress" and bool(events(folder, "sync"))

    # Far apart: without a commit of its own the switch would be in no checkpoint.
    more = {"save.every_steps": 10**6, "save.every_seconds": 10**6, "until.steps": 10**6, "log.every_steps": 100}
    plan = make_plan("CartPole-v1", overrides={**TWO, **more})
    found = train(plan, out=tmp_path, callbacks=[write_next_request])
    assert not found.status["exact"]  # when it was asked for is no seed's doing
    newest = sorted((found.path / "checkpoints").iterdir())
    assert len(newest) >= 2
    shutil.rmtree(newest[-1])  # as if the run had been killed right after the switch
    again = resume(found.path, steps=found.status["env_steps"])
    assert again.status["together"]["sync"]["type"] == "local"
    assert again.status["together"]["learners"] == 3


@pytest.mark.parametrize(
    ("more", "exact"),
    [
        ({}, True),
        ({"sync.type": "server"}, True),
        ({"sync.send": "steps"}, True),
        ({"sync.type": "server", "sync.max_staleness": 2}, False),
        pytest.param({"sync.type": "server", "sync.spare": 1}, False, marks=pytest.mark.slow),
        pytest.param({"learners.balance": True}, False, marks=pytest.mark.slow),
    ],
    ids=["allreduce", "server", "steps", "loose", "spare", "balance"],
)
def test_a_run_reports_whether_its_seed_determines_it(tmp_path: Path, more: dict[str, Any], exact: bool) -> None:
    found = train(make_plan("CartPole-v1", overrides={**TWO, **more, "until.steps": 120}), out=tmp_path)
    assert found.status["exact"] is exact


def test_learners_are_added_and_removed_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.training.requests.POLL_SECONDS", 0.0)
    wanted, sizes = [3, 1, 2], list[int]()

    def write_next_request(row: dict[str, Any]) -> None:
        folder = next(tmp_path.iterdir())
        if row["kind"] == "progress" and not requests.is_pending(folder):
            formed = events(folder, "group_formed")
            there = [*sizes, formed[-1]["learners"]] if formed else sizes
            if wanted and (len(sizes) == 0 or sizes[-1] == 1 or there[-1] == sizes[-1]):
                sizes.append(wanted.pop(0))
                requests.write_request(folder, requests.SyncRequest(AllreduceSync(), sizes[-1]))

    plan = make_plan(
        "CartPole-v1", overrides={**TWO, "until.steps": 6_000, "log.every_steps": 200, "save.every_steps": 9_000}
    )
    found = train(plan, out=tmp_path, callbacks=[write_next_request])
    assert [event["learners"] for event in events(found.path, "sync")] == [3, 1, 2]
    assert {event["learners"] for event in events(found.path, "group_formed")} == {2, 3}
    assert [event["learner"] for event in events(found.path, "learner_left")] == [1, 2]
    assert not events(found.path, "learner_lost")
    assert ends(found.path)["updates"] == updates_due(plan, ends(found.path)["env_steps"])
    assert read_json(found.path / "status.json")["together"]["learners"] == 2


def test_an_invalid_request_is_refused_and_removed(tmp_path: Path) -> None:
    (tmp_path / requests.WANTED).write_text('{"sync": {"type": "telepathy"}, "learners": 2}')
    with pytest.raises(ValueError, match=r"wanted\.json"):
        requests.take_request(tmp_path)
    assert requests.take_request(tmp_path) is None


def test_a_request_stays_pending_until_it_is_done_and_the_next_is_not_lost(tmp_path: Path) -> None:
    one, other = requests.SyncRequest(LocalSync(), 2), requests.SyncRequest(AllreduceSync(), 3)
    requests.write_request(tmp_path, one)
    assert requests.take_request(tmp_path) == one
    assert requests.is_pending(tmp_path)
    requests.write_request(tmp_path, other)
    requests.finish_request(tmp_path)
    assert requests.take_request(tmp_path) == other
    requests.finish_request(tmp_path)
    assert not requests.is_pending(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_learner_killed_in_the_middle_of_a_run_is_only_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles, strike = kill_first_learner(monkeypatch)
    plan = make_plan("CartPole-v1", overrides={**TWO, "log.every_steps": 200, "log.history": True})
    found = train(plan, out=tmp_path, callbacks=[strike])
    assert check_history(found.path / "history") == []
    (lost,) = events(found.path, "learner_lost")
    assert lost["learner"] == 1
    assert lost["replaced"]
    assert ends(found.path)["updates"] == updates_due(plan, ends(found.path)["env_steps"])
    assert all(not handle.control.is_alive() for handle in handles)  # no process is left behind


@pytest.mark.slow
def test_a_learner_that_is_given_up_is_reported_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles, strike = kill_first_learner(monkeypatch)
    plan = make_plan("CartPole-v1", overrides={**TWO, "log.every_steps": 200, "learners.restarts": 0})
    found = train(plan, out=tmp_path, callbacks=[lambda row: strike(row) if handles[0].control.is_alive() else None])
    (lost,) = found.status["lost"]
    assert lost.startswith("learner 1 (of 2) was lost for good at step ")
    assert "its process was ended by SIGKILL" in lost
    (warning,) = [row["text"] for row in events(found.path, "warning") if "lost for good" in row["text"]]
    assert warning == f"{lost}; it is not started again (learners.restarts), and the run goes on without it"
    assert f"lost: {lost}" in end_lines(found.status)
    assert found.status["not_exact"][0].startswith("a learner was lost: ")


@pytest.mark.parametrize(
    "more",
    [
        {"net.head.type": "implicit", "net.head.fractions": 4},
        pytest.param({"net.noisy": True}, marks=pytest.mark.slow),
    ],
    ids=["implicit", "noisy"],
)
def test_learners_that_draw_random_numbers_make_a_resume_inexact(tmp_path: Path, more: dict[str, Any]) -> None:
    found = train(make_plan("CartPole-v1", overrides={**TWO, **more, "until.steps": 120}), out=tmp_path)
    assert found.status["exact"]
    assert not resume(found.path, steps=200).status["exact"]  # a checkpoint has rank 0's generator only


def test_a_rejected_codec_stays_rejected_after_a_resume(tmp_path: Path) -> None:
    misled = {"sync.codec.type": "top_k", "sync.check_every_rounds": 2, "sync.least_cosine": 1.0}
    later = {"learners.schedule": ("60 sync.type=local sync.codec.type=top_k",)}  # it knows nothing of it
    plan = make_plan("CartPole-v1", overrides={**TWO, **misled, **later})
    half = train(replace(plan, until=replace(plan.until, steps=120)), out=tmp_path)
    assert events(half.path, "codec_given_up")
    assert any("sync.codec is given up" in row["text"] for row in events(half.path, "warning"))  # loudly
    rows = [row for row in read_rows(half.path / "metrics.jsonl") if row["kind"] == "progress" and row["updates"]]
    assert rows
    assert all(row["sent_bytes"] > 0 for row in rows)
    again = resume(half.path, steps=400)
    assert again.status["together"]["sync"]["type"] == "local"
    assert again.status["together"]["sync"].get("codec", {"type": "none"})["type"] == "none"


def test_moments_of_each_learners_own_make_a_resume_inexact(tmp_path: Path) -> None:
    found = train(make_plan("CartPole-v1", overrides={**TWO, "sync.send": "steps", "until.steps": 120}), out=tmp_path)
    assert found.status["exact"]
    assert not resume(found.path, steps=200).status["exact"]  # a checkpoint has rank 0's
