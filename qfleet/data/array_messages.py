"""Rollouts, batches and priorities as parcels, and back with suspicion: what does not fit the world is a ValueError.

Shapes: T rows, B lanes, N items, W rows of a window of which L are learned from, A actions, K ended episodes.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from qfleet.data.types import Array, Batch, Rollout, Sequences, Spec
from qfleet.data.wire_format import Arrays, Parts, packed_bytes, to_bytes, unpack

# A dtype and a shape, in which a letter stands for a length that is free but the same everywhere.
Form: TypeAlias = tuple[str, tuple[int | str, ...]]
COLUMNS = ("obs", "action", "reward", "discount", "last", "mask", "state", "value")
LARGEST = 2**62


def rollout_parts(rollout: Rollout) -> Parts:
    """What a parcel carries of a rollout."""
    arrays = present(rollout, COLUMNS)
    arrays["returns"] = np.array([episode[0] for episode in rollout.finished], np.float64)
    arrays["lengths"] = np.array([episode[1] for episode in rollout.finished], np.int64)
    arrays["ends"] = np.array(rollout.ends, np.int64)
    return {"kind": "rollout", "source": list(rollout.source), "version": rollout.version}, arrays


def as_rollout(parts: Parts, spec: Spec, lanes: int) -> Rollout:
    """The rollout of so many lanes of such a world that a parcel carries."""
    meta, arrays = parts
    source = fact(meta, "source")
    version = fact(meta, "version")
    if fact(meta, "kind") != "rollout" or not (is_counts(source, 3) and is_counts([version], 1)):
        raise ValueError(f"not a rollout's description: {meta}")
    fit(arrays, rollout_forms(spec, lanes), optional=("value",))
    require_range("action", arrays["action"], spec.num_actions)
    columns: dict[str, Any] = {name: arrays[name] for name in COLUMNS if name in arrays}
    if len(arrays["returns"]) > arrays["last"].size:
        raise ValueError(f"{len(arrays['returns'])} episodes cannot end in {arrays['last'].size} steps")
    if len(arrays["ends"]):
        require_range("ends", arrays["ends"], len(arrays["last"]))
    columns["finished"] = tuple(zip(arrays["returns"].tolist(), arrays["lengths"].tolist(), strict=True))
    columns["ends"] = tuple(arrays["ends"].tolist())
    return Rollout(**columns, source=(source[0], source[1], source[2]), version=version)


def rollout_bytes(spec: Spec, lanes: int, rows: int) -> int:
    """The most that a rollout of so many rows can need."""
    free = {"T": rows, "K": rows * lanes}
    arrays = {name: blank(form, free) for name, form in rollout_forms(spec, lanes).items()}
    return packed_bytes({"kind": "rollout", "source": [LARGEST] * 3, "version": LARGEST}, arrays)


@dataclass(slots=True)
class SentBytes:
    """What compressing rollouts has saved and cost so far."""

    raw_bytes: int = 0
    sent_bytes: int = 0
    pack_ns: int = 0  # copying and checking included

    def add(self, arrays: Arrays, sent_bytes: int, begun_ns: int) -> None:
        """One more was packed, from `begun_ns` on."""
        self.raw_bytes += sum(array.nbytes for array in arrays.values())
        self.sent_bytes += sent_bytes
        self.pack_ns += time.perf_counter_ns() - begun_ns


def pack_rollout(rollout: Rollout, *, compress: Collection[str] = (), freight: SentBytes | None = None) -> bytes:
    """A rollout for a wire."""
    begun = time.perf_counter_ns()
    (meta, arrays) = rollout_parts(rollout)
    parcel = to_bytes(meta, arrays, compress=compress)
    if freight is not None:
        freight.add(arrays, len(parcel), begun)
    return parcel


def unpack_rollout(view: memoryview | bytes, spec: Spec, lanes: int, *, limit_bytes: int) -> Rollout:
    """A rollout from a wire."""
    return as_rollout(unpack(view, limit_bytes=limit_bytes), spec, lanes)


def batch_parts(batch: Batch | Sequences) -> Parts:
    """What a parcel carries of a batch or of sequences."""
    return {"kind": type(batch).__name__}, present(batch, batch.__slots__)


def as_batch(parts: Parts, spec: Spec) -> Batch | Sequences:
    """The batch or the sequences that a parcel carries."""
    meta, arrays = parts
    kind = fact(meta, "kind")
    if kind == "Batch":
        fit(arrays, batch_forms(spec), optional=("mask", "next_mask"))
    elif kind == "Sequences":
        fit(arrays, sequence_forms(spec), optional=("mask",))
        require_range("ahead", arrays["ahead"], len(arrays["obs"]))
    else:
        raise ValueError(f"neither a batch nor sequences: {meta}")
    require_range("action", arrays["action"], spec.num_actions)
    return Batch(**arrays) if kind == "Batch" else Sequences(**arrays)


def blank_batch(spec: Spec, num: int, window: int = 0, learned: int = 0) -> Batch | Sequences:
    """A batch of so many items, or sequences of `window` rows, that nothing was written to; to know how long it is."""
    lengths = {"N": num, "W": window, "L": learned}
    if window:
        return Sequences(**{name: blank(form, lengths) for name, form in sequence_forms(spec).items()})
    return Batch(**{name: blank(form, lengths) for name, form in batch_forms(spec).items()})


def pack_batch(batch: Batch | Sequences, *, compress: Collection[str] = ()) -> bytes:
    """A batch for a wire."""
    return to_bytes(*batch_parts(batch), compress=compress)


def unpack_batch(view: memoryview | bytes, spec: Spec, *, limit_bytes: int) -> Batch | Sequences:
    """A batch from a wire."""
    return as_batch(unpack(view, limit_bytes=limit_bytes), spec)


def priority_parts(ids: Array, priority: Array) -> Parts:
    """What a parcel carries of priorities [N] on their way back."""
    return {"kind": "priorities"}, {"ids": ids, "priority": priority}


def as_priorities(parts: Parts) -> tuple[Array, Array]:
    """The ids [N] and priorities [N] that a parcel carries."""
    meta, arrays = parts
    if fact(meta, "kind") != "priorities":
        raise ValueError(f"not priorities: {meta}")
    fit(arrays, {"ids": ("int64", ("N",)), "priority": ("float32", ("N",))})
    if not (np.isfinite(arrays["priority"]).all() and (arrays["priority"] >= 0).all()):
        raise ValueError("priority: expected finite numbers from 0 on")
    return arrays["ids"], arrays["priority"]


def rollout_forms(spec: Spec, lanes: int) -> dict[str, Form]:
    """A rollout's arrays."""
    row = ("T", lanes)
    forms: dict[str, Form] = {
        "obs": (spec.dtype, (*row, *spec.obs)),
        "action": ("int64", row),
        "reward": ("float32", row),
        "discount": ("float32", row),
        "last": ("bool", row),
        "value": ("float32", (*row, 2)),
        "returns": ("float64", ("K",)),
        "lengths": ("int64", ("K",)),
        "ends": ("int64", ("K",)),
    }
    masks: dict[str, Form] = {"mask": ("bool", (*row, spec.num_actions))} if spec.masked else {}
    return forms | masks | ({"state": ("float32", (*row, *spec.state))} if spec.state else {})


def batch_forms(spec: Spec) -> dict[str, Form]:
    """A batch's arrays."""
    numbers = dict.fromkeys(("reward", "discount", "weight"), ("float32", ("N",)))
    items = dict.fromkeys(("action", "ids"), ("int64", ("N",)))
    shape: tuple[int | str, ...] = ("N", *spec.input_shape)
    shown = dict.fromkeys(("obs", "next_obs"), (spec.dtype, shape))
    masks = dict.fromkeys(("mask", "next_mask"), ("bool", ("N", spec.num_actions))) if spec.masked else {}
    return {**shown, **items, **numbers, **masks}


def sequence_forms(spec: Spec) -> dict[str, Form]:
    """Sequences' arrays."""
    rows = ("W", "N")
    learned = ("L", "N")
    forms: dict[str, Form] = {
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


def present(holder: Rollout | Batch | Sequences, names: Collection[str]) -> Arrays:
    """The arrays that are there."""
    return {name: array for name in names if (array := getattr(holder, name)) is not None}


def fit(arrays: Arrays, forms: Mapping[str, Form], optional: Collection[str] = ()) -> None:
    """Every array is there, of its form, and no other."""
    missing = forms.keys() - arrays.keys() - set(optional)
    if missing or (strange := arrays.keys() - forms.keys()):
        raise ValueError(f"{sorted(missing)} missing" if missing else f"{sorted(strange)} not expected")
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
        raise ValueError("it is empty")


def fact(meta: Mapping[str, Any], name: str) -> Any:
    """A field of a parcel's description."""
    if name not in meta:
        raise ValueError(f"{name} is missing")
    return meta[name]


def is_counts(values: Any, num: int) -> bool:
    """Are these so many whole numbers from 0 on?"""
    return isinstance(values, list) and len(values) == num and all(type(n) is int and n >= 0 for n in values)


def require_range(name: str, array: Array, count: int) -> None:
    """Every number is one of 0, ..., count - 1."""
    if array.min() < 0 or array.max() >= count:
        raise ValueError(f"{name}: expected 0 to {count - 1}, got {array.min()} to {array.max()}")


def blank(form: Form, lengths: Mapping[str, int]) -> Array:
    """An array of this form that nothing was written to."""
    dtype, shape = form
    return np.empty([size if isinstance(size, int) else lengths[size] for size in shape], dtype)
