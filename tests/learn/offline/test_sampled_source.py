"""Draws from a whole data set: those of a replay with the same rows, sampler and generator."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.data import Batch
from qfleet.errors import UsageError
from qfleet.learn.offline.sampled_source import SampledSource, make_sampled_source
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.replay import Prioritized, Replay, make_cut, make_n_step, make_replay
from tests.support.recorded import SPEC, make_dataset, make_episode

LENGTHS = [5, 1, 9, 3]


def plan_for(folder: Path, **settings: Any) -> Plan:
    given = {"replay.type": "dataset", "replay.path": str(folder), "replay.split": "all", "algo.batch_size": 6}
    return make_plan("Logs-v0", overrides={**given, "replay.order.type": "prioritized", **settings})


def source_for(plan: Plan) -> SampledSource:
    return make_sampled_source(plan, make_replay(plan, SPEC, 1, np.random.default_rng(7)))


def errors_of(batch: Batch) -> np.ndarray:
    return 1.0 + batch.obs[:, 0]


def test_draws_and_priorities_are_those_of_a_replay(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", LENGTHS, file_bytes=150)
    plan = plan_for(tmp_path / "a", **{"algo.n_step": 2})
    source = source_for(plan)
    rows = sum(LENGTHS) + len(LENGTHS)
    sampler = Prioritized(rows)
    online = Replay(SPEC, 1, rows, sampler, np.random.default_rng(7), cut=make_cut(plan.algo), n_step=make_n_step(plan))
    for rollout in rollouts():
        online.add(rollout)
    for _ in range(20):
        found, expected = source.next_batch(0), online.sample(6)
        assert isinstance(found, Batch)
        assert isinstance(expected, Batch)
        for name in ("obs", "action", "reward", "discount", "next_obs", "weight", "ids"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        source.after_update(found, errors_of(found))
        online.update(expected.ids, errors_of(expected))
    assert source.steps == 20 * 6
    assert source.take_metrics() == {"epoch": 120 / sum(LENGTHS)}
    # Large errors are drawn more often: those of the last episode, whose observations are largest.
    drawn = np.concatenate([np.asarray(source.next_batch(0).obs[:, 0]) for _ in range(50)])  # type: ignore[union-attr]
    assert (drawn >= 300).mean() > 3 / sum(LENGTHS)


def rollouts() -> list[Any]:
    """The episodes as an actor sends them."""
    from qfleet.data import Rollout

    found = []
    for number, length in enumerate(LENGTHS):
        episode = make_episode(number, length, terminated=number % 2 == 0)
        last = np.arange(length + 1) == length
        discount = np.where(np.arange(length + 1) == length - 1, 0.0 if episode.terminated else 1.0, 1.0)
        padded = [np.append(values, 0)[:, None] for values in (episode.action, episode.reward)]
        columns = (episode.observations["obs"][:, None], *padded, discount[:, None], last[:, None])
        found.append(Rollout(*columns, (0, 0, 0), 0))
    return found


def test_a_loaded_state_draws_the_same_batches(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", LENGTHS)
    plan = plan_for(tmp_path / "a")
    source, resumed = source_for(plan), source_for(plan)
    for _ in range(5):
        batch = source.next_batch(0)
        assert isinstance(batch, Batch)
        source.after_update(batch, errors_of(batch))
    resumed.load_state_dict(source.state_dict())
    for _ in range(5):
        one, other = source.next_batch(0), resumed.next_batch(0)
        assert isinstance(one, Batch)
        assert isinstance(other, Batch)
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.weight, other.weight)
        source.after_update(one, errors_of(one))
        resumed.after_update(other, errors_of(other))


def test_another_generator_draws_other_batches(tmp_path: Path) -> None:
    """A run that goes back to a checkpoint reseeds the replay."""
    make_dataset(tmp_path / "a", LENGTHS)
    source, other = (source_for(plan_for(tmp_path / "a")) for _ in range(2))
    other.replay.reseed(np.random.default_rng(8))
    one, two = source.next_batch(0), other.next_batch(0)
    assert one is not None
    assert two is not None
    assert one.ids.tolist() != two.ids.tolist()


def test_a_part_without_a_priority_keeps_its_own(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", LENGTHS)
    source = source_for(plan_for(tmp_path / "a"))
    before = source.recorded.sampler.state_dict()["leaves"].copy()
    source.set_priorities(np.array([0, 1]), np.array([np.nan, 5.0]))
    after = source.recorded.sampler.state_dict()["leaves"]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_data_set_without_a_whole_window_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [3])
    more = {"net.memory.type": "gru", "algo.view.type": "sequences", "algo.view.burn_in": 9, "algo.view.length": 9}
    with pytest.raises(UsageError, match="too short to learn from"):
        source_for(plan_for(tmp_path / "a", **more))
