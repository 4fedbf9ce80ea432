"""Batches of recorded steps and a run's own: how many of each, their ids, weights and priorities."""

import numpy as np
import pytest

from qfleet.data import Batch, Rollout
from qfleet.learn.batch_split import strided_part
from qfleet.learn.offline.mixed_batches import RecordedShare
from qfleet.replay import NStepReturn, Prioritized, Replay, StepCut, Uniform
from tests.support.recorded import SPEC


def filled(value: float, steps: int, *, prioritized: bool = False, seed: int = 0) -> Replay:
    """A replay of steps whose observations are `value`."""
    sampler = Prioritized(steps) if prioritized else Uniform()
    rng = np.random.default_rng(seed)
    replay = Replay(SPEC, 1, steps, sampler, rng, cut=StepCut(1), n_step=NStepReturn(1, 0.9))
    obs = np.full((steps + 1, 1, *SPEC.obs), value, np.float32)
    zeros = np.zeros((steps + 1, 1), np.float32)
    last = np.arange(steps + 1)[:, None] == steps
    replay.add(Rollout(obs, zeros.astype(np.int64), zeros, zeros + 1, last, (0, 0, 0), 0))
    return replay


@pytest.mark.parametrize(("share", "size", "recorded"), [(0.5, 8, 4), (0.25, 8, 2), (0.01, 8, 1), (0.99, 8, 7)])
def test_a_batch_has_its_share_of_recorded_steps(share: float, size: int, recorded: int) -> None:
    batch = RecordedShare(filled(1.0, 20), share).sample(filled(2.0, 20), size)
    assert isinstance(batch, Batch)
    assert batch.obs[:, 0].tolist() == [1.0] * recorded + [2.0] * (size - recorded)
    assert (batch.ids < 0).tolist() == [True] * recorded + [False] * (size - recorded)


def test_members_of_a_population_have_equal_parts() -> None:
    batch = RecordedShare(filled(1.0, 20), 0.25).sample(filled(2.0, 20), 8, num_batches=3)
    assert batch is not None
    for member in range(3):
        part = strided_part(batch, member, 3)
        assert sorted(part.obs[:, 0].tolist()) == [1.0] * 2 + [2.0] * 6


def test_nothing_is_learned_before_the_run_has_steps_of_its_own() -> None:
    empty = Replay(SPEC, 1, 9, Uniform(), np.random.default_rng(0), cut=StepCut(1), n_step=NStepReturn(1, 0.9))
    assert RecordedShare(filled(1.0, 20), 0.5).sample(empty, 8) is None


def test_weights_of_both_parts_are_on_one_scale() -> None:
    """Those of (items x P)^-beta, divided by the largest of the whole batch."""
    theirs, own = filled(1.0, 20, prioritized=True), filled(2.0, 5, prioritized=True, seed=1)
    for replay in (theirs, own):
        num = len(replay)
        replay.update(np.arange(num), np.linspace(0.1, 3.0, num) ** 2)
    batch = RecordedShare(theirs, 0.5).sample(own, 32)
    assert batch is not None
    expected = []
    for replay, ids in ((theirs, -1 - batch.ids[:16]), (own, batch.ids[16:])):
        assert isinstance(replay.sampler, Prioritized)
        chance = replay.sampler.leaves[ids] / replay.sampler.tree[-1]
        expected.append((len(replay) * chance) ** -0.4)
    raw = np.concatenate(expected)
    np.testing.assert_allclose(batch.weight, raw / raw.max(), rtol=1e-5)


def test_priorities_reach_the_replay_that_an_item_is_from() -> None:
    theirs, own = (filled(1.0, 5, prioritized=True) for _ in range(2))
    RecordedShare(theirs, 0.5).update(np.array([-1, -5]), np.array([7.0, 8.0]))
    for replay, changed in ((theirs, {0, 4}), (own, set())):
        assert isinstance(replay.sampler, Prioritized)
        assert {at for at in range(5) if replay.sampler.leaves[at] != 1.0} == changed
