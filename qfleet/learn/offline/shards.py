"""Data files of a data set as arrays that batches are cut from, in memory or mapped from a file. Shapes: N items.

A shard is a store of one lane, in which the episodes of a file follow each other, each with its final observation: what
cuts batches from the replay cuts them from here.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np

from qfleet.data import Array, Rollout, Spec
from qfleet.datasets.format import DataFile, Dataset, StepRows, join_observation, spec_columns
from qfleet.datasets.storage import ArrayCache
from qfleet.datasets.storage.array_cache import Arrays, Shapes
from qfleet.envs.spaces import adapt_obs
from qfleet.errors import UsageError
from qfleet.replay import Store

DECODING = 1  # counts on whenever decoded arrays of the same file become others
ITEMS = "items"


@dataclass(eq=False)
class DataShard:
    """One data file: its rows, and the item of every transition."""

    store: Store
    items: Array  # [transitions]
    mapped: bool = False  # from a file, else in memory
    decoded: bool = True  # by this process

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.store.rows * self.store.row_bytes + self.items.nbytes


def load_shard(dataset: Dataset, file: DataFile, spec: Spec) -> DataShard:
    """Decode a data file into memory."""
    store = Store(spec, 1, file.rows)
    return DataShard(store, decode(dataset, file, store))


def map_shard(dataset: Dataset, file: DataFile, spec: Spec, cache: ArrayCache) -> DataShard:
    """Map a decoded data file from the cache, where it is decoded if it is not there; into memory if that fails."""
    made = False

    def fill(arrays: Arrays) -> None:
        nonlocal made
        made = True
        arrays[ITEMS][:] = decode(dataset, file, store_of(arrays, spec))

    arrays = cache.get(shard_key(dataset, file, spec), shard_shapes(file, spec), fill)
    if arrays is None:
        return load_shard(dataset, file, spec)
    store = store_of(arrays, spec)
    store.heads[0] = file.rows
    return DataShard(store, arrays[ITEMS], mapped=True, decoded=made)


def decode(dataset: Dataset, file: DataFile, store: Store) -> Array:  # [transitions]
    """Write the rows of a data file into a store; the item of every transition."""
    for rows in dataset.rows(file):
        store.write(as_rollout(dataset, rows, store.spec), 0, len(rows.t))
    return np.flatnonzero(~store.last[:, 0])


def store_of(arrays: Arrays, spec: Spec) -> Store:
    """A store whose columns are these arrays."""
    store = Store(spec, 1, len(arrays["last"]))
    for name in store.columns():
        setattr(store, name, arrays[name])
    store.extra = {name: arrays[name] for name in store.extra}
    return store


def shard_shapes(file: DataFile, spec: Spec) -> Shapes:
    """The arrays of a decoded file."""
    columns = Store(spec, 1, 1).columns()
    shapes = {name: (column.dtype.str, (file.rows, *column.shape[1:])) for name, column in columns.items()}
    return {**shapes, ITEMS: (np.dtype(np.int64).str, (file.steps,))}


def shard_key(dataset: Dataset, file: DataFile, spec: Spec) -> str:
    """The hash of the content of a decoded file: of the file itself, and of all that decides how it is decoded."""
    manifest = dataset.manifest
    columns = [[each.name, each.dtype, list(each.shape)] for each in manifest.observations]
    decided = [DECODING, file.sha256, file.rows, asdict(spec), manifest.env_id, columns, manifest.spaces]
    return hashlib.sha256(json.dumps(decided, default=list).encode()).hexdigest()


def decoded_row_bytes(spec: Spec) -> int:
    """Bytes of one decoded row, with its item."""
    return Store(spec, 1, 1).row_bytes + 8


def as_rollout(dataset: Dataset, rows: StepRows, spec: Spec) -> Rollout:
    """Rows of a data set as an actor would have sent them, in one lane."""
    lane = (slice(None), None)
    return Rollout(
        obs=policy_observations(dataset, rows, spec)[lane],
        action=rows.action[lane],
        reward=rows.reward.astype(np.float32)[lane],
        discount=(~rows.terminated).astype(np.float32)[lane],
        last=rows.last[lane],
        source=(0, 0, 0),
        version=0,
        mask=None if rows.mask is None else rows.mask[lane],
    )


def policy_observations(dataset: Dataset, rows: StepRows, spec: Spec) -> Array:  # [R, *spec.obs]
    """Observations as policies see them: as they were recorded, or adapted from the environment's own space."""
    manifest = dataset.manifest
    if manifest.observations == spec_columns(spec):
        return rows.observations[manifest.observations[0].name]
    spaces = manifest.env_spaces()
    if spaces is None:
        raise UsageError(
            f"{dataset.place.url} holds observations that no policy can read",
            "They are in the environment's own space, and the manifest does not say what that is.",
            "Import the data set again from a source that knows its spaces.",
        )
    adapter = adapt_obs(spaces.observation, manifest.env_id)
    found = np.empty((len(rows.t), *spec.obs), spec.dtype)
    for at in range(len(found)):
        values = {name: array[at] for name, array in rows.observations.items()}
        found[at] = adapter.encode(join_observation(spaces.observation, values))
    return found
