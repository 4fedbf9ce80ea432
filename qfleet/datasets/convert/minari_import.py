"""Data sets of Minari, in each of its three storages. Neither its package nor an environment is needed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from qfleet.data import Array, Spec
from qfleet.datasets.convert.actions import action_counts, joint_numbers
from qfleet.datasets.convert.foreign import MAX_JSON_BYTES, clear_errors, foreign_problem, read_foreign
from qfleet.datasets.convert.minari_hdf5 import Hdf5Episode, MinariHdf5
from qfleet.datasets.convert.minari_spaces import read_minari_spaces
from qfleet.datasets.convert.minari_tables import MinariTables, TableEpisode
from qfleet.datasets.format import Column, Description, RecordedEpisode, Setting, space_columns
from qfleet.envs.spaces import adapt_obs
from qfleet.files import is_file
from qfleet.plan.local_paths import local_path

MASK_INFO = "action_mask"
PROBABILITY_INFO = "behaviour_probability"
METADATA = "metadata.json"


class _Metadata(msgspec.Struct):
    """What is read of `metadata.json`; other fields are ignored."""

    total_episodes: Annotated[int, Meta(ge=0, le=10_000_000)]
    observation_space: str = ""
    action_space: str = ""
    data_format: str = "hdf5"
    dataset_id: Annotated[str, Meta(max_length=500)] = ""
    env_spec: str = ""
    minari_version: Annotated[str, Meta(max_length=100)] = ""


class _EnvSpec(msgspec.Struct):
    id: Annotated[str, Meta(max_length=500)]


class MinariEpisodeNotes(msgspec.Struct):
    """What is read of an episode's own metadata; names that begin with `qfleet_` are written by `data export`."""

    seed: int | None = None
    qfleet_id: Annotated[str, Meta(max_length=500)] = ""
    qfleet_behaviour: Annotated[str, Meta(max_length=500)] = ""
    qfleet_env_id: Annotated[str, Meta(max_length=500)] = ""


class MinariImporter:
    """A data set of Minari: the folder of the data set, or its folder `data`."""

    def __init__(self, source: str) -> None:
        path = local_path(source)
        self.folder = path / "data" if is_file(path, f"data/{METADATA}") else path
        self.picture_formats: set[str] = set()
        with clear_errors(self.folder / METADATA):
            self.metadata = msgspec.json.decode(read_foreign(self.folder, METADATA, MAX_JSON_BYTES), type=_Metadata)
            if not self.metadata.observation_space or not self.metadata.action_space:
                raise ValueError("it does not have its spaces, and qfleet makes no environment to find them")
            self.spaces = read_minari_spaces(self.metadata.observation_space, self.metadata.action_space)
            self.columns = space_columns(self.spaces.observation)
            self.env_id = self._env_id()
        self.masked = self.metadata.total_episodes > 0 and self._read(0).info(MASK_INFO) is not None
        self.spaces = replace(self.spaces, masked=self.masked)

    def _env_id(self) -> str:
        if not self.metadata.env_spec:
            return self.metadata.dataset_id or self.folder.parent.name
        return msgspec.json.decode(self.metadata.env_spec, type=_EnvSpec).id

    def _storage(self) -> MinariHdf5 | MinariTables:
        match self.metadata.data_format:
            case "hdf5":
                return MinariHdf5(self.folder, self.picture_formats.add)
            case "arrow" | "parquet" as ending:
                return MinariTables(self.folder, ending, self.picture_formats.add)
        raise foreign_problem(
            self.folder / METADATA, f"its data_format {self.metadata.data_format[:50]!r} is not known"
        )

    def _read(self, number: int) -> Hdf5Episode | TableEpisode:
        return self._storage().episode(number)

    def description(self) -> Description:
        """What its data are."""
        adapter = adapt_obs(self.spaces.observation, self.env_id)
        spec = Spec(adapter.shape, adapter.dtype, action_counts(self.spaces.action), masked=self.masked)
        return Description(self.env_id, spec, self.columns, self.spaces)

    def settings(self) -> dict[str, Setting]:
        """Where it came from."""
        made: dict[str, Setting] = {"made_by": "import", "format": f"minari {self.metadata.data_format}"}
        return made | {"dataset_id": self.metadata.dataset_id, "minari_version": self.metadata.minari_version}

    def notes(self) -> list[str]:
        """What somebody who imports it should know."""
        if "JPEG" not in self.picture_formats:
            return []
        return ["its pictures were stored as JPEG, so pixels are not those that the environment showed"]

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Its episodes."""
        for number in range(self.metadata.total_episodes):
            with clear_errors(f"{self.folder}, episode {number}"):
                episode = self._episode(number)
            yield episode

    def _episode(self, number: int) -> RecordedEpisode:
        notes = msgspec.json.decode(self._storage().metadata(number), type=MinariEpisodeNotes)
        found = self._read(number)
        terminated = _end(found.numbers("terminations"))
        mask = found.info(MASK_INFO)
        return RecordedEpisode(
            id=notes.qfleet_id or f"{number:08d}",
            observations=_exact(found.observations(self.spaces.observation), self.columns),
            action=joint_numbers(found.actions(self.spaces.action), self.spaces.action),
            reward=found.numbers("rewards").astype(np.float64),
            terminated=terminated,
            truncated=_end(found.numbers("truncations")),
            probability=_steps(found.info(PROBABILITY_INFO)),
            mask=None if mask is None else mask.astype(np.bool_),
            seed=notes.seed,
            env_id=notes.qfleet_env_id,
            behaviour=notes.qfleet_behaviour,
        )


def _end(flags: Array) -> bool:
    """Did the episode end so? ValueError if it went on after it."""
    if flags[:-1].any():
        raise ValueError("it goes on after its end")
    return bool(flags[-1])


def _steps(values: Array | None) -> Array | None:
    if values is None or np.isnan(values[:-1]).any():
        return None
    return values[:-1].astype(np.float64)


def _exact(arrays: dict[str, Array], columns: tuple[Column, ...]) -> dict[str, Array]:
    """The arrays in the types of their columns; ValueError if a value would change."""
    found = {}
    for column in columns:
        array = arrays[column.name]
        typed = array.astype(column.dtype)
        if not np.array_equal(typed, array, equal_nan=typed.dtype.kind == "f"):
            raise ValueError(f"values of {column.name} are {array.dtype}, and do not fit into {column.dtype}")
        found[column.name] = np.ascontiguousarray(typed)
    return found


def minari_folder(path: Path) -> bool:
    """Is there a data set of Minari?"""
    return is_file(path, f"data/{METADATA}") or is_file(path, METADATA)
