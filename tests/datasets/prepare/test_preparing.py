from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.prepare import LocalEngine, PreparePlan, SplitRule, parse_split, prepare_dataset
from qfleet.datasets.prepare.engines import Work
from qfleet.errors import UsageError
from tests.support.recorded import make_dataset


class BackwardsEngine:
    """Works on the last input first."""

    def map(self, work: Work, orders: Sequence[bytes]) -> Iterator[bytes]:
        answers = [work(each) for each in reversed(orders)]
        return iter(reversed(answers))


class KilledEngine:
    """Stops after the first input."""

    def map(self, work: Work, orders: Sequence[bytes]) -> Iterator[bytes]:
        yield work(orders[0])
        raise KeyboardInterrupt


def test_episodes_are_split_and_none_is_lost(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [4] * 100, file_bytes=2_000)
    version = prepare_dataset(dataset, str(tmp_path / "b"), PreparePlan())
    prepared = open_dataset(str(tmp_path / "b"))
    assert prepared.version == version
    assert prepared.manifest.source == dataset.version
    assert not validate_dataset(prepared)
    rule = SplitRule()
    assert {row.id: row.split for row in prepared.index} == {row.id: rule.split_of(row.id) for row in dataset.index}
    assert {row.id: row.hash for row in prepared.index} == {row.id: row.hash for row in dataset.index}
    assert {file.split for file in prepared.files()} == {"train", "validation", "test"}
    assert prepared.statistics["train"].lengths.count[0] == sum(row.split == "train" for row in prepared.index)


def test_the_split_of_an_episode_stays_when_others_are_added() -> None:
    shares = [SplitRule(80, 10, 10).split_of(f"e{number}") for number in range(4_000)]
    assert 0.78 < shares.count("train") / 4_000 < 0.82
    assert [SplitRule(80, 10, 10).split_of(f"e{number}") for number in range(10)] == shares[:10]
    assert [SplitRule(80, 10, 10, "salt").split_of(f"e{number}") for number in range(100)] != shares[:100]


def test_the_version_does_not_depend_on_the_engine(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [4] * 50, file_bytes=1_000)
    versions = [
        prepare_dataset(dataset, str(tmp_path / f"b{number}"), PreparePlan(), engine)
        for number, engine in enumerate((LocalEngine(), BackwardsEngine()))
    ]
    assert versions[0] == versions[1]


def test_a_prepare_that_was_killed_ends_with_the_same_version(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [4] * 50, file_bytes=1_000)
    whole = prepare_dataset(dataset, str(tmp_path / "b"), PreparePlan())
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(dataset, str(tmp_path / "c"), PreparePlan(), KilledEngine())
    assert not (tmp_path / "c/manifest.json").exists()
    assert prepare_dataset(dataset, str(tmp_path / "c"), PreparePlan()) == whole


@pytest.mark.parametrize("text", ["80/20", "80/10/20", "0/50/50", "a/b/c"])
def test_a_wrong_split_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no split"):
        parse_split(text)


def test_a_data_set_without_training_episodes_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [4])
    split = SplitRule().split_of("e0")
    rule = SplitRule(1, 99, 0) if split == "train" else SplitRule()
    with pytest.raises(UsageError, match=r"no episode of .* falls into the training split"):
        prepare_dataset(dataset, str(tmp_path / "b"), PreparePlan(rule))
