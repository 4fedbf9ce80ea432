import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.prepare import PreparePlan, SplitRule, parse_capacities, prepare_dataset, require_group
from qfleet.datasets.prepare.choice import ChoiceRule, balance, choose
from qfleet.errors import UsageError
from tests.support.recorded import make_dataset


def test_a_shard_at_half_speed_gets_half_of_the_data(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [3 + at % 17 for at in range(300)], file_bytes=20_000)
    prepare_dataset(dataset, str(tmp_path / "b"), PreparePlan(capacities=(1.0, 1.0, 1.0, 0.5)))
    prepared = open_dataset(str(tmp_path / "b"))
    assert not validate_dataset(prepared)
    assert prepared.manifest.num_episodes == 300
    files = prepared.files("train")
    steps = [sum(file.steps for file in files if file.name.startswith(f"data/s{at:03d}-")) for at in range(4)]
    assert sum(steps) == sum(file.steps for file in files)
    assert steps[0] == pytest.approx(steps[1], rel=0.02)
    assert steps[3] == pytest.approx(steps[0] / 2, rel=0.1)


def test_the_longest_episodes_are_placed_first(tmp_path: Path) -> None:
    rows = make_dataset(tmp_path / "a", [2, 3, 4, 9]).index
    found = balance(rows, (1.0, 1.0), "salt")
    assert found["e3"] == 0
    assert [found[id] for id in ("e2", "e1", "e0")] == [1, 1, 1]


def test_the_first_of_equal_episodes_is_kept(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "a", [4] * 6).index
    twice = [*index, *(replace(row, id=f"again-{row.id}") for row in index[:2])]
    found = choose(twice, ChoiceRule(unique=True))
    assert set(found.splits) == {row.id for row in index}
    assert found.num_dropped == 2
    assert choose(twice, ChoiceRule()).num_dropped == 0


def test_a_group_is_in_one_split(tmp_path: Path) -> None:
    index = [replace(row, seed=at % 7) for at, row in enumerate(make_dataset(tmp_path / "a", [4] * 70).index)]
    found = choose(index, ChoiceRule(SplitRule(40, 30, 30), "seed"))
    for seed in range(7):
        assert len({found.splits[row.id] for row in index if row.seed == seed}) == 1
    assert len(set(found.splits.values())) > 1


def test_capacities_and_groups_are_checked() -> None:
    assert parse_capacities(2, None) == (1.0, 1.0)
    assert parse_capacities(None, "1,0.5") == (1.0, 0.5)
    assert parse_capacities(None, None) == ()
    for shards, text in ((3, "1,1"), (None, "1,0"), (None, "1,a"), (None, "-1")):
        with pytest.raises(UsageError, match="is not valid"):
            parse_capacities(shards, text)
    with pytest.raises(UsageError, match="--group user"):
        require_group("user")


def test_shards_end_together_though_one_node_has_half_of_the_speed(tmp_path: Path) -> None:
    """Four readers, the last at half the pace: each waits for as long as its steps take it."""
    dataset = make_dataset(tmp_path / "a", [3 + at % 17 for at in range(600)], file_bytes=20_000)
    speeds = (1.0, 1.0, 1.0, 0.5)
    prepare_dataset(dataset, str(tmp_path / "b"), PreparePlan(capacities=speeds, file_bytes=10_000))
    prepared = open_dataset(str(tmp_path / "b"))

    def read(shard: int) -> float:
        begun = time.monotonic()
        due = begun
        for file in prepared.files("train"):
            if file.name.startswith(f"data/s{shard:03d}-"):
                for rows in prepared.rows(file):
                    due += int((~rows.last).sum()) / (1_000 * speeds[shard])
                    time.sleep(max(0.0, due - time.monotonic()))
        return time.monotonic() - begun

    with ThreadPoolExecutor(4) as pool:
        seconds = list(pool.map(read, range(4)))
    assert min(seconds) > 0.9 * max(seconds)
