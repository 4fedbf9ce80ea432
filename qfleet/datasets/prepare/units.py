"""Which files are written, and from which: units of work, planned from the index and the manifest alone.

A unit reads some input files that follow each other and writes output files of its own. In a large data set it reads as
many as fill a file of every split; in a smaller one fewer, so that there are units to do side by side, but as many as
fill a training file. The plan says which episodes and row groups every output file has. So the index of the result
is known before anything is read, and does not depend on who does the units, or on how often.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from qfleet.datasets.format import GROUP_BYTES, DataFile, IndexRow, Split
from qfleet.datasets.prepare.choice import Choice

SIDE_BY_SIDE = 16  # units of a data set that is too small for more
MOST_FILES = 32  # of training data that one unit fills: what is lost if its worker is
Part: TypeAlias = tuple[Split, int | None]  # a split, and the shard of training data if there are shards


@dataclass(frozen=True, slots=True)
class FileRules:
    """How files are named, and how large they may be; bytes are those before compression."""

    key: str  # in the names of all files: files of a prepare with other settings, which was killed, are others
    row_bytes: int
    file_bytes: int
    group_bytes: int = GROUP_BYTES

    def of(self, row: IndexRow) -> int:
        """The bytes of an episode."""
        return (row.length + 1) * self.row_bytes


@dataclass(slots=True)
class OutputFile:
    """One file of a unit: its name, its split, its episodes, and how many of them each row group has."""

    name: str
    split: Split
    episodes: list[IndexRow] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)


@dataclass(slots=True)
class InputFile:
    """One file that a unit reads: its episodes, and for each the number of its output file; -1: it is left out."""

    file: DataFile
    episodes: list[IndexRow]
    outputs: list[int]


@dataclass(slots=True)
class Unit:
    """Input files and the output files that are made of them."""

    inputs: list[InputFile]
    outputs: list[OutputFile]

    def index_rows(self, env_id: str) -> list[IndexRow]:
        """The index of its output files; episodes without a world are of this environment."""
        return [row for file in self.outputs for row in _placed(file, env_id)]


def _placed(file: OutputFile, env_id: str) -> list[IndexRow]:
    found = []
    begin = 0
    episodes = iter(file.episodes)
    for group, num in enumerate(file.groups):
        for _ in range(num):
            row = next(episodes)
            place = (file.name, group, begin, row.length)
            ends = (row.undiscounted_return, row.terminated, row.truncated)
            origin = (row.seed, row.world or env_id, row.behaviour)
            found.append(IndexRow(row.id, *place, *ends, *origin, file.split, row.hash))
            begin += row.length + 1
    return found


def plan_units(files: Sequence[DataFile], index: Sequence[IndexRow], choice: Choice, rules: FileRules) -> list[Unit]:
    """The units of a data set, in the order of its files."""
    by_file: dict[str, list[IndexRow]] = {file.name: [] for file in files}
    for row in index:
        by_file[row.file].append(row)
    part_of = {id: (split, choice.shards.get(id)) for id, split in choice.splits.items()}
    num_bytes = _bytes_by_part(index, part_of, rules)
    wanted = unit_bytes(list(num_bytes.values()), rules.file_bytes)
    units = []
    for number, group in enumerate(_grouped(files, by_file, part_of, rules, wanted)):
        units.append(_plan_unit(number, group, by_file, part_of, rules))
    return units


def _bytes_by_part(index: Sequence[IndexRow], part_of: dict[str, Part], rules: FileRules) -> dict[Part, int]:
    found: dict[Part, int] = {}
    for row in index:
        if (part := part_of.get(row.id)) is not None:
            found[part] = found.get(part, 0) + rules.of(row)
    return found


def unit_bytes(num_bytes: Sequence[int], file_bytes: int) -> int:
    """How many bytes a unit should read, from the bytes in each part of the data set."""
    total = sum(num_bytes)
    if not total:
        return file_bytes
    fills_largest = file_bytes * total // max(num_bytes)
    fills_every = file_bytes * total // min(num_bytes)
    return min(max(fills_largest, total // SIDE_BY_SIDE), fills_every, MOST_FILES * file_bytes)


def _grouped(
    files: Sequence[DataFile],
    by_file: dict[str, list[IndexRow]],
    part_of: dict[str, Part],
    rules: FileRules,
    wanted: int,
) -> list[list[DataFile]]:
    """Files that follow each other, in groups of about equal size; those of which nothing is kept are left out."""
    kept = [(file, sum(rules.of(row) for row in by_file[file.name] if row.id in part_of)) for file in files]
    kept = [(file, size) for file, size in kept if size]
    total = sum(size for _, size in kept)
    num = max(1, round(total / wanted))
    groups: dict[int, list[DataFile]] = {}
    before = 0
    for file, size in kept:
        groups.setdefault((2 * before + size) * num // (2 * total), []).append(file)
        before += size
    return list(groups.values())


def _plan_unit(
    number: int,
    files: list[DataFile],
    by_file: dict[str, list[IndexRow]],
    part_of: dict[str, Part],
    rules: FileRules,
) -> Unit:
    rows_of: dict[Part, list[IndexRow]] = {}
    for file in files:
        for row in by_file[file.name]:
            if (part := part_of.get(row.id)) is not None:
                rows_of.setdefault(part, []).append(row)
    outputs: list[OutputFile] = []
    output_of: dict[str, int] = {}
    for split, shard in sorted(rows_of, key=lambda part: (part[1] is not None, part[1] or 0, part[0])):
        prefix = "data/" if shard is None else f"data/s{shard:03d}-"
        for at, episodes in enumerate(_cut(rows_of[split, shard], rules)):
            output_of.update((row.id, len(outputs)) for row in episodes)
            groups = _group_counts(episodes, rules)
            name = f"{prefix}{rules.key}-{number:05d}-{split}-{at:05d}.parquet"
            outputs.append(OutputFile(name, split, episodes, groups))
    inputs = []
    for file in files:
        rows = by_file[file.name]
        inputs.append(InputFile(file, rows, [output_of.get(row.id, -1) for row in rows]))
    return Unit(inputs, outputs)


def _cut(rows: list[IndexRow], rules: FileRules) -> list[list[IndexRow]]:
    """Episodes of as few files as hold them, of about equal size; none is too large unless one episode is."""
    sizes = [rules.of(row) for row in rows]
    room = max(rules.file_bytes - max(sizes), rules.file_bytes // 2)
    total = sum(sizes)
    num = -(-total // room)
    found: list[list[IndexRow]] = []
    before = 0
    size = 0
    number = -1
    for row, added in zip(rows, sizes, strict=True):
        place = (2 * before + added) * num // (2 * total)
        if place > number or size + added > rules.file_bytes:
            found.append([])
            number = place
            size = 0
        found[-1].append(row)
        size += added
        before += added
    return found


def _group_counts(rows: list[IndexRow], rules: FileRules) -> list[int]:
    """How many episodes each row group has."""
    found = []
    num = 0
    size = 0
    for row in rows:
        num += 1
        size += rules.of(row)
        if size >= rules.group_bytes:
            found.append(num)
            num = 0
            size = 0
    return [*found, num] if num else found
