"""Data files of a data set as arrays in memory that batches are cut from. Shapes: N items.

A shard is a store of one lane, in which the episodes of a file follow each other, each with its final observation: what
cuts batches from the replay cuts them from here.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from qfleet.data import Array, Rollout, Spec
from qfleet.datasets.format import DataFile, Dataset, StepRows, join_observation, spec_columns
from qfleet.envs.spaces import adapt_obs
from qfleet.errors import UsageError
from qfleet.replay import Store


@dataclass(eq=False)
class DataShard:
    """One data file: its rows, and the item of every transition."""

    store: Store
    items: Array  # [transitions]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.store.rows * self.store.row_bytes + self.items.nbytes


def load_shard(dataset: Dataset, file: DataFile, spec: Spec) -> DataShard:
    """Decode a data file."""
    store = Store(spec, 1, file.rows)
    for rows in dataset.rows(file):
        store.write(as_rollout(dataset, rows, spec), 0, len(rows.t))
    return DataShard(store, np.flatnonzero(~store.last[:, 0]))


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


@dataclass(eq=False)
class ShardCache:
    """Keeps the shards used last, in at most `max_bytes`; the one in use always stays."""

    dataset: Dataset
    files: list[DataFile]
    spec: Spec
    max_bytes: int
    num_loads: int = 0
    shards: OrderedDict[int, DataShard] = field(default_factory=OrderedDict)

    def shard(self, number: int) -> DataShard:
        """The shard with this number, loaded if it is not in memory."""
        if number in self.shards:
            self.shards.move_to_end(number)
            return self.shards[number]
        shard = load_shard(self.dataset, self.files[number], self.spec)
        self.num_loads += 1
        self.shards[number] = shard
        while len(self.shards) > 1 and self.num_bytes() > self.max_bytes:
            self.shards.popitem(last=False)
        return shard

    def num_bytes(self) -> int:
        """Bytes of all shards in memory."""
        return sum(shard.num_bytes for shard in self.shards.values())
