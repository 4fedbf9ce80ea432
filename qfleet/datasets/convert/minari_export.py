"""Writing a data set in Minari's Arrow storage. `metadata.json` is written last: without it there is no data set.

Pictures are written as PNG, which Minari decodes like its own JPEG files, so every pixel is kept. Masks and
probabilities become `infos`, the only values of Minari that a step may have beside its own.
"""

import json
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.data import Array
from qfleet.datasets.convert.actions import export_space, own_actions
from qfleet.datasets.convert.minari_import import MASK_INFO, METADATA, PROBABILITY_INFO
from qfleet.datasets.convert.minari_spaces import is_picture, write_minari_space
from qfleet.datasets.convert.pictures import can_encode, encode_picture
from qfleet.datasets.format import Dataset, DatasetManifest, RecordedEpisode, require_arrow, space_columns
from qfleet.datasets.format.columns import WHOLE
from qfleet.datasets.storage import Place, open_place
from qfleet.errors import UsageError

WRITTEN_AS = "0.5.3"  # the version of Minari whose layout this is


def export_minari(dataset: Dataset, url: str) -> list[str]:
    """Write a data set to a URL in Minari's Arrow storage; returns what the format cannot carry, in sentences."""
    target = open_place(url)
    require_unused(target, f"data/{METADATA}")
    manifest = dataset.manifest
    observation = observation_space(manifest)
    action = action_space(manifest)
    texts = [_space_text(space) for space in (observation, action)]
    numbered = enumerate(episode for file in dataset.files() for episode in dataset.episodes(file))
    for number, episode in numbered:
        folder = f"data/{number}"
        target.write(f"{folder}/part-0.arrow", _file_bytes(_table(episode, observation, action)))
        target.write(f"{folder}/{METADATA}", _json(_notes(episode, number)))
    totals = {"total_episodes": manifest.num_episodes, "total_steps": manifest.num_steps, "data_format": "arrow"}
    spaces_texts = {"observation_space": texts[0], "action_space": texts[1]}
    origin = {"dataset_id": "qfleet/exported-v0", "minari_version": WRITTEN_AS, "algorithm_name": ""}
    target.write(f"data/{METADATA}", _json({**totals, **spaces_texts, **origin, "env_id": manifest.env_id}))
    return export_notes(dataset)


def export_notes(dataset: Dataset) -> list[str]:
    """What a reader of Minari's format does not get."""
    notes = ["splits and hashes are not part of Minari's format"]
    if dataset.manifest.spec.stack > 1:
        notes.append("single frames are exported, and readers stack them by themselves")
    if dataset.manifest.env_spaces() is None or action_space(dataset.manifest) != _own_action(dataset.manifest):
        notes.append("the environment's own spaces are not known or hold levels: numbers of choices are exported")
    return notes


def _own_action(manifest: DatasetManifest) -> spaces.Space[Any] | None:
    own = manifest.env_spaces()
    return None if own is None else own.action


def require_unused(target: Place, name: str) -> None:
    """Refuse a place where somebody has written already."""
    if target.exists(name):
        raise UsageError(
            f"{target.url} holds a data set already",
            f"It has the file {name}, and an export replaces nothing.",
            "Choose another folder.",
        )


def observation_space(manifest: DatasetManifest) -> spaces.Space[Any]:
    """The space of the recorded observations: the environment's own, or one that holds any numbers of their type."""
    own = manifest.env_spaces()
    if own is not None and own.stack == 1 and space_columns(own.observation) == manifest.observations:
        return own.observation
    if [each.name for each in manifest.observations] != [WHOLE]:
        raise UsageError(
            "observations of several columns need the environment's own space",
            "The manifest does not say what that space is.",
            "Import the data set again from a source that knows its spaces.",
        )
    column = manifest.observations[0]
    kind = np.dtype(column.dtype)
    if kind.kind == "f":
        return spaces.Box(-np.inf, np.inf, column.shape, kind.type)
    low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    return spaces.Box(low, high, column.shape, kind.type)


def action_space(manifest: DatasetManifest) -> spaces.Space[Any]:
    """The space of exported actions."""
    return export_space(_own_action(manifest), manifest.spec.actions)


def _space_text(space: spaces.Space[Any]) -> str:
    try:
        return json.dumps(write_minari_space(space))
    except ValueError as error:
        raise UsageError(
            f"this data set cannot be exported: {error}",
            "Minari's format has Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple.",
            "Export it with --format rllib.",
        ) from error


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _notes(episode: RecordedEpisode, number: int) -> dict[str, Any]:
    own = {"qfleet_id": episode.id, "qfleet_behaviour": episode.behaviour, "qfleet_env_id": episode.env_id}
    seed = {} if episode.seed is None else {"seed": episode.seed}
    return {"id": number, "total_steps": episode.num_steps, **seed, **own}


def _table(episode: RecordedEpisode, observation: spaces.Space[Any], action: spaces.Space[Any]) -> dict[str, Any]:
    """The columns of an episode's file: T + 1 rows, padded where there are T values."""
    pa = require_arrow()
    num = episode.num_steps
    last = np.arange(num + 1) == num - 1
    columns = {
        "observations": encode_leaves(observation, episode.observations, WHOLE),
        "actions": encode_leaves(action, {WHOLE: _padded(own_actions(episode.action, action))}, WHOLE),
        "rewards": pa.array(_padded(episode.reward)),
        "terminations": pa.array(last & episode.terminated),
        "truncations": pa.array(last & episode.truncated),
    }
    known = np.full(num, np.nan) if episode.probability is None else episode.probability
    infos = {PROBABILITY_INFO: pa.array(_padded(known))}  # in each file: Minari wants the same columns in all
    if episode.mask is not None:
        infos[MASK_INFO] = fixed_lists(episode.mask.astype(np.int8))
    columns["infos"] = pa.StructArray.from_arrays(list(infos.values()), names=list(infos))
    return columns


def _padded(values: Array) -> Array:
    return np.concatenate([values, np.zeros_like(values[:1])])


def _file_bytes(columns: dict[str, Any]) -> bytes:
    pa = require_arrow()
    batch = pa.RecordBatch.from_pydict(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def encode_leaves(space: spaces.Space[Any], arrays: dict[str, Array], name: str) -> Any:
    """Values of a space as an Arrow array: structs of its parts."""
    pa = require_arrow()
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        found = {str(key): encode_leaves(part, arrays, f"{name}/{key}") for key, part in parts}
        return pa.StructArray.from_arrays(list(found.values()), names=list(found))
    array = arrays[name]
    if is_picture(space):
        return _pictures(array)
    return pa.array(array) if isinstance(space, spaces.Discrete) else fixed_lists(array)


def _pictures(frames: Array) -> Any:
    shape = frames.shape[1:]
    if not can_encode(shape):
        raise UsageError(
            f"pictures of shape {shape} cannot be exported to Minari",
            "Its format encodes pictures, which have height, width and two to four colours, in this order.",
            "Export it with --format rllib.",
        )
    return require_arrow().array([encode_picture(frame) for frame in frames], require_arrow().binary())


def fixed_lists(array: Array) -> Any:
    """Arrays of any shape as lists of one length."""
    pa = require_arrow()
    flat = np.ascontiguousarray(array).reshape(len(array), -1)
    kind = pa.list_(pa.from_numpy_dtype(flat.dtype), flat.shape[1])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), type=kind)
