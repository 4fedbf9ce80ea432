from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from qfleet.datasets.format import IndexRow
from qfleet.datasets.prepare import SplitRule, StrataRule, parse_strata, read_keys
from qfleet.datasets.prepare.choice import ChoiceRule, choose
from qfleet.errors import StorageError, UsageError


def index(num: int) -> list[IndexRow]:
    """Episodes of three worlds and four policies; the better policy has the larger returns."""
    return [
        IndexRow(
            id=f"e{number}",
            file="data/all-00000.parquet",
            row_group=0,
            row=11 * number,
            length=10,
            undiscounted_return=float(number % 4 * 100 + number % 10),
            terminated=True,
            truncated=False,
            seed=number % 50,
            world=f"w{number % 3}",
            behaviour=f"b{number % 4}",
            split="all",
            hash=f"{number:064x}",
        )
        for number in range(num)
    ]


@pytest.mark.parametrize("text", ["return:4", "world", "behaviour", "key"])
def test_each_split_has_its_share_of_every_stratum(text: str) -> None:
    rows = index(1_200)
    keys = {row.id: str(number % 5) for number, row in enumerate(rows)}
    found = choose(rows, ChoiceRule(SplitRule(60, 30, 10), strata=parse_strata(text), keys=keys))
    name = {"return:4": lambda row: row.behaviour, "key": lambda row: keys[row.id]}
    stratum = name.get(text, lambda row: getattr(row, text))
    sizes = Counter(stratum(row) for row in rows)
    counts = Counter((stratum(row), found.splits[row.id]) for row in rows)
    for each, size in sizes.items():
        for split, share in (("train", 0.6), ("validation", 0.3), ("test", 0.1)):
            assert abs(counts[each, split] - share * size) <= 1


def test_shares_of_many_small_strata_come_out_right_together() -> None:
    rows = index(900)
    keys = {row.id: str(number // 3) for number, row in enumerate(rows)}  # 300 strata of 3
    found = choose(rows, ChoiceRule(SplitRule(80, 10, 10), strata=StrataRule("key"), keys=keys))
    counts = Counter(found.splits.values())
    assert counts["train"] == pytest.approx(720, abs=30)
    assert counts["test"] == pytest.approx(90, abs=30)


def test_few_episodes_move_when_data_grow() -> None:
    rows = index(4_400)
    rule = ChoiceRule(strata=parse_strata("return:4"))
    before = choose(rows[:4_000], rule).splits
    after = choose(rows, rule).splits
    moved = sum(after[id] != split for id, split in before.items())
    assert moved < 0.03 * len(before)
    assert choose(list(reversed(rows)), rule).splits == after


def test_strata_and_groups_go_together_only_where_no_group_is_divided() -> None:
    rows = index(600)
    whole = [replace(row, world=f"w{(row.seed or 0) % 3}") for row in rows]
    found = choose(whole, ChoiceRule(SplitRule(50, 30, 20), "seed", strata=StrataRule("world")))
    for seed in range(50):
        assert len({found.splits[row.id] for row in whole if row.seed == seed}) == 1
    assert {found.splits[row.id] for row in whole if row.world == "w0"} == {"train", "validation", "test"}
    with pytest.raises(UsageError, match="has episodes of two strata"):
        choose(rows, ChoiceRule(group="seed", strata=parse_strata("return:4")))


def test_a_user_s_own_key_groups_episodes(tmp_path: Path) -> None:
    file = tmp_path / "sites.csv"
    rows = index(100)
    file.write_text("id,key\n" + "".join(f"{row.id},{number % 7}\n" for number, row in enumerate(rows)) + "other,x\n")
    keys, sha256 = read_keys(str(file))
    assert len(sha256) == 64
    found = choose(rows, ChoiceRule(SplitRule(40, 30, 30), "key", keys=keys))
    for site in range(7):
        assert len({found.splits[row.id] for row in rows if keys[row.id] == str(site)}) == 1
    with pytest.raises(UsageError, match="no key of 2 episodes, the first is 'e100'"):
        choose(index(102), ChoiceRule(group="key", keys=keys))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "its first line is"),
        ("key,id\na,b\n", "its first line is"),
        ("id,key\na\n", "line 2 has 1 values"),
        ("id,key\na,b\na,c\n", "another key than a line before"),
        ('id,key\n"a,b\n', "unexpected end of data"),
        (f"id,key\na,{'x' * 5_000}\n", "more than 4,096 bytes"),
        ("id,key\na,\udcff\n", "codec can't decode"),
    ],
)
def test_files_of_keys_are_checked(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys.csv"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=problem):
        read_keys(str(file))


def test_a_missing_file_of_keys_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"keys\.csv cannot be read"):
        read_keys(str(tmp_path / "keys.csv"))


@pytest.mark.parametrize("text", ["return", "return:1", "return:101", "return:x", "length", "world:2"])
def test_a_wrong_stratum_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not valid"):
        parse_strata(text)
