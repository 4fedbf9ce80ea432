"""Tables with a row per transition: RLlib's columns, or anybody's with a mapping. The table is read into memory.

The observation after the last step of an episode is that of `next_obs`. Without such a column it is not known: an
episode that terminated then ends with its last observation once more, which no learner reads; any other loses its last
step, whose observation becomes the final one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.data import Array, Spec
from qfleet.datasets.convert.actions import joint_numbers
from qfleet.datasets.convert.array_columns import column_array, text_codes
from qfleet.datasets.convert.column_roles import RLLIB, column_names
from qfleet.datasets.convert.file_notes import NOTES, read_notes
from qfleet.datasets.convert.foreign import clear_errors, require_decoded_size, source_files
from qfleet.datasets.convert.foreign_tables import read_table, table_names
from qfleet.datasets.format import Column, Description, RecordedEpisode, Setting, require_arrow, spec_columns
from qfleet.datasets.format.columns import WHOLE

ENDINGS = (".parquet", ".csv", ".arrow")
NUMBERS = ("step", "obs", "next_obs", "action", "reward", "probability")  # the roles that CSV reads as numbers


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What the command line says about a table."""

    columns: dict[str, str]
    env_id: str = ""
    actions: tuple[int, ...] = ()  # how many there are in each dimension; as many as the data show if it is empty
    rllib: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """The columns of all rows."""

    obs: dict[str, Array]
    next_obs: dict[str, Array] | None
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    probability: Array | None
    mask: Array | None
    next_mask: Array | None


class TransitionsImporter:
    """A table of transitions: one file, or all files of a folder."""

    def __init__(self, source: str, options: TableOptions) -> None:
        self.source = source
        self.options = options
        self.num_dropped = 0
        self.num_shortened = 0
        folder, files = source_files(source, ENDINGS)
        self.names = column_names(options.columns, table_names(folder, files[0]), options.rllib)
        with clear_errors(source):
            self.table = _read_all(folder, files, self.names)
            self.file_notes = read_notes([(self.table.schema.metadata or {}).get(NOTES)])
            self.groups = self._groups()
            self.action_space = self._action_space()
            self.columns = self.file_notes.observations if self.file_notes else self._columns()
            self.values = self._values()
        self.table = None

    def _groups(self) -> list[tuple[str, Array]]:
        """The id and the rows of every episode, in the order in which they begin."""
        if "episode" in self.names:
            numbers, ids = text_codes(self.table, self.names["episode"])
        else:  # rows follow each other, and an end begins the next episode
            ends = self._flags("terminated") | self._flags("truncated")
            numbers = np.cumsum(ends) - ends.astype(np.int64)
            ids = [f"{number:08d}" for number in range(int(numbers[-1]) + 1 if len(numbers) else 0)]
        steps = column_array(self.table, self.names["step"]) if "step" in self.names else np.arange(len(numbers))
        order = np.lexsort((steps.reshape(len(numbers)), numbers))
        rows = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
        return list(zip(ids, rows, strict=True)) if len(numbers) else []

    def _flags(self, role: str) -> Array:
        name = self.names.get(role)
        if name is None:
            return np.zeros(len(self.table), np.bool_)
        found = column_array(self.table, name)
        if found.ndim > 1 or not np.isin(found, (0, 1)).all():
            raise ValueError(f"column {name!r} holds something else than true and false")
        return found.astype(np.bool_)

    def _action_space(self) -> spaces.Space[Any]:
        actions = self._actions()
        if self.file_notes is not None:
            counts = self.file_notes.spec.actions
        else:
            counts = self.options.actions or tuple((actions.max(axis=0) + 1).tolist())
        if len(counts) != actions.shape[1] or min(counts) < 1 or (actions < 0).any():
            raise ValueError(f"its actions have {actions.shape[1]} dimensions, and are numbers from 0")
        return spaces.Discrete(counts[0]) if len(counts) == 1 else spaces.MultiDiscrete(list(counts))

    def _actions(self) -> Array:
        """[R, dimensions]"""
        found = column_array(self.table, self.names["action"])
        with np.errstate(invalid="ignore"):
            whole = found.astype(np.int64)
        if not len(found) or (whole != found).any():
            raise ValueError("its actions are not whole numbers")
        return whole.reshape(len(found), -1)

    def _columns(self) -> tuple[Column, ...]:
        found = self._observation("obs", self.names["obs"])
        kind = "uint8" if found.dtype == np.uint8 else "float32"
        return (Column(WHOLE, kind, found.shape[1:]),)  # type: ignore[arg-type]

    def _observation(self, role: str, name: str) -> Array:
        """One column, or several that are the numbers of one observation."""
        parts = [column_array(self.table, part) for part in name.split(",")]
        if len(parts) > 1 or parts[0].ndim == 1:
            return np.stack([part.reshape(len(part)) for part in parts], axis=1)
        return parts[0]

    def _observations(self, role: str) -> dict[str, Array] | None:
        name = self.names.get(role)
        if name is None:
            return None
        if self.file_notes is None:
            return {WHOLE: _typed(self._observation(role, name), self.columns[0])}
        paths = {each.name: f"{name}{each.name[len(WHOLE) :]}" for each in self.columns}
        return {each.name: _typed(column_array(self.table, paths[each.name]), each) for each in self.columns}

    def _values(self) -> _Values:
        obs = self._observations("obs")
        return _Values(
            obs={} if obs is None else obs,
            next_obs=self._observations("next_obs"),
            action=joint_numbers(self._actions(), self.action_space),
            reward=column_array(self.table, self.names["reward"]).astype(np.float64),
            terminated=self._flags("terminated"),
            truncated=self._flags("truncated"),
            probability=self._optional("probability"),
            mask=self._optional("mask"),
            next_mask=self._optional("next_mask"),
        )

    def _optional(self, role: str) -> Array | None:
        return column_array(self.table, self.names[role]) if role in self.names else None

    def description(self) -> Description:
        """What its data are."""
        if self.file_notes is not None:
            return self.file_notes.description()
        counts = self.options.actions or tuple(np.ravel(_counts(self.action_space)).tolist())
        column = self.columns[0]
        spec = Spec(column.shape, column.dtype, counts, masked=self._masked())
        return Description(self.options.env_id, spec, spec_columns(spec))

    def _masked(self) -> bool:
        return self.values.mask is not None and self.values.next_mask is not None

    def settings(self) -> dict[str, Setting]:
        """Where it came from."""
        made: dict[str, Setting] = {"made_by": "import", "format": "rllib" if self.options.rllib else "transitions"}
        return made | {"source": Path(self.source).name}

    def notes(self) -> list[str]:
        """What somebody who imports it should know."""
        notes = []
        if not self.options.actions and self.file_notes is None:
            notes.append(
                f"the numbers of actions were counted in the data: {_counts(self.action_space)}; see --actions"
            )
        if self.num_shortened or self.num_dropped:
            lost = f"{self.num_shortened:,} episodes lost their last step, and {self.num_dropped:,} were left out"
            notes.append(f"{lost}: the observation after it is not in the table")
        return notes

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Its episodes."""
        for id, rows in self.groups:
            with clear_errors(f"{self.source}, episode {id!r}"):
                episode = self._episode(id, rows)
            if episode is not None:
                yield episode

    def _episode(self, id: str, rows: Array) -> RecordedEpisode | None:
        values = self.values
        if (values.terminated | values.truncated)[rows[:-1]].any():
            raise ValueError("it goes on after its end")
        ended = bool(values.terminated[rows[-1]])
        steps = rows
        if values.next_obs is None and not ended:
            steps = rows[:-1]
            self.num_shortened += len(rows) > 1
            self.num_dropped += len(rows) == 1
            if len(rows) == 1:
                return None
        known = self.file_notes.episodes.get(id) if self.file_notes else None
        return RecordedEpisode(
            id=id,
            observations={name: self._chain(name, rows, steps) for name in values.obs},
            action=values.action[steps],
            reward=values.reward[steps],
            terminated=ended,
            truncated=bool(values.truncated[rows[-1]]),
            probability=_known(values.probability, steps),
            mask=self._mask(rows),
            seed=known.seed if known else None,
            env_id=known.env_id if known else "",
            behaviour=known.behaviour if known else "",
        )

    def _chain(self, name: str, rows: Array, steps: Array) -> Array:
        """T + 1 observations; ValueError if the one after a step is not the one before the next."""
        obs = self.values.obs[name]
        if len(steps) < len(rows):
            return np.asarray(obs[rows])
        if self.values.next_obs is None:
            return np.asarray(obs[np.append(rows, rows[-1])])
        after = self.values.next_obs[name]
        same = obs[rows[1:]].tobytes() == after[rows[:-1]].tobytes()
        if not same:
            raise ValueError("the observation after a step is not the one before the next: its rows are not in order")
        return np.concatenate([obs[rows], after[rows[-1:]]])

    def _mask(self, rows: Array) -> Array | None:
        if not self._masked() or self.values.mask is None or self.values.next_mask is None:
            return None
        return np.concatenate([self.values.mask[rows], self.values.next_mask[rows[-1:]]]).astype(np.bool_)


def _read_all(folder: Path, files: list[str], names: dict[str, str]) -> Any:
    """The columns that have a role, of all files."""
    parts = {role: name.split(",") for role, name in names.items()}
    heads = sorted({part.split("/")[0] for each in parts.values() for part in each})
    texts = parts.get("episode", [])
    numbers = [name for role in NUMBERS for name in parts.get(role, []) if name not in texts]
    tables = []
    num_bytes = 0
    for name in files:
        tables.append(read_table(folder, name, heads, texts, numbers))
        num_bytes += tables[-1].nbytes
        require_decoded_size(num_bytes)
    notes = read_notes([(table.schema.metadata or {}).get(NOTES) for table in tables])
    joined = require_arrow().concat_tables([table.replace_schema_metadata(None) for table in tables])
    return joined.replace_schema_metadata(None if notes is None else {NOTES: notes.text()})


def _counts(space: spaces.Space[Any]) -> list[int]:
    return list(map(int, np.ravel(getattr(space, "n", getattr(space, "nvec", 0)))))


def _known(values: Array | None, rows: Array) -> Array | None:
    if values is None or np.isnan(values[rows]).any():
        return None
    return np.asarray(values[rows], np.float64)


def _typed(array: Array, column: Column) -> Array:
    if array.shape[1:] != column.shape:
        raise ValueError(f"observations have the shape {array.shape[1:]}, and not {column.shape}")
    return np.ascontiguousarray(array, np.dtype(column.dtype))


def looks_like_rllib(source: str) -> bool:
    """Does the first file of a source have RLlib's columns?"""
    folder, files = source_files(source, ENDINGS)
    return {RLLIB["episode"], RLLIB["next_obs"]} <= set(table_names(folder, files[0]))
