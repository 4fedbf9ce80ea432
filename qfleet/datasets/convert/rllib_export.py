"""Writing a data set as RLlib's columns: a row per transition, a Parquet file for each data file.

Every observation is written twice, as RLlib reads it. Episodes stay whole in their file.
"""

from typing import Any

import numpy as np

from qfleet.data import Array, split_actions
from qfleet.datasets.convert.array_columns import nested_lists
from qfleet.datasets.convert.column_roles import RLLIB
from qfleet.datasets.convert.file_notes import NOTES, notes_of
from qfleet.datasets.convert.minari_export import require_unused
from qfleet.datasets.format import Dataset, RecordedEpisode, require_arrow
from qfleet.datasets.format.columns import WHOLE
from qfleet.datasets.storage import open_place

GROUP_ROWS = 10_000


def export_rllib(dataset: Dataset, url: str) -> list[str]:
    """Write a data set to a URL as RLlib's columns; returns what the format cannot carry, in sentences."""
    target = open_place(url)
    require_unused(target, _name(0))
    for number, file in reversed(list(enumerate(dataset.files()))):  # the first file last: it says that all are there
        episodes = list(dataset.episodes(file))
        target.write(_name(number), _file_bytes(dataset, episodes))
    return export_notes(dataset)


def export_notes(dataset: Dataset) -> list[str]:
    """What a reader of RLlib's columns does not get."""
    notes = ["splits and hashes are not part of RLlib's columns; spaces and seeds are in the metadata of the files"]
    if dataset.manifest.spec.masked:
        notes.append(f"RLlib does not read masks by itself: they are in {RLLIB['mask']} and {RLLIB['next_mask']}")
    if dataset.manifest.spec.stack > 1:
        notes.append("single frames are exported, and RLlib stacks them with a connector of its own")
    return notes


def _name(number: int) -> str:
    return f"transitions-{number:05d}.parquet"


def _file_bytes(dataset: Dataset, episodes: list[RecordedEpisode]) -> bytes:
    pa = require_arrow()
    table = pa.concat_tables([_table(dataset, episode) for episode in episodes])
    table = table.replace_schema_metadata({NOTES: notes_of(dataset, episodes).text()})
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, row_group_size=GROUP_ROWS, compression="zstd")
    return bytes(sink.getvalue())


def _table(dataset: Dataset, episode: RecordedEpisode) -> Any:
    pa = require_arrow()
    num = episode.num_steps
    last = np.arange(num) == num - 1
    known = np.full(num, np.nan) if episode.probability is None else episode.probability
    choices = split_actions(episode.action, dataset.manifest.spec.actions)
    columns = {
        "episode": pa.array([episode.id] * num, pa.string()),
        "step": pa.array(np.arange(num)),
        "obs": _observations(episode.observations, slice(0, num)),
        "next_obs": _observations(episode.observations, slice(1, num + 1)),
        "action": pa.array(choices[0]) if len(choices) == 1 else nested_lists(np.stack(choices, axis=1)),
        "reward": pa.array(episode.reward),
        "terminated": pa.array(last & episode.terminated),
        "truncated": pa.array(last & episode.truncated),
        "probability": pa.array(known),
    }
    if episode.mask is not None:
        columns |= {"mask": nested_lists(episode.mask[:-1]), "next_mask": nested_lists(episode.mask[1:])}
    return pa.table({RLLIB[role]: column for role, column in columns.items()})


def _observations(arrays: dict[str, Array], rows: slice) -> Any:
    """One array as lists, several as structs of their names' parts."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, leaf = name.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = nested_lists(array[rows])
    return _structs(tree[WHOLE])


def _structs(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    parts = {name: _structs(part) for name, part in tree.items()}
    return require_arrow().StructArray.from_arrays(list(parts.values()), names=list(parts))
