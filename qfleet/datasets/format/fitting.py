"""What an episode must be before it is written: arrays of the layout's own types, and nothing that a reader refuses."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from qfleet.data import Array
from qfleet.datasets.format.bounded import MAX_DECODED_BYTES, MAX_TEXT_BYTES
from qfleet.datasets.format.episode import RecordedEpisode
from qfleet.datasets.format.tables import MAX_REWARD, Layout, Ranges


def fitted_episode(episode: RecordedEpisode, layout: Layout, ranges: Ranges) -> RecordedEpisode:
    """The episode with arrays of the layout's types; ValueError, in a sentence, if it breaks a rule of the format."""
    columns = {column.name: column for column in layout.observations}
    if episode.observations.keys() != columns.keys():
        raise ValueError(f"its observations are {', '.join(episode.observations)[:200]}, which is not the layout's")
    if episode.mask is not None and not layout.masked:
        raise ValueError("it has masks, and its environment has none")
    fitted = replace(
        episode,
        observations={
            name: _typed(name, array, columns[name].dtype, columns[name].shape)
            for name, array in episode.observations.items()
        },
        action=_typed("action", episode.action, "int64"),
        reward=_typed("reward", episode.reward, "float64"),
        probability=None if episode.probability is None else _typed("probability", episode.probability, "float64"),
        mask=_mask(episode, layout),
    )
    for problem in (*_length_problems(fitted), *_text_problems(fitted), *_value_problems(fitted, layout, ranges)):
        raise ValueError(problem)
    return fitted


def _typed(name: str, array: Array, dtype: str, shape: tuple[int, ...] = ()) -> Array:
    """The array in another type; ValueError if its shape or one of its values would be another one."""
    if array.shape[1:] != shape:
        raise ValueError(f"{name} has the shape {list(array.shape[1:])}, and the layout {list(shape)}")
    if array.dtype == np.dtype(dtype):
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        typed = array.astype(dtype)
    if not np.array_equal(typed, array, equal_nan=typed.dtype.kind == "f" and array.dtype.kind == "f"):
        raise ValueError(f"values of {name} are {array.dtype}, and do not fit into {dtype}")
    return typed


def _mask(episode: RecordedEpisode, layout: Layout) -> Array | None:
    if not layout.masked:
        return None
    if episode.mask is None:
        return np.ones((episode.num_steps + 1, layout.num_actions), np.bool_)
    return _typed("mask", episode.mask, "bool", (layout.num_actions,))


def _length_problems(episode: RecordedEpisode) -> Iterator[str]:
    num = episode.num_steps
    lengths = {name: len(array) - 1 for name, array in episode.observations.items()}
    lengths["reward"] = len(episode.reward)
    if episode.probability is not None:
        lengths["probability"] = len(episode.probability)
    if episode.mask is not None:
        lengths["mask"] = len(episode.mask) - 1
    for name, length in lengths.items():
        if length != num:
            yield f"{name} belongs to {length} steps, and there are {num} actions"
    if num == 0:
        yield "it has no steps"


def _text_problems(episode: RecordedEpisode) -> Iterator[str]:
    texts = {"id": episode.id, "world": episode.env_id, "behaviour": episode.behaviour}
    for name, text in texts.items():
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            yield f"its {name} is not valid text: it holds half of a character"
            continue
        if num_bytes > MAX_TEXT_BYTES:
            yield f"its {name} has {num_bytes:,} bytes, and {MAX_TEXT_BYTES:,} are the most"
    if episode.seed is not None and not -(2**63) <= episode.seed < 2**63:
        yield f"its seed {episode.seed} does not fit into 64 bits"


def _value_problems(episode: RecordedEpisode, layout: Layout, ranges: Ranges) -> Iterator[str]:
    if (episode.num_steps + 1) * layout.row_bytes > MAX_DECODED_BYTES:
        yield f"its {episode.num_steps + 1:,} rows take more than {MAX_DECODED_BYTES:,} bytes, the most of a file"
    if ((episode.action < 0) | (episode.action >= layout.num_actions)).any():
        yield f"an action is not one of {layout.num_actions:,}"
    elif episode.mask is not None and not episode.mask[np.arange(episode.num_steps), episode.action].all():
        yield "an action was not allowed by its mask"
    if not np.isfinite(episode.reward).all():
        yield "a reward is not a finite number"
    elif (np.abs(episode.reward) > MAX_REWARD).any():
        yield f"a reward is larger than {MAX_REWARD:g}, the largest float32"
    if episode.probability is not None and not ((episode.probability > 0) & (episode.probability <= 1)).all():
        yield "a probability is not above 0 and at most 1"
    for name, array in episode.observations.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            yield f"{name} holds a number that is not finite"
        if name in ranges and ((array < ranges[name][0]) | (array > ranges[name][1])).any():
            yield f"{name} holds a number outside of its space"
