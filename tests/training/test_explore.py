"""Whole runs that explore otherwise, pay a bonus or keep copies out: exact on resume, and they say what they did."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import Run, load, resume, train
from qfleet.build.make import make_components
from qfleet.build.worlds import make_train_world
from qfleet.data import Array, Batch, Sequences
from qfleet.errors import UsageError
from qfleet.watch import make_watcher
from tests.support.runs import Settings, resumed, rows, same, small, status, trained, until

BONUS: Settings = {"algo.bonus.type": "count", "algo.bonus.settle_steps": 30, "algo.bonus.scale": 0.5}
FILTER: Settings = {"replay.filter.type": "duplicates"}
OTHER: Settings = {"algo.explore.steps": None}
FROZEN = "FrozenLake-v1"
CELLS: dict[str, tuple[str, Settings]] = {
    "ladder": ("CartPole-v1", {**OTHER, "algo.explore.type": "ladder", "algo.explore.warm_steps": 50}),
    "softmax": ("CartPole-v1", {"algo.explore.type": "softmax", "algo.explore.end": 0.1}),
    "softmax-masked": ("toys/Masked-v0", {**OTHER, "algo.explore.type": "softmax"}),
    "bonus-hash": ("CartPole-v1", {**BONUS, "algo.n_step": 3}),
    "bonus-grid": ("CartPole-v1", {**BONUS, "algo.bonus.grid": 0.5, "replay.sampler.type": "prioritized"}),
    "bonus-clipped": ("toys/Random-v0", {**BONUS, "env.clip_reward": True, "env.normalize": "reward"}),
    "filter": (FROZEN, {**FILTER, "replay.filter.copies": 3, "algo.n_step": 1}),
    "filter-prioritized": (
        FROZEN,
        {
            **FILTER,
            "replay.filter.still": True,
            "replay.sampler.type": "prioritized",
            "replay.sampler.initial": "actor",
            "algo.n_step": 3,
        },
    ),
}
FRESH: Settings = {
    **BONUS,
    "replay.type": "fresh",
    "replay.rows": 8,
    "replay.minibatches": 2,
    "replay.capacity": None,
    "replay.samples_per_insert": None,
    "algo.batch_size": None,
    "algo.learn_start_steps": None,
    "algo.target.type": None,
    "algo.target.every_updates": None,
}
MEMORY: Settings = {
    **BONUS,
    "env.clip_reward": True,
    "algo.view.type": "sequences",
    "algo.view.burn_in": 2,
    "algo.view.length": 4,
    "algo.view.stride": 3,
    "net.memory.type": "gru",
    "net.memory.size": 8,
    "algo.batch_size": 4,
}


@pytest.mark.parametrize("cell", CELLS)
def test_exploration_variants_resume_bit_equal(cell: str, tmp_path: Path) -> None:
    check_exact(*CELLS[cell], tmp_path)


@pytest.mark.parametrize("changes", [FRESH, MEMORY], ids=["fresh", "memory"])
def test_a_bonus_resumes_exactly_with_every_batch_source(changes: Settings, tmp_path: Path) -> None:
    check_exact("CartPole-v1", changes, tmp_path)


def check_exact(env_id: str, changes: Settings, out: Path) -> None:
    plan = small(changes, env_id)
    whole = trained(plan, out / "whole")
    for steps in (20, 170):
        run = trained(until(plan, steps), out / str(steps))
        assert same(resumed(run, steps=300).path, whole.path)


def progress(run: Run) -> list[Settings]:
    return [row for row in rows(run.path) if row["kind"] == "progress"]


# What rows say


def test_without_bonus_and_filter_rows_have_no_such_fields(tmp_path: Path) -> None:
    run = trained(small(), tmp_path)
    for row in [*rows(run.path), status(run.path)]:
        assert not {"bonus_mean", "states_seen", "filtered"} & row.keys()
    assert progress(run)[0]["epsilon"] > progress(run)[-1]["epsilon"]


def test_a_ladders_epsilon_is_its_mean_and_softmax_has_none(tmp_path: Path) -> None:
    ladder = trained(small(CELLS["ladder"][1]), tmp_path)
    assert [row["epsilon"] for row in progress(ladder)][:2] == pytest.approx(
        [1.0, (0.4 + 0.04716 + 0.00556 + 0.00066) / 4], abs=1e-5
    )
    softmax = trained(small(CELLS["softmax"][1]), tmp_path)
    assert {row["epsilon"] for row in progress(softmax)} == {None}


def test_a_bonus_is_in_the_rows_and_returns_stay_raw(tmp_path: Path) -> None:
    told = progress(trained(small({**BONUS, "algo.bonus.grid": 0.5}), tmp_path))
    assert told[0]["bonus_mean"] == 0.0
    assert all(0 < row["bonus_mean"] <= 0.5 for row in told[2:])
    seen = [row["states_seen"] for row in told]
    assert seen == sorted(seen)
    assert 1 < seen[-1] <= 270
    # Every step of CartPole pays 1, so returns are whole numbers.
    sums = [row["return_mean"] * min(100, row["episodes"]) for row in told if row["episodes"]]
    assert sums == pytest.approx([round(each) for each in sums], abs=1e-9)


def test_the_filtered_share_is_in_rows_status_and_the_end(tmp_path: Path) -> None:
    words = io.StringIO()
    plan = small({**FILTER, "algo.n_step": 1}, FROZEN)
    run = train(plan, out=tmp_path, watcher=make_watcher("plain", words))
    told = progress(run)
    share = told[-1]["filtered"]
    # A lake of sixteen squares and four moves has few different steps.
    assert 0.5 < share < 1.0
    assert told[-1]["replay_size"] <= 200
    assert rows(run.path)[-1]["filtered"] == status(run.path)["filtered"] == pytest.approx(share, abs=0.05)
    assert f"filtered {status(run.path)['filtered']:.1%} of the steps out of the replay" in words.getvalue()


def test_the_limiter_counts_filtered_steps_too(tmp_path: Path) -> None:
    kept = trained(small({"algo.n_step": 1}, FROZEN), tmp_path)
    filtered = trained(small({**FILTER, "algo.n_step": 1}, FROZEN), tmp_path)
    assert filtered.status["updates"] == kept.status["updates"] == int(5 / 16 * (filtered.status["env_steps"] - 40))


def test_learning_goes_on_after_a_replay_that_was_not_saved_though_most_steps_are_copies(tmp_path: Path) -> None:
    changes = {**FILTER, "algo.n_step": 1, "save.replay": "none", "algo.learn_start_steps": 100, "until.steps": 200}
    run = trained(small(changes, "toys/Constant-v0"), tmp_path)
    before = run.status["updates"]
    # This world has two different steps, and 75 must come in again before learning goes on.
    assert resume(run.path, steps=400).status["updates"] > before


# What is learned from


def stored(changes: Settings, steps: int = 120) -> tuple[Any, list[Array]]:
    """A line after so many rows, and the raw rewards that came in."""
    plan = small(changes)
    world = make_train_world(plan)
    components, raw = make_components(plan, world), []
    components.actor.start()
    for _ in range(steps):
        components.actor.send()
        rollout, _ = components.actor.receive()
        raw.append(rollout.reward.copy())
        components.batch_source.insert(rollout)
    world.close()
    return components, raw


def test_clipped_rewards_get_the_bonus_and_are_not_clipped_again() -> None:
    components, _ = stored({**BONUS, "env.clip_reward": True, "algo.n_step": 1, "algo.bonus.scale": 3.0})
    batch = components.batch_source.replay.sample(500)
    assert isinstance(batch, Batch)
    assert batch.reward.max() > 1.5
    assert not components.batch_source.replay.n_step.clip


def test_a_recurrent_network_learns_from_raw_rewards() -> None:
    components, _ = stored(MEMORY)
    batch = components.batch_source.replay.sample(200)
    assert isinstance(batch, Sequences)
    assert set(batch.gain[~batch.last].ravel().tolist()) == {1.0}
    assert batch.reward.max() > 1.0


# A function of one's own


def often_left(values: Array, step: int, generator: np.random.Generator, mask: Array | None) -> Array:
    """Half of the time the first action, else the best one."""
    return np.where(generator.random(len(values)) < 0.5, 0, values.argmax(1))


def test_an_own_function_explores_and_is_needed_again(tmp_path: Path) -> None:
    whole = trained(small(OTHER), tmp_path / "whole", explore=often_left)
    assert '[algo.explore]\ntype = "own"' in (whole.path / "run.toml").read_text()
    assert {row["epsilon"] for row in progress(whole)} == {None}
    half = trained(until(small(OTHER), 150), tmp_path / "half", explore=often_left)
    with pytest.raises(UsageError, match=r"explore tests\.training\.test_explore:often_left"):
        resume(half.path)
    assert status(half.path)["state"] == "done"
    assert same(resumed(half, steps=300, explore=often_left).path, whole.path)
    assert load(whole.path).policy.act(np.zeros((1, 4), np.float32))[0].shape == (1,)  # greedy: no function needed


def test_an_own_function_is_shown_what_is_allowed(tmp_path: Path) -> None:
    def first_allowed(values: Array, step: int, generator: np.random.Generator, mask: Array | None) -> Array:
        assert mask is not None
        assert mask.shape == values.shape
        return np.asarray(mask.argmax(1))

    assert trained(small(OTHER, "toys/Masked-v0"), tmp_path, explore=first_allowed).exit_code == 0


def test_a_function_must_be_given_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        train(small({**OTHER, "algo.explore.type": "own"}), out=tmp_path)
    assert (caught.value.what, caught.value.why, caught.value.fix) == (
        "algo.explore.type is `own`, but no function was given",
        "A function of your own is a Python object; a plan cannot hold it.",
        "Pass it from Python, train(plan, explore=...) or resume(path, explore=...), or choose another type.",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_began_without_a_function_goes_on_without(tmp_path: Path) -> None:
    run = trained(until(small(), 60), tmp_path)
    with pytest.raises(UsageError, match=r"an explore function was given, but algo\.explore\.type is linear"):
        resume(run.path, steps=300, explore=often_left)


def test_a_wrong_action_of_an_explore_function_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        train(small(OTHER), out=tmp_path, explore=lambda values, *_: values.argmax(1) + 2)
    assert caught.value.what.startswith("the explore function chose action ")
    assert caught.value.fix == "Return numbers from 0 to 1."
    [run] = tmp_path.iterdir()
    assert (status(run)["state"], status(run)["exit_code"]) == ("failed", 2)
