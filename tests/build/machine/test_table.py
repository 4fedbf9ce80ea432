"""The table of this machine: kept by the kind of machine, and never believed when it is damaged or another's."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qfleet.build.machine.table import MachineKind, MachineTable, read_table, table_file, this_machine, write_table
from qfleet.system import processor
from tests.build.machine.parts import KIND, PICTURE_TIMES, table_of

OTHERS = [
    msgspec.structs.replace(KIND, processor="another"),
    msgspec.structs.replace(KIND, instructions=()),
    msgspec.structs.replace(KIND, cores=4),
    msgspec.structs.replace(KIND, torch="2.14.0"),
    msgspec.structs.replace(KIND, format=0),
]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    table = table_of(pictures=PICTURE_TIMES)
    assert write_table(table, tmp_path / "new")
    assert read_table(KIND, tmp_path / "new") == table


@pytest.mark.parametrize("other", OTHERS)
def test_the_table_of_another_machine_or_torch_does_not_count(other: MachineKind, tmp_path: Path) -> None:
    table = table_of(pictures=PICTURE_TIMES)
    write_table(table, tmp_path)
    assert read_table(other, tmp_path) == MachineTable(other)
    write_table(table_of(other), tmp_path)
    assert read_table(KIND, tmp_path) == table  # both are kept: machines may share a home
    table_file(KIND, tmp_path).rename(table_file(other, tmp_path))
    assert read_table(other, tmp_path) == MachineTable(other)  # not even under the other's name


def change(place: str, value: Any) -> str:
    """The text of a table with one value changed."""
    found = json.loads(msgspec.json.encode(table_of(pictures=PICTURE_TIMES)))
    *path, last = place.split("/")
    at = found
    for name in path:
        at = at[name]
    at[last] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "null",
        change("more", 1),
        change("kind", {}),
        change("kind/more", 1),
        change("examples", []),
        change("examples/pictures/seconds/float32 tasks", "1"),
        change("examples/pictures/seconds/float32 tasks", 0.0),
        change("examples/pictures/seconds/float32 tasks", -1.0),
        change("examples/pictures/seconds/float32 tasks", 1e300),
        change("examples/pictures/seconds/float32 tasks", float("nan")),
        change("examples/pictures/seconds", None),
        "\x00" * 200_000,
    ],
)
def test_a_damaged_table_does_not_count(text: str, tmp_path: Path) -> None:
    table_file(KIND, tmp_path).write_text(text)
    assert read_table(KIND, tmp_path) == MachineTable(KIND)
    assert write_table(table_of(pictures=PICTURE_TIMES), tmp_path)  # and is replaced
    assert read_table(KIND, tmp_path).examples


def test_a_table_behind_a_link_or_in_no_file_does_not_count(tmp_path: Path) -> None:
    write_table(table_of(pictures=PICTURE_TIMES), tmp_path)
    file = table_file(KIND, tmp_path)
    file.rename(tmp_path / "real")
    file.symlink_to(tmp_path / "real")
    assert read_table(KIND, tmp_path) == MachineTable(KIND)
    file.unlink()
    file.mkdir()
    assert read_table(KIND, tmp_path) == MachineTable(KIND)


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not write_table(table_of(), tmp_path / "file")
    assert read_table(KIND, tmp_path / "file") == MachineTable(KIND)


def test_rows_are_added_to_an_example() -> None:
    table = table_of(grids={"float32 1 thread": 1.0, "float32 tasks": 2.0})
    table = table.with_example("grids", {"float32 tasks": 3.0, "compiled": 0.5}, "later")
    assert table.seconds("grids") == {"float32 1 thread": 1.0, "float32 tasks": 3.0, "compiled": 0.5}
    assert table.examples["grids"].at == "later"
    assert table.seconds("pictures") == table.seconds(None) == {}


@pytest.mark.parametrize(
    ("text", "name", "instructions"),
    [
        ("model name : A B\nflags\t: sse avx2 fpu avx512_bf16\n\nmodel name : C\nflags : amx_tile", "A B", "avx2"),
        ("processor : 0\nFeatures : fp asimd bf16\n", None, "asimd"),
        ("", None, None),
    ],
)
def test_the_processor_is_known_by_its_name_and_instructions(
    text: str, name: str | None, instructions: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert name is None or processor.processor(file) == name
    assert processor.processor(file)
    assert (instructions in processor.instructions(file)) if instructions else processor.instructions(file) == ()
    assert "amx_tile" not in processor.instructions(file)
    assert processor.instructions(tmp_path / "none") == ()


def test_this_machine_is_a_kind() -> None:
    kind = this_machine()
    assert kind.processor
    assert kind.cores >= 1
    assert kind.torch.startswith("2.")
    assert kind == this_machine()
