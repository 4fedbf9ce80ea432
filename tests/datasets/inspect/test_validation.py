"""Every rule of docs/datasets.md, broken one at a time in a data set whose hashes are right."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from qfleet.cli import main
from qfleet.data import Spec
from qfleet.data.space_format import EnvSpaces
from qfleet.datasets.format import Description, RecordedEpisode, open_dataset, space_columns, write_dataset
from qfleet.datasets.inspect import Problem, validate_dataset
from qfleet.datasets.storage import open_place
from tests.hostile.cases.data_sets import DATA, INDEX, STATISTICS, manifest, seal, statistics, table_of, with_value

SPACE = spaces.Dict(
    {"choice": spaces.Discrete(3), "flag": spaces.Box(0, 1, (2,), np.bool_), "place": spaces.Box(-9, 9)}
)
NUM = 5  # steps of an episode; each has six rows
Change = Callable[[Path], object]


def recorded(number: int) -> RecordedEpisode:
    rng = np.random.default_rng(number)
    observations = {
        "obs/choice": rng.integers(0, 3, NUM + 1),
        "obs/flag": rng.integers(0, 2, (NUM + 1, 2)) > 0,
        "obs/place": rng.uniform(-9, 9, (NUM + 1, 1)).astype(np.float32),
    }
    probability = np.full(NUM, 0.5)
    mask = np.ones((NUM + 1, 2), np.bool_)
    action = rng.integers(0, 2, NUM)
    return RecordedEpisode(
        f"e{number}", observations, action, rng.normal(size=NUM), True, False, probability, mask, env_id="X-v0"
    )


def made(folder: Path) -> Path:
    """Four episodes in two row groups of one data file."""
    spec = Spec((6,), "float32", (2,), masked=True)
    description = Description("X-v0", spec, space_columns(SPACE), EnvSpaces(SPACE, spaces.Discrete(2), masked=True))
    write_dataset(open_place(folder), description, map(recorded, range(4)), {"made_by": "test"})
    return folder


def in_data(column: str, row: int, value: Any) -> Change:
    return table_of(DATA, with_value(column, row, value))


def in_index(column: str, row: int, value: Any) -> Change:
    return table_of(INDEX, with_value(column, row, value))


def nan_instead(folder: Path) -> None:
    table = pq.read_table(folder / DATA)
    values = table["probability"].to_numpy(zero_copy_only=False).copy()
    values[8] = np.nan
    at = table.schema.get_field_index("probability")
    column = pa.array(values, mask=np.arange(24) % 6 == 5, from_pandas=False)
    pq.write_table(table.set_column(at, table.schema.field(at), column), folder / DATA)
    seal(folder)


def in_moments(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    return statistics(lambda found: change(found["all"][name]))


ORDER = [*range(6), 6, 7, 9, 8, *range(10, 24)]
RULES: dict[str, tuple[Change, Problem]] = {
    "order of rows": (
        table_of(DATA, lambda table: table.take(ORDER)),
        Problem(DATA, "not in order", 0, "e1", 6),
    ),
    "one id per episode": (in_data("episode", 8, "e9"), Problem(DATA, "not in order", 0, "e1", 6)),
    "t from 0": (in_data("t", 6, 1), Problem(DATA, "not in order", 0, "e0", 0)),
    "the last row has no step": (in_data("action", 11, 1), Problem(DATA, "there without an action", 0, "e1", 11)),
    "an action in every step": (in_data("action", 8, None), Problem(DATA, "there without an action", 0, "e1", 8)),
    "a reward in every step": (in_data("reward", 8, None), Problem(DATA, "reward is there without", 0, "e1", 8)),
    "no reward at the end": (in_data("reward", 11, 1.0), Problem(DATA, "reward is there without", 0, "e1", 11)),
    "ends in every step": (in_data("terminated", 8, None), Problem(DATA, "terminated is there", 0, "e1", 8)),
    "no end in the last row": (in_data("truncated", 11, True), Problem(DATA, "truncated is there", 0, "e1", 11)),
    "an end is the last": (in_data("truncated", 8, True), Problem(DATA, "goes on after its end", 0, "e1", 6)),
    "finite rewards": (in_data("reward", 8, float("nan")), Problem(DATA, "not a finite number", 0, "e1", 8)),
    "rewards of float32": (in_data("reward", 8, -1e300), Problem(DATA, "not a finite number", 0, "e1", 8)),
    "actions of the spec": (in_data("action", 8, 2), Problem(DATA, "an action is not one of 2", 0, "e1", 8)),
    "probability above 0": (in_data("probability", 8, 0.0), Problem(DATA, "a probability is not", 0, "e1", 8)),
    "probability is a number": (nan_instead, Problem(DATA, "a probability is not a number", 0, "e1", 8)),
    "probability known or not": (in_data("probability", 8, None), Problem(DATA, "and of others not", 0, "e1", 6)),
    "no probability at the end": (in_data("probability", 11, 0.5), Problem(DATA, "and no action", 0, "e1", 11)),
    "finite observations": (
        in_data("obs/place", 8, np.array(np.inf, "<f4").tobytes()),
        Problem(DATA, "obs/place holds a number that is not finite", 0, "e1", 8),
    ),
    "choices of the space": (
        in_data("obs/choice", 8, np.array(3, "<i8").tobytes()),
        Problem(DATA, "obs/choice holds a number outside of its space", 0, "e1", 8),
    ),
    "a bool is 0 or 1": (in_data("obs/flag", 8, b"\x01\x02"), Problem(DATA, "neither 0 nor 1", 0, "e1", 8)),
    "a mask is 0 or 1": (in_data("mask", 8, b"\x01\x02"), Problem(DATA, "neither 0 nor 1", 0, "e1", 8)),
    "actions are allowed": (in_data("mask", 8, b"\x00\x00"), Problem(DATA, "not allowed by its mask", 0, "e1", 6)),
    "hash of an episode": (
        in_data("reward", 8, recorded(1).reward[2] * (1 + 1e-12)),
        Problem(DATA, "hash", 0, "e1", 6),
    ),
    "return in the index": (in_index("undiscounted_return", 1, 9.0), Problem(DATA, "return 9", 0, "e1", 6)),
    "ends in the index": (in_index("truncated", 1, True), Problem(DATA, "ended in another way", 0, "e1", 6)),
    "row in the index": (in_index("row", 1, 7), Problem(DATA, "from row 7 of row group 0", 0, "e1", 6)),
    "row group in the index": (
        in_index("row_group", 3, 1),
        Problem(DATA, "does not list its episode 'e3'", 0, "e3", 18),
    ),
    "the same id": (in_index("id", 1, "e9"), Problem(DATA, "does not list its episode 'e1'", 0, "e1", 6)),
    "ids are unique": (in_index("id", 1, "e0"), Problem(INDEX, "two episodes have the id 'e0'")),
    "split of the file": (in_index("split", 1, "test"), Problem(INDEX, "is of split 'test'")),
    "file of the manifest": (in_index("file", 1, "data/x.parquet"), Problem(INDEX, "is not in the manifest")),
    "finite returns": (in_index("undiscounted_return", 1, float("inf")), Problem(INDEX, "not a finite number")),
    "a hash is a hash": (in_index("hash", 1, "abc"), Problem(INDEX, "is not a SHA-256")),
    "lengths": (in_index("length", 1, 0), Problem(INDEX, "has 0 steps from row 6 of row group 0")),
    "counts of actions": (
        statistics(lambda found: found["all"].update(actions=[1, 19])),
        Problem(STATISTICS, "split all: the counts of actions are not those of the data"),
    ),
    "smallest value": (
        in_moments("reward", lambda found: found.update(min=[-50.0])),
        Problem(STATISTICS, "split all, reward: min is not that of the data"),
    ),
    "mean": (
        in_moments("returns", lambda found: found.update(mean=[found["mean"][0] + 0.1])),
        Problem(STATISTICS, "split all, returns: mean is not"),
    ),
    "deviation": (
        in_moments("lengths", lambda found: found.update(m2=[3.0])),
        Problem(STATISTICS, "split all, lengths: m2 is not"),
    ),
    "sketch": (
        in_moments("lengths", lambda found: found.update(sketch=[{"buckets": [1], "counts": [4]}])),
        Problem(STATISTICS, "split all, lengths: sketch is not"),
    ),
    "counts": (
        in_moments("reward", lambda found: found.update(count=[7])),
        Problem(STATISTICS, "rewards: it counts 7 values, and the manifest has 20"),
    ),
    "sketch in order": (
        in_moments("lengths", lambda found: found.update(sketch=[{"buckets": [2, 1], "counts": [2, 2]}])),
        Problem(STATISTICS, "rising order"),
    ),
    "sketch counts all": (
        in_moments("lengths", lambda found: found.update(sketch=[{"buckets": [2], "counts": [9]}])),
        Problem(STATISTICS, "a sketch counts 9 values, and there are 4"),
    ),
    "buckets end": (
        in_moments("lengths", lambda found: found.update(sketch=[{"buckets": [10241], "counts": [4]}])),
        Problem(STATISTICS, "<= 10240"),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_found_in_its_place(tmp_path: Path, rule: str) -> None:
    change, expected = RULES[rule]
    change(made(tmp_path / "a"))
    problems = validate_dataset(open_dataset(str(tmp_path / "a")))
    assert expected.text in problems[0].text
    assert replace(problems[0], text=expected.text) == expected


def test_a_whole_data_set_has_no_problem(tmp_path: Path) -> None:
    assert validate_dataset(open_dataset(str(made(tmp_path / "a")))) == []


def test_statistics_without_sketches_are_whole(tmp_path: Path) -> None:
    def without(found: dict[str, Any]) -> None:
        whole = found["all"]
        for moments in (whole["reward"], whole["returns"], whole["lengths"], *whole["observations"].values()):
            moments.pop("sketch")

    statistics(without)(made(tmp_path / "a"))
    assert validate_dataset(open_dataset(str(tmp_path / "a"))) == []


def test_every_problem_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "a")
    for column, row, value in (("reward", 2, float("nan")), ("action", 8, 5), ("t", 14, 7)):
        in_data(column, row, value)(folder)
    with pq.ParquetWriter(folder / DATA, (table := pq.read_table(folder / DATA)).schema) as writer:
        for begin in (0, 6, 12, 18):
            writer.write_table(table.slice(begin, 6))
    index = pq.read_table(folder / INDEX)
    at = index.schema.get_field_index("row_group")
    pq.write_table(index.set_column(at, index.schema.field(at), pa.array(range(4), pa.int32())), folder / INDEX)
    seal(folder)
    assert main(["data", "validate", str(folder), "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["episodes"], found["files"]) == (False, 4, 1)
    places = [(each["file"], each["row_group"], each["episode"], each["row"]) for each in found["problems"]]
    assert places == [(DATA, 0, "e0", 2), (DATA, 1, "e1", 8), (DATA, 2, "e2", 12)]


def test_a_broken_manifest_is_said_in_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "a")
    manifest(folder, lambda found: found.update(source="before"))
    assert main(["data", "validate", str(folder), "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["version"], found["problems"][0]["file"]) == (False, None, "manifest.json")
    assert "source" in found["problems"][0]["problem"]
