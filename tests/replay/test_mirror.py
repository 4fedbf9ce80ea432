"""Observations mirrored on the learner's device: the same batches as cut from the store, whatever happened to it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qfleet import train
from qfleet.data import Batch, Rollout, Spec
from qfleet.plan import make_plan
from qfleet.replay import Mirror, NStepReturn, Replay, StepCut, Uniform
from qfleet.watch import read_rows as read_rows_of
from tests.replay.streams import random_stream, read_rows, restore_rows, rollout
from tests.support.runs import SMALL

PICTURE = Spec((3, 5), "uint8", (4,), stack=3)
VECTOR = Spec((4,), "float32", (2,))
LANES = 3


def make(spec: Spec, seed: int = 1) -> Replay:
    how: Any = {"cut": StepCut(3), "n_step": NStepReturn(3, 0.9)}
    return Replay(spec, LANES, 60, Uniform(), np.random.default_rng(seed), **how)


def random_rollout(spec: Spec, rows: int, lanes: int, rng: np.random.Generator, end: float = 0.15) -> Rollout:
    return rollout(random_stream(rng, spec, lanes, rows, end))


def sample_by_mirror(replay: Replay, mirror: Mirror, seed: int) -> Batch:
    """A batch as a learner with a mirror sees it."""
    replay.reseed(np.random.default_rng(seed))
    replay.mirrored = True
    batch = replay.sample(16)
    replay.mirrored = False
    assert isinstance(batch, Batch)
    mirror.copy_new_rows()
    batch.obs, batch.next_obs = (
        mirror.gather_stacks(torch.from_numpy(each)).numpy() for each in (batch.obs, batch.next_obs)
    )
    return batch


def require_same(replay: Replay, mirror: Mirror) -> None:
    for seed in range(5):
        found = sample_by_mirror(replay, mirror, seed)
        replay.reseed(np.random.default_rng(seed))
        wanted = replay.sample(16)
        assert isinstance(wanted, Batch)
        for name in ("obs", "action", "reward", "discount", "next_obs", "weight", "ids"):
            one, other = getattr(found, name), getattr(wanted, name)
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("spec", [PICTURE, VECTOR], ids=["pictures", "vectors"])
def test_mirrored_batches_equal_those_of_the_store(spec: Spec) -> None:
    replay, rng = make(spec), np.random.default_rng(0)
    mirror = Mirror(replay.store, torch.device("cpu"))
    for rows in (5, 1, 17, 40, 90, 2):  # the ring of some 20 rows turns more than once between two copies
        replay.add(random_rollout(spec, rows, LANES, rng))
        require_same(replay, mirror)


def test_the_mirror_follows_groups_of_lanes_and_restored_rows() -> None:
    replay, rng = make(PICTURE), np.random.default_rng(3)
    mirror = Mirror(replay.store, torch.device("cpu"))
    replay.add(random_rollout(PICTURE, 9, 2, rng), lanes=slice(0, 2))
    replay.add(random_rollout(PICTURE, 4, 1, rng), lanes=slice(2, 3))
    require_same(replay, mirror)
    state, rows = replay.state_dict(), read_rows(replay)
    replay.clear()
    replay.add(random_rollout(PICTURE, 12, LANES, rng))
    require_same(replay, mirror)
    replay.load_state_dict(state)
    restore_rows(replay, rows)
    require_same(replay, mirror)


def test_stacks_begin_with_blank_frames_at_an_episodes_start() -> None:
    replay, rng = make(PICTURE), np.random.default_rng(5)
    mirror = Mirror(replay.store, torch.device("cpu"))
    replay.add(random_rollout(PICTURE, 6, LANES, rng, end=0.0))
    found = sample_by_mirror(replay, mirror, 0)
    first = found.ids < LANES  # the first row of every lane
    assert first.any()
    assert not found.obs[first][:, :2].any()
    assert found.obs[first][:, 2].any()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "ALE/Pong-v5"])
def test_a_run_with_a_mirror_learns_the_same(env_id: str, tmp_path: Path) -> None:
    small = {**SMALL, "until.steps": 200, **({"env.frame_size": 42} if "Pong" in env_id else {})}
    losses = []
    for on_device in (False, True):
        plan = make_plan(env_id, overrides={**small, "replay.on_device": on_device})
        run = train(plan, out=tmp_path)
        rows = read_rows_of(run.path / "metrics.jsonl")
        losses.append([row["loss"] for row in rows if row.get("loss") is not None])
    assert len(losses[0]) > 3
    assert losses[0] == losses[1]
