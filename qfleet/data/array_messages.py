"""Rollouts, batches and priorities as arrays of messages, and back with checks: what does not fit is a ValueError.

Shapes: T rows, B lanes, N items, W rows of a window of which L are learned from, A actions, K ended episodes with I
numbers of `log.info` each.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from qfleet.data.types import Array, Batch, Episode, Rollout, Sequences, Spec
from qfleet.data.wire_format import Arrays, Count, Message, packed_bytes, to_bytes, unpack

# A dtype and a shape, in which a letter stands for a length that is free but the same in all arrays of a message.
ArrayForm: TypeAlias = tuple[str, tuple[int | str, ...]]
COLUMNS = ("obs", "action", "reward", "discount", "last", "mask", "state", "value", "probability")
MAX_COUNT = 2**62
BatchForm = Literal["steps", "sequences"]


class RolloutHeader(Message):
    """A rollout, whose rows are the arrays."""

    source: tuple[Count, Count, Count]  # worker, incarnation, sequence
    version: Count  # of the weights that acted


def rollout_parts(rollout: Rollout) -> tuple[RolloutHeader, Arrays]:
    """A rollout as a message."""
    arrays = arrays_of(rollout, COLUMNS)
    arrays["returns"] = np.array([episode[0] for episode in rollout.finished], np.float64)
    arrays["lengths"] = np.array([episode[1] for episode in rollout.finished], np.int64)
    arrays["ends"] = np.array(rollout.ends, np.int64)
    if rollout.finished and len(rollout.finished[0]) > 2:
        arrays["info"] = np.array([episode[2:] for episode in rollout.finished], np.float64)
    return RolloutHeader(rollout.source, rollout.version), arrays


def as_rollout(header: RolloutHeader, arrays: Arrays, spec: Spec, lanes: int, num_info: int = 0) -> Rollout:
    """The rollout of a message, checked against the spec, the number of lanes and that of `log.info`."""
    require_forms(arrays, rollout_forms(spec, lanes, num_info), optional=("value", "info", "probability"))
    require_range("action", arrays["action"], spec.num_actions)
    require_probabilities(arrays)
    columns: dict[str, Any] = {name: arrays[name] for name in COLUMNS if name in arrays}
    if len(arrays["returns"]) > arrays["last"].size:
        raise ValueError(f"{len(arrays['returns'])} episodes cannot end in {arrays['last'].size} steps")
    if len(arrays["ends"]):
        require_range("ends", arrays["ends"], len(arrays["last"]))
    columns["finished"] = as_episodes(arrays, num_info)
    columns["ends"] = tuple(arrays["ends"].tolist())
    return Rollout(**columns, source=header.source, version=header.version)


def as_episodes(arrays: Arrays, num_info: int) -> tuple[Episode, ...]:
    """The episodes of a rollout's message."""
    pairs = zip(arrays["returns"].tolist(), arrays["lengths"].tolist(), strict=True)
    if not num_info:
        return tuple(pairs)
    episodes = list(pairs)
    if episodes and "info" not in arrays:
        raise ValueError("info missing")
    numbers = arrays["info"].tolist() if episodes else []
    return tuple((value, length, *info) for (value, length), info in zip(episodes, numbers, strict=True))


def rollout_bytes(spec: Spec, lanes: int, rows: int, num_info: int = 0) -> int:
    """The largest message of a rollout with this many rows."""
    free = {"T": rows, "K": rows * lanes}
    arrays = {name: empty_array(form, free) for name, form in rollout_forms(spec, lanes, num_info).items()}
    return packed_bytes(RolloutHeader((MAX_COUNT, MAX_COUNT, MAX_COUNT), MAX_COUNT), arrays)


@dataclass(slots=True)
class CompressionStats:
    """Bytes saved and time spent by the compression of rollouts so far."""

    raw_bytes: int = 0
    sent_bytes: int = 0
    pack_ns: int = 0  # including copies and checksums

    def add(self, arrays: Arrays, sent_bytes: int, started_ns: int) -> None:
        """Count one rollout, whose packing started at `started_ns`."""
        self.raw_bytes += sum(array.nbytes for array in arrays.values())
        self.sent_bytes += sent_bytes
        self.pack_ns += time.perf_counter_ns() - started_ns


def pack_rollout(
    rollout: Rollout, *, compress: Collection[str] = (), compression_stats: CompressionStats | None = None
) -> bytes:
    """The bytes of a rollout's message."""
    started = time.perf_counter_ns()
    header, arrays = rollout_parts(rollout)
    message = to_bytes(header, arrays, compress=compress)
    if compression_stats is not None:
        compression_stats.add(arrays, len(message), started)
    return message


def unpack_rollout(view: memoryview | bytes, spec: Spec, lanes: int, *, limit_bytes: int, num_info: int = 0) -> Rollout:
    """The rollout of a message's bytes."""
    header, arrays = unpack(view, RolloutHeader, limit_bytes=limit_bytes)
    return as_rollout(header, arrays, spec, lanes, num_info)


def batch_form(batch: Batch | Sequences) -> BatchForm:
    """Is it a batch of steps, or one of sequences?"""
    return "steps" if isinstance(batch, Batch) else "sequences"


def batch_arrays(batch: Batch | Sequences) -> Arrays:
    """The arrays of a batch or of sequences."""
    return arrays_of(batch, batch.__slots__)


def as_batch(form: BatchForm, arrays: Arrays, spec: Spec) -> Batch | Sequences:
    """The batch or the sequences of a message, checked against the spec."""
    if form == "steps":
        require_forms(arrays, batch_forms(spec), optional=("mask", "next_mask"))
    else:
        require_forms(arrays, sequence_forms(spec), optional=("mask",))
        require_range("ahead", arrays["ahead"], len(arrays["obs"]))
    require_range("action", arrays["action"], spec.num_actions)
    return Batch(**arrays) if form == "steps" else Sequences(**arrays)


def template_batch(spec: Spec, num: int, window: int = 0, learned: int = 0) -> Batch | Sequences:
    """An uninitialised batch of `num` items, or sequences of `window` rows, to measure the size of messages."""
    lengths = {"N": num, "W": window, "L": learned}
    if window:
        return Sequences(**{name: empty_array(form, lengths) for name, form in sequence_forms(spec).items()})
    return Batch(**{name: empty_array(form, lengths) for name, form in batch_forms(spec).items()})


def as_priorities(arrays: Arrays) -> tuple[Array, Array]:
    """The ids [N] and priorities [N] of a message."""
    require_forms(arrays, {"ids": ("int64", ("N",)), "priority": ("float32", ("N",))})
    if not (np.isfinite(arrays["priority"]).all() and (arrays["priority"] >= 0).all()):
        raise ValueError("priority: expected finite numbers from 0 on")
    return arrays["ids"], arrays["priority"]


def rollout_forms(spec: Spec, lanes: int, num_info: int = 0) -> dict[str, ArrayForm]:
    """The forms of a rollout's arrays."""
    row = ("T", lanes)
    forms: dict[str, ArrayForm] = {
        "obs": (spec.dtype, (*row, *spec.obs)),
        "action": ("int64", row),
        "reward": ("float32", row),
        "discount": ("float32", row),
        "last": ("bool", row),
        "value": ("float32", (*row, 2)),
        "probability": ("float64", row),
        "returns": ("float64", ("K",)),
        "lengths": ("int64", ("K",)),
        "ends": ("int64", ("K",)),
    }
    if num_info:
        forms["info"] = ("float64", ("K", num_info))
    masks: dict[str, ArrayForm] = {"mask": ("bool", (*row, spec.num_actions))} if spec.masked else {}
    return forms | masks | ({"state": ("float32", (*row, *spec.state))} if spec.state else {})


def batch_forms(spec: Spec) -> dict[str, ArrayForm]:
    """The forms of a batch's arrays."""
    numbers = dict.fromkeys(("reward", "discount", "weight"), ("float32", ("N",)))
    items = dict.fromkeys(("action", "ids"), ("int64", ("N",)))
    shape: tuple[int | str, ...] = ("N", *spec.input_shape)
    shown = dict.fromkeys(("obs", "next_obs"), (spec.dtype, shape))
    masks = dict.fromkeys(("mask", "next_mask"), ("bool", ("N", spec.num_actions))) if spec.masked else {}
    return {**shown, **items, **numbers, **masks}


def sequence_forms(spec: Spec) -> dict[str, ArrayForm]:
    """The forms of sequences' arrays."""
    rows = ("W", "N")
    learned = ("L", "N")
    forms: dict[str, ArrayForm] = {
        "obs": (spec.dtype, (*rows, *spec.input_shape)),
        "action": ("int64", rows),
        "gain": ("float32", rows),
        "last": ("bool", rows),
        "state": ("float32", ("N", *spec.state)),
        "reward": ("float32", learned),
        "discount": ("float32", learned),
        "ahead": ("int64", learned),
        "weight": ("float32", ("N",)),
        "ids": ("int64", ("N",)),
    }
    return forms | ({"mask": ("bool", (*rows, spec.num_actions))} if spec.masked else {})


def arrays_of(holder: Rollout | Batch | Sequences, names: Collection[str]) -> Arrays:
    """Those of the named arrays that are not None."""
    return {name: array for name in names if (array := getattr(holder, name)) is not None}


def require_forms(arrays: Arrays, forms: Mapping[str, ArrayForm], optional: Collection[str] = ()) -> None:
    """Raise a ValueError unless all arrays are present with their forms, and no others."""
    if missing := forms.keys() - arrays.keys() - set(optional):
        raise ValueError(f"{sorted(missing)} missing")
    if unexpected := arrays.keys() - forms.keys():
        raise ValueError(f"{sorted(unexpected)} not expected")
    lengths: dict[str, int] = {}
    for name, array in arrays.items():
        dtype, shape = forms[name]
        wanted = [size if isinstance(size, int) else None for size in shape]
        for at, size in enumerate(shape[: array.ndim]):
            if isinstance(size, str):
                wanted[at] = lengths.setdefault(size, array.shape[at])
        if array.dtype != dtype or list(array.shape) != wanted:
            raise ValueError(f"{name}: expected {dtype} {shape}, got {array.dtype} {array.shape}")
    if any(size == 0 for letter, size in lengths.items() if letter != "K"):
        raise ValueError("the arrays are empty")


def require_range(name: str, array: Array, count: int) -> None:
    """Raise a ValueError unless all numbers are in 0, ..., count - 1."""
    if array.min() < 0 or array.max() >= count:
        raise ValueError(f"{name}: expected 0 to {count - 1}, got {array.min()} to {array.max()}")


def require_probabilities(arrays: Arrays) -> None:
    """Raise a ValueError if a step's action has a probability that is not above 0 and at most 1; NaN is unknown."""
    if "probability" in arrays:
        probability = arrays["probability"][~arrays["last"]]
        if ((probability <= 0) | (probability > 1)).any():
            raise ValueError("probability: expected numbers above 0 and at most 1")


def empty_array(form: ArrayForm, lengths: Mapping[str, int]) -> Array:
    """An uninitialised array of this form."""
    dtype, shape = form
    return np.empty([size if isinstance(size, int) else lengths[size] for size in shape], dtype)
