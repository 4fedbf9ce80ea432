"""What rows and status tell of a run's time, the lag of its policy and the age of its experience."""

import io
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.build.components import Components
from qfleet.build.make import make_components
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_train_world, world_threads
from qfleet.data import Rollout, Sequences
from qfleet.distributed.actors.pool import ActorPool
from qfleet.distributed.actors.process import ProcessActorLauncher, make_process_components
from qfleet.learn import FreshSource, ReplaySource
from qfleet.learn.batch_source import DrawnItems
from qfleet.system.timers import STAGES, Stopwatch
from qfleet.training.async_loop import AsyncLoop
from qfleet.training.inline import InlineLoop
from qfleet.training.log.run_log import RunLog
from qfleet.training.log.timing import RunTimes
from qfleet.watch import make_watcher, read_json, read_rows
from tests.distributed.actors.test_pool import fake_of, make_fake_pool
from tests.support.runs import JUDGED, LOCAL, resumed, small, status, trained
from tests.support.variants import FRESH


def make(**changes: Any) -> Components:
    plan = small({name.replace("__", "."): value for name, value in changes.items()})
    world = make_train_world(plan)
    components = make_components(resolve(plan, world.spec), world)
    components.actor.start()
    return components


def progress(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "progress"]


# Lag and age


def test_inline_all_updates_lie_between_choosing_a_step_and_taking_it_in() -> None:
    components = make()
    runtime, lags = InlineLoop(components), list[int]()
    for _ in range(60):
        lags += [tick.stats["lag"] for tick in runtime.turn() if "lag" in tick.stats]
    assert len(lags) == 60
    assert sum(lags) == components.learner.updates > 40
    assert set(lags) == {0, 1, 2}  # 5 updates for 16 steps


def test_a_fresh_block_is_valued_by_the_network_that_acted() -> None:
    components = make(**{name.replace(".", "__"): value for name, value in FRESH.items()})
    runtime, batch_source = InlineLoop(components), components.batch_source
    assert isinstance(batch_source, FreshSource)
    for block in range(3):
        while (
            batch_source.replay.head == batch_source.learned_items
        ):  # until the block is complete, which the next turn learns from
            list(runtime.turn())
        serials = np.arange(batch_source.learned_items, batch_source.replay.head)
        items = batch_source.replay.read_batch(serials, np.ones(len(serials), np.float32))
        assert isinstance(items, Sequences)
        with torch.no_grad():
            best = batch_source.learner.net(torch.from_numpy(items.obs).flatten(0, 1)).amax(1).view(items.last.shape)
        # Its first row was the last of the block before, acted by the network before; no return needs its value.
        torch.testing.assert_close(torch.from_numpy(batch_source.best_values(serials))[1:], best[1:])
        list(runtime.turn())
        assert components.learner.updates == (block + 1) * batch_source.epochs * batch_source.minibatches


def test_a_native_world_uses_every_core_if_no_updates_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    fresh = small(FRESH)
    assert world_threads(fresh, 8) == 4
    assert world_threads(fresh, 2) == 2
    assert world_threads(small(), 8) == 3  # the learner updates on one thread while it steps
    assert world_threads(small({**FRESH, "runtime.type": "processes"}), 8) == 1  # asked for its spaces only


def test_the_lag_of_an_actor_pool_is_in_published_versions() -> None:
    components, pool, _, _ = make_fake_pool()
    runtime, seen = AsyncLoop(components, pool), list[tuple[int, int]]()
    insert = pool.insert

    def watched(rollout: Rollout) -> None:
        seen.append((pool.version, rollout.version))
        insert(rollout)

    pool.insert = watched  # type: ignore[method-assign]
    lags: list[int] = []
    for _ in range(60):
        for handle in pool.handles.values():
            fake_actor = fake_of(handle)
            while len(fake_actor.queue.waiting) < 4:
                next(fake_actor.act)  # as actors do that are not asked
        lags += [tick.stats["lag"] for tick in runtime.turn() if "lag" in tick.stats]
    assert lags == [shown - acted for shown, acted in seen]
    assert len(lags) > 20
    assert min(lags) >= 0
    assert max(lags) > 0


def test_age_is_in_steps_whatever_an_item_is() -> None:
    drawn = DrawnItems()
    assert drawn.age(0, 0) is None
    drawn.count(np.array([0, 10, 20]), 30)  # 30, 20 and 10 steps old
    assert drawn.age(30, 30) == 20.0
    drawn.count(np.array([29]), 30)
    assert drawn.age(30, 30) == pytest.approx(61 / 4)
    sequences = DrawnItems()
    sequences.count(np.array([0, 5, 10]), 30)  # two steps for each item
    assert sequences.age(30, 15) == 20.0


def test_age_of_uniform_draws_is_half_of_what_is_kept(tmp_path: Path) -> None:
    run = trained(small({"until.steps": 1200, "replay.capacity": 400, "log.every_steps": 400}), tmp_path)
    assert progress(run.path)[-1]["replay_age"] == pytest.approx(200, rel=0.15)


def test_metrics_are_means_since_the_last_row_and_survive_a_checkpoint() -> None:
    components = make()
    runtime = InlineLoop(components)
    for _ in range(30):
        list(runtime.turn())
    batch_source = components.batch_source
    assert isinstance(batch_source, ReplaySource)
    other = make().batch_source
    other.load_state_dict(batch_source.state_dict())
    age = batch_source.take_metrics()["replay_age"]
    assert other.take_metrics()["replay_age"] == age is not None
    assert batch_source.take_metrics()["replay_age"] is None
    older = {name: value for name, value in batch_source.state_dict().items() if name != "drawn"}
    other.load_state_dict(older)
    assert other.take_metrics()["replay_age"] is None


# Rows


def test_every_progress_row_has_lag_age_gate_actors_and_stages(tmp_path: Path) -> None:
    run = trained(small(), tmp_path)
    rows = progress(run.path)
    # Learning starts after 40 steps.
    assert [row["gate"] for row in rows] == ["filling", *["learning"] * (len(rows) - 1)]
    assert {row["actors"] for row in rows} == {"1/1"}
    assert rows[0]["policy_lag"] == 0.0
    assert rows[0]["replay_age"] is None
    assert all(0 < row["policy_lag"] <= 2 and 0 < row["replay_age"] <= 150 for row in rows[2:])
    for row in rows:
        assert set(row["stages"]) == {*STAGES, "other"}
        assert sum(row["stages"].values()) == pytest.approx(1.0, abs=0.01)
        assert row["stages"]["env"] > 0 < row["stages"]["infer"]
        assert row["stages"]["idle"] == 0
    assert rows[0]["stages"]["update"] == 0 < rows[-1]["stages"]["update"]


def test_without_a_replay_there_is_no_age(tmp_path: Path) -> None:
    run = trained(small(FRESH), tmp_path)
    rows = progress(run.path)
    assert rows[-1]["policy_lag"] is not None
    assert rows[-1]["gate"] == "learning"
    assert "replay_age" not in rows[-1]


def test_a_learner_that_mostly_idles_is_waiting() -> None:
    components, now = make(), [0]
    times = RunTimes(components)
    times.stopwatch = Stopwatch(lambda: now[0])
    times.mark = times.stopwatch.read()
    assert times.learner_state() == "filling"
    components.learner.updates = 5
    assert times.learner_state() == "learning"
    with times.stopwatch.idle:
        now[0] += 60
    now[0] += 40
    assert times.learner_state() == "waiting"
    times.take_shares()
    now[0] += 40
    assert times.learner_state() == "learning"
    assert isinstance(components.batch_source, ReplaySource)
    components.batch_source.refill = 3
    assert times.learner_state() == "filling"


def test_all_warnings_are_in_the_snapshot(tmp_path: Path) -> None:
    run_log = RunLog(make(), tmp_path)
    for index in range(5):
        run_log.warn(f"warning {index}")
    assert run_log.snapshot()["warnings"] == [f"warning {index}" for index in range(5)]
    run_log.close()


def test_actors_that_are_only_starting_do_not_make_the_learner_idle() -> None:
    components, pool, _, _ = make_fake_pool()
    watch = Stopwatch()
    runtime = AsyncLoop(components, pool, 0, watch)
    handles = pool.handles
    pool.handles = {}  # no actor answers yet
    list(runtime.turn())
    assert (watch.idle.total_ns, components.steps) == (0, 0)
    pool.handles = handles
    list(runtime.turn())
    assert components.steps > 0 < watch.insert.total_ns
    pool.handles = {}
    list(runtime.turn())
    assert watch.idle.total_ns >= 1_000_000  # a nap of a millisecond


def test_the_time_of_an_actor_that_was_replaced_still_counts() -> None:
    plan = small({"runtime.type": "processes", "actors.num": 2})
    with closing(make_train_world(plan)) as world:
        plan, spec = resolve(plan, world.spec), world.spec
    with closing(make_process_components(plan, spec)) as components:
        assert isinstance(components.actor, ActorPool)
        launcher = components.actor.launcher
        assert isinstance(launcher, ProcessActorLauncher)
        launcher.counters.set(0, env_ns=500, wait_ns=30)
        launcher.counters.set(1, env_ns=7)
        handle = launcher.launch(0, 1)
        handle.stop()
        assert launcher.counts()["env_ns"] == 507
        assert launcher.counts()["wait_ns"] >= 30
        handle.close()


# The summary


def test_status_and_card_show_where_the_time_went(tmp_path: Path) -> None:
    out = io.StringIO()
    run = trained(small(JUDGED), tmp_path, watcher=make_watcher("plain", out))
    profile = status(run.path)["profile"]
    assert (profile["env_steps"], profile["updates"]) == (run.status["env_steps"], run.status["updates"])
    assert all(
        profile["seconds"][stage] > 0 for stage in ("env", "infer", "insert", "sample", "update", "save", "eval")
    )
    assert sum(profile["seconds"].values()) == pytest.approx(profile["wall_seconds"], abs=0.02)
    assert sum(row["stages"]["eval"] > 0 for row in progress(run.path)) >= 2  # those after a validation
    said = out.getvalue().splitlines()[-1]
    assert said.startswith("time: ")
    assert f"{profile['bottleneck']}-bound: {profile['advice']}" in said
    assert profile["advice"] in (run.path / "card.md").read_text()


def test_the_profile_of_a_resumed_run_starts_at_the_resume(tmp_path: Path) -> None:
    run = trained(small({"until.steps": 200}), tmp_path)
    before = run.status
    again = resumed(run, steps=300)
    profile = again.status["profile"]
    assert profile["env_steps"] == again.status["env_steps"] - before["env_steps"]
    assert profile["updates"] == again.status["updates"] - before["updates"]


def test_in_processes_actors_take_their_own_time(tmp_path: Path) -> None:
    # Not measured: on a busy machine one process might act for both.
    run = trained(small({"runtime.type": "processes", "actors.num": 2, **LOCAL}), tmp_path)
    profile = status(run.path)["profile"]
    assert set(profile["actor_shares"]) == {"env", "infer", "sync", "wait"}
    assert sum(profile["actor_shares"].values()) == pytest.approx(1.0, abs=0.01)
    assert profile["actor_shares"]["env"] > 0 < profile["actor_shares"]["infer"]
    assert profile["seconds"]["env"] == profile["seconds"]["infer"] == 0
    assert 0 < profile["actors_busy"] <= 1
    assert 0 < profile["speed_up"] <= 3 == profile["processes"]
    assert profile["parallel_efficiency"] == pytest.approx(profile["speed_up"] / 3, abs=1e-4)
    worked = sum(total_ns for stage, total_ns in profile["seconds"].items() if stage not in ("idle", "other"))
    assert profile["work_seconds"] > worked
    rows = progress(run.path)
    assert rows[-1]["actors"] == "2/2"
    assert set(rows[-1]["actor_stages"]) == {"env", "infer", "sync", "wait"}


def test_a_profile_of_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qfleet.cli import main
    from tests.support.runs import train_arguments

    command = [word for word in train_arguments(tmp_path, {"log.every_steps": 20}) if word != "--quiet"]
    assert main([*command, "--profile", "--name", "p"]) == 0
    shown = capsys.readouterr().out
    assert "per update" in shown
    assert "no energy counters" in shown or " J per million steps" in shown
    profile = read_json(tmp_path / "p" / "profile.json")
    assert profile == status(tmp_path / "p")["profile"]
    assert "functions that took the most time" in (tmp_path / "p" / "profile.txt").read_text()
    assert main(["resume", str(tmp_path / "p"), "--steps", "360", "--profile", "--json"]) == 0
    out, err = capsys.readouterr()
    assert all(json.loads(components)["kind"] for components in out.splitlines())
    assert "per update" in err
    assert read_json(tmp_path / "p" / "profile.json")["env_steps"] < 100


def test_on_ray_there_is_the_table_but_no_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qfleet.cli.profile import make_profilers, save_profile

    here, away = small(), small({"runtime.type": "ray", "actors.num": 2})
    assert [len(make_profilers(plan)) for plan in (here, away)] == [1, 0]
    run = trained(here, tmp_path)
    save_profile(run, make_profilers(away), json=False, quiet=False)
    assert "per update" in (shown := capsys.readouterr().out)
    assert "functions" not in shown
    assert read_json(run.path / "profile.json") == run.status["profile"]
    assert not (run.path / "profile.txt").exists()
