"""Episodes as Arrow tables and back: T + 1 rows, in the last of which there is an observation but no step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from qfleet.data import Array
from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.bounded import text_list
from qfleet.datasets.format.columns import Column
from qfleet.datasets.format.episode import RecordedEpisode

STEP_COLUMNS = ("episode", "t", "action", "reward", "terminated", "truncated", "probability")
MASK = "mask"
MAX_REWARD = float(np.finfo(np.float32).max)  # learning is in float32
Ranges: TypeAlias = dict[str, tuple[Array, Array]]  # the lowest and highest whole numbers of columns, by their names


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a data file: those of every step, the observations, and the mask if there is one."""

    observations: tuple[Column, ...]
    num_actions: int
    masked: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one decoded row; its id counts as eight."""
        return 48 + sum(each.num_bytes for each in self.observations) + self.num_actions * self.masked

    def schema(self) -> Any:
        """The Arrow schema."""
        pa = require_arrow()
        types = (pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.bool_(), pa.bool_(), pa.float64())
        empty = {"action", "reward", "terminated", "truncated", "probability"}
        fields = [pa.field(name, kind, name in empty) for name, kind in zip(STEP_COLUMNS, types, strict=True)]
        fields += [pa.field(each.name, pa.binary(each.num_bytes), nullable=False) for each in self.observations]
        if self.masked:
            fields.append(pa.field(MASK, pa.binary(self.num_actions), nullable=False))
        return pa.schema(fields)


def episode_table(episode: RecordedEpisode, layout: Layout) -> Any:
    """The rows of an episode."""
    pa = require_arrow()
    num = episode.num_steps
    none = np.arange(num + 1) == num  # the last row is no step
    last = np.arange(num + 1) == num - 1
    unknown = np.ones(num + 1, np.bool_) if episode.probability is None else none
    columns = [
        pa.array([episode.id] * (num + 1), pa.string()),
        pa.array(np.arange(num + 1, dtype=np.int32)),
        pa.array(_padded(episode.action, np.int64), mask=none),
        pa.array(_padded(episode.reward, np.float64), mask=none),
        pa.array(last & episode.terminated, mask=none),
        pa.array(last & episode.truncated, mask=none),
        pa.array(
            _padded(np.zeros(num) if episode.probability is None else episode.probability, np.float64), mask=unknown
        ),
    ]
    columns += [_binary(episode.observations[each.name], each.dtype, each.num_bytes) for each in layout.observations]
    if layout.masked:
        mask = np.ones((num + 1, layout.num_actions), np.bool_) if episode.mask is None else episode.mask
        columns.append(_binary(mask, "bool", layout.num_actions))
    return pa.Table.from_arrays(columns, schema=layout.schema())


def _padded(values: Array, dtype: Any) -> Array:
    return np.append(values.astype(dtype), np.zeros(1, dtype))


def _binary(array: Array, dtype: str, num_bytes: int) -> Any:
    pa = require_arrow()
    data = np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<"))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(num_bytes), len(data), [None, pa.py_buffer(data.tobytes())])


@dataclass(frozen=True, slots=True)
class RowProblem:
    """What is wrong in a row; rows are counted from the first one of their row group."""

    episode: str
    row: int
    text: str

    def __str__(self) -> str:
        """In a sentence."""
        return f"episode {self.episode!r}, row {self.row} of its row group: {self.text}"


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of whole episodes as arrays. `last` marks rows without a step."""

    episode: list[str]  # the id of each row's episode
    t: Array  # [R]
    action: Array  # [R] int64, 0 in last rows
    reward: Array  # [R] float64, 0 in last rows
    terminated: Array  # [R] bool
    truncated: Array  # [R] bool
    probability: Array  # [R] float64, NaN where unknown
    last: Array  # [R] bool
    observations: dict[str, Array]
    mask: Array | None
    odd_values: dict[str, Array] = field(default_factory=dict)  # rows whose stored values are not possible, by why

    def starts(self) -> list[int]:
        """The first row of every episode, and the number of rows."""
        return [*np.flatnonzero(self.t == 0).tolist(), len(self.t)]

    def problems(self) -> list[RowProblem]:
        """Why these rows are not whole episodes, one after the other; nothing if they are."""
        if self._are_whole_episodes():
            return []
        starts = self.starts()
        if not len(self.t) or starts[0] != 0:
            name = self.episode[0] if self.episode else ""
            return [RowProblem(name, 0, "its rows do not begin with the first row of an episode")]
        found = [self._first(rows, text) for text, rows in self.odd_values.items()]
        for begin, end in pairwise(starts):
            found += [RowProblem(self.episode[begin], row, text) for row, text in self._problems_of(begin, end)]
        return found

    def _are_whole_episodes(self) -> bool:
        """The same question for all rows at once, as it is asked of every row that is read."""
        starts = np.flatnonzero(self.t == 0)
        ends = np.append(starts[1:], len(self.t))
        lengths = ends - starts
        if not len(self.t) or len(starts) == 0 or starts[0] != 0 or lengths.min() < 2:
            return False
        in_order = bool((self.t == np.arange(len(self.t)) - np.repeat(starts, lengths)).all())
        last = np.flatnonzero(self.last)
        if not in_order or len(last) != len(ends) or (last != ends - 1).any():
            return False
        if not np.isin(np.flatnonzero(self.terminated | self.truncated), ends - 2).all():
            return False
        unknown = np.isnan(self.probability)
        if self.odd_values or not (unknown == np.repeat(unknown[starts], lengths))[~self.last].all():
            return False
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return all(self.episode[begin:end].count(self.episode[begin]) == end - begin for begin, end in spans)

    def _first(self, rows: Array, text: str) -> RowProblem:
        at = int(np.argmax(rows))
        return RowProblem(self.episode[at], at, text)

    def _problems_of(self, begin: int, end: int) -> Iterator[tuple[int, str]]:
        rows = slice(begin, end)
        if len(set(self.episode[rows])) > 1 or (self.t[rows] != np.arange(end - begin)).any():
            yield begin, "its rows are not in order"
        if end - begin < 2 or self.last[begin : end - 1].any() or not self.last[end - 1]:
            yield end - 1, "it does not end with an observation alone"
        if (self.terminated | self.truncated)[begin : end - 2].any():
            yield begin, "it goes on after its end"
        if len(np.unique(np.isnan(self.probability[begin : end - 1]))) > 1:
            yield begin, "the probability of some of its actions is known, and of others not"

    def value_problems(self, num_actions: int, ranges: Ranges) -> list[RowProblem]:
        """Which values no recording could have, the first row of each kind; nothing if all are possible."""
        chosen = np.where(self.last, 0, self.action)
        checks: dict[str, Array] = {
            f"an action is not one of {num_actions}": (chosen < 0) | (chosen >= num_actions),
            "a reward is not a finite number of float32": ~(np.abs(self.reward) <= MAX_REWARD),
            "a probability is not above 0 and at most 1": (self.probability <= 0) | (self.probability > 1),
        }
        for name, array in self.observations.items():
            flat = array.reshape(len(array), -1)
            if array.dtype.kind == "f" and not np.isfinite(flat).all():
                checks[f"{name} holds a number that is not finite"] = np.asarray((~np.isfinite(flat)).any(axis=1))
            if name in ranges:
                low, high = ranges[name]
                outside = (flat < low.reshape(-1)) | (flat > high.reshape(-1))
                checks[f"{name} holds a number outside of its space"] = np.asarray(outside.any(axis=1))
        return [self._first(rows, text) for text, rows in checks.items() if rows.any()]

    def episodes(self, env_id: str = "") -> list[RecordedEpisode]:
        """The episodes of these rows."""
        starts = self.starts()
        return [self._one(begin, end, env_id) for begin, end in pairwise(starts)]

    def _one(self, begin: int, end: int, env_id: str) -> RecordedEpisode:
        steps = slice(begin, end - 1)
        probability = self.probability[steps]
        return RecordedEpisode(
            self.episode[begin],
            {name: array[begin:end] for name, array in self.observations.items()},
            self.action[steps],
            self.reward[steps],
            bool(self.terminated[end - 2]),
            bool(self.truncated[end - 2]),
            None if np.isnan(probability).any() else probability,
            None if self.mask is None else self.mask[begin:end],
            env_id=env_id,
        )


def read_rows(table: Any, layout: Layout) -> StepRows:
    """The rows of a table that has this layout."""
    columns = {name: _one_chunk(table.column(name)) for name in table.schema.names if name != "episode"}
    last = _empty(columns["action"])
    filled: dict[str, Any] = {name: _numbers(columns[name], fill) for name, fill in _FILLS.items()}
    return StepRows(
        episode=text_list(table.column("episode")),
        t=columns["t"].to_numpy(),
        last=last,
        observations={each.name: _arrays(columns[each.name], each.dtype, each.shape) for each in layout.observations},
        mask=_arrays(columns[MASK], "bool", (layout.num_actions,)) if layout.masked else None,
        odd_values={text: rows for text, rows in _odd_values(columns, last, layout) if rows.any()},
        **filled,
    )


def _odd_values(columns: dict[str, Any], last: Array, layout: Layout) -> Iterator[tuple[str, Array]]:
    """What a writer of the format leaves empty and does not, and bytes of a bool beside 0 and 1."""
    for name in ("reward", "terminated", "truncated"):
        yield f"{name} is there without an action, or empty beside one", _empty(columns[name]) != last
    unknown = _empty(columns["probability"])
    yield "there is a probability, and no action", last & ~unknown
    yield "a probability is not a number", np.isnan(_numbers(columns["probability"], 0.0))
    flags = {each.name for each in layout.observations if each.dtype == "bool"} | {MASK}
    for name in sorted(flags & columns.keys()):
        yield f"a byte of {name} is neither 0 nor 1", np.asarray((_stored_bytes(columns[name]) > 1).any(axis=1))


def _empty(column: Any) -> Array:
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False))


_FILLS = {"action": 0, "reward": 0.0, "terminated": False, "truncated": False, "probability": math.nan}


def _one_chunk(column: Any) -> Any:
    pa = require_arrow()
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


def _numbers(column: Any, fill: float) -> Array:
    return np.asarray(column.fill_null(fill).to_numpy(zero_copy_only=False))


def _arrays(column: Any, dtype: str, shape: tuple[int, ...]) -> Array:
    data = _stored_bytes(column)
    if dtype == "bool":
        flags: Array = data.reshape(len(column), *shape) != 0
        return flags
    found: Array = data.reshape(-1).view(np.dtype(dtype).newbyteorder("<"))
    return found.astype(dtype, copy=False).reshape(len(column), *shape)


def _stored_bytes(column: Any) -> Array:  # [R, bytes of a row]
    width = column.type.byte_width
    data = memoryview(column.buffers()[1])[column.offset * width : (column.offset + len(column)) * width]
    return np.frombuffer(data, np.uint8).reshape(len(column), width)
