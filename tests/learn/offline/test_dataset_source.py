from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from qfleet.data import Spec
from qfleet.errors import UsageError
from qfleet.learn.offline.dataset_source import DatasetSource, make_dataset_source
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.replay import make_replay
from tests.support.recorded import SPEC, make_dataset


def plan_for(folder: Path, **settings: object) -> Plan:
    given = {"replay.type": "dataset", "replay.path": str(folder), "replay.split": "all"}
    given |= {"algo.n_step": 1, "algo.discount": 0.5, "algo.batch_size": 8, **settings}
    return make_plan("Logs-v0", overrides=given)


def source_for(plan: Plan, spec: Spec = SPEC) -> DatasetSource:
    return make_dataset_source(plan, make_replay(plan, spec, 1, np.random.default_rng(0)))


def test_an_epoch_has_every_step_once(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [5, 1, 9, 3, 7], file_bytes=400)
    source = source_for(plan_for(tmp_path / "a", **{"algo.batch_size": 5}))
    seen = Counter(int(place) for _ in range(5) for place in source.next_batch(0).obs[:, 0])
    lengths = enumerate([5, 1, 9, 3, 7])
    assert seen == Counter(number * 100 + t for number, length in lengths for t in range(length))
    assert source.take_metrics()["epoch"] == 1.0


def test_rewards_of_n_steps_stop_at_the_end_of_the_episode(tmp_path: Path) -> None:
    """Episode 0 is terminated, episode 1 truncated; both have three steps with rewards number * 100 + t + 1."""
    make_dataset(tmp_path / "a", [3, 3])
    batch = source_for(plan_for(tmp_path / "a", **{"algo.n_step": 2, "algo.batch_size": 6})).next_batch(0)
    columns = (batch.obs[:, 0], batch.reward, batch.discount, batch.next_obs[:, 0])
    found = {int(obs): row for obs, *row in zip(*columns, strict=True)}
    assert found[0][:2] == [1 + 0.5 * 2, 0.25]
    assert found[0][2] == 2
    assert found[1][:2] == [2 + 0.5 * 3, 0.0]
    assert found[2][:2] == [3, 0.0]
    assert found[100] == [101 + 0.5 * 102, 0.25, 102]
    assert found[101] == [102 + 0.5 * 103, 0.25, 103]
    assert found[102] == [103, 0.5, 103]


def test_frames_are_stacked_within_an_episode(tmp_path: Path) -> None:
    spec = Spec((1,), "uint8", (2,), stack=3)
    make_dataset(tmp_path / "a", [4], spec=spec)
    batch = source_for(plan_for(tmp_path / "a", **{"algo.batch_size": 4}), spec).next_batch(0)
    stacks = {tuple(obs.ravel()) for obs in batch.obs}
    assert stacks == {(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3)}


def test_a_loaded_state_goes_on_with_the_next_transition(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [9] * 9, file_bytes=700)
    plan = plan_for(tmp_path / "a")
    unbroken = source_for(plan)
    broken = source_for(plan)
    for _ in range(7):
        unbroken.next_batch(0)
        broken.next_batch(0)
    resumed = source_for(plan)
    resumed.load_state_dict(broken.state_dict())
    for _ in range(20):
        one = unbroken.next_batch(0)
        other = resumed.next_batch(0)
        np.testing.assert_array_equal(one.obs, other.obs)
        np.testing.assert_array_equal(one.reward, other.reward)
        np.testing.assert_array_equal(one.ids, other.ids)


def test_memory_is_bounded_by_the_cache(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [900] * 60, file_bytes=100_000)
    source = source_for(
        plan_for(tmp_path / "a", **{"replay.cache_bytes": 1 << 20, "algo.batch_size": 256, "replay.open_shards": 2})
    )
    for _ in range(2 * len(source.order) // 256):
        source.next_batch(0)
        assert source.shards.num_bytes() <= 1 << 20
    assert source.shards.num_loads > len(source.shards.files)


def test_a_cache_for_less_than_one_file_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [9_000] * 6, file_bytes=10 << 20)
    with pytest.raises(UsageError, match="is too small"):
        source_for(plan_for(tmp_path / "a", **{"replay.cache_bytes": 1 << 20}))


def test_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [4])
    with pytest.raises(UsageError, match="has no split `train`"):
        source_for(plan_for(tmp_path / "a", **{"replay.split": "train"}))
