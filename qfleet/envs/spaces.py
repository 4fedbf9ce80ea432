"""Converting Gymnasium spaces: observations to arrays, actions from one discrete index. C channels, A actions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.data import Array, Spec, split_actions
from qfleet.data.joint_actions import MAX_JOINT_ACTIONS
from qfleet.envs.bounds import Bounds, OutsideSpace
from qfleet.envs.space_parts import SpacePart, encodable
from qfleet.errors import UsageError

DEFAULT_BINS = 5
MIN_PICTURE_SIZE = 36  # pixels: the smallest that the Nature convolutions take
MAX_TABLE_ROWS = 4_096  # of prepared one-hot rows: more of them would cost more memory than they save time


@dataclass(frozen=True, slots=True)
class ObsAdapter:
    """Converts an observation into an array of `shape`, to be stored as `dtype`.

    `bounds` are those of the stored array, if there are any. `notes` name the parts of the space that are left out, or
    that are not read as they could be.
    """

    shape: tuple[int, ...]
    dtype: str
    encode: Callable[[Any], Array]
    bounds: Bounds | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActionAdapter:
    """Converts a joint action index into an action of the environment; `counts` are the choices per dimension."""

    counts: tuple[int, ...]
    decode: Callable[[int], Any]


def adapt_obs(space: spaces.Space[Any], name: str) -> ObsAdapter:
    """The adapter for an observation space."""
    if isinstance(space, spaces.Box):
        return _box_obs(space, _picture_notes(space, name))
    if isinstance(space, spaces.Discrete):
        return _one_hot(space)
    leaves, left_out = encodable(space)
    if leaves:
        return _flat_obs(leaves, tuple(f"{name}: {text}" for text in left_out))
    parts = f" ({'; '.join(left_out)})" if isinstance(space, spaces.Dict | spaces.Tuple) else ""
    raise UsageError(
        f"env.id={name!r} has observations of type {type(space).__name__}{parts}.",
        "qfleet takes Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these.",
        "Wrap the environment so that its observation is an array of fixed shape (gymnasium.ObservationWrapper).",
    )


def _picture_notes(space: spaces.Box, name: str) -> tuple[str, ...]:
    """A note about pictures whose channels come last: convolutions would take the height for the channels."""
    shape = space.shape
    if space.dtype != np.uint8 or len(shape) != 3 or shape[2] > 4 or min(shape[:2]) < MIN_PICTURE_SIZE:
        return ()
    problem = f"{name}: observation {shape} is a picture with its channels last, so it gets no convolutions"
    return (f"{problem}; wrap the environment so that they come first (docs/worlds.md has the wrapper)",)


def _box_obs(space: spaces.Box, notes: tuple[str, ...] = ()) -> ObsAdapter:
    shape = space.shape
    kind = space.dtype
    stored = shape or (1,)
    # Networks divide bytes by 255, so True is stored as 255 and becomes exactly 1.
    scale = 255 if kind == np.bool_ else None
    dtype = "uint8" if kind in (np.uint8, np.bool_) else "float32"

    def encode(obs: Any) -> Array:
        array = np.asarray(obs)
        if array.shape != shape:
            raise OutsideSpace("observation shape", str(shape), str(array.shape))
        if array.dtype != kind and not np.can_cast(array.dtype, kind, "same_kind"):
            raise OutsideSpace("observation dtype", str(kind), str(array.dtype))
        if scale:
            array = array.astype(np.uint8) * np.uint8(scale)
        return array.reshape(stored)

    return ObsAdapter(stored, dtype, encode, None if scale else Bounds.of(space), notes)


def _one_hot(space: spaces.Discrete[Any]) -> ObsAdapter:
    size = int(space.n)
    start = int(space.start)
    rows = np.eye(size, dtype=np.float32) if size <= MAX_TABLE_ROWS else None

    def encode(obs: Any) -> Array:
        array = np.asarray(obs)
        if array.size != 1 or array.dtype.kind not in "iu" or not 0 <= int(array.item()) - start < size:
            raise OutsideSpace("observation", f"an integer from {start} to {start + size - 1}", repr(obs))
        index = int(array.item()) - start
        row: Array = one_hot_row(size, index) if rows is None else rows[index]
        return row

    return ObsAdapter((size,), "float32", encode)


def one_hot_row(size: int, index: int) -> Array:  # [size]
    """Zeros, and a one at the index."""
    row: Array = np.zeros(size, np.float32)
    row[index] = 1.0
    return row


def _flat_obs(leaves: list[SpacePart], notes: tuple[str, ...]) -> ObsAdapter:
    shape = (sum(leaf.size for leaf in leaves),)

    def encode(obs: Any) -> Array:
        return np.concatenate([leaf.encode(obs) for leaf in leaves])

    bounds = Bounds.joined([leaf.bounds() for leaf in leaves], [leaf.key for leaf in leaves])
    return ObsAdapter(shape, "float32", encode, bounds, notes)


def make_spec(obs: ObsAdapter, actions: ActionAdapter, *, masked: bool, stack: int = 1) -> Spec:
    """The spec of a world of these spaces; with `stack` > 1 the first axis of an observation is that of the frames."""
    return Spec(obs.shape[1:] if stack > 1 else obs.shape, obs.dtype, actions.counts, stack=stack, masked=masked)


def adapt_actions(space: spaces.Space[Any], bins: int | None, name: str) -> ActionAdapter:
    """The adapter for an action space; `bins` is the plan's `env.bins`."""
    if isinstance(space, spaces.Box):
        return _binned(space, bins, name)
    if bins is not None:
        raise UsageError(
            f"env.bins={bins} has no effect on {name}.",
            f"Its actions are discrete already ({space}).",
            "Remove env.bins.",
        )
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return ActionAdapter((int(space.n),), lambda index: index + start)
    if isinstance(space, spaces.MultiDiscrete):
        nvec = np.ravel(space.nvec)
        first = np.ravel(space.start)
        levels = [np.arange(low, low + count) for low, count in zip(first, nvec, strict=True)]
        return _joint(levels, space, f"env.id={name!r}", "Wrap the environment so that it offers fewer joint actions.")
    if isinstance(space, spaces.MultiBinary):
        levels = [np.arange(2)] * int(np.prod(space.shape))
        return _joint(levels, space, f"env.id={name!r}", "Wrap the environment so that it offers fewer joint actions.")
    raise UsageError(
        f"env.id={name!r} has actions of type {type(space).__name__}.",
        "A Q-network values each action of a finite set: Discrete, MultiDiscrete, MultiBinary, or a Box cut into bins.",
        "Wrap the environment so that its action space is one of these.",
    )


def _binned(space: spaces.Box, bins: int | None, name: str) -> ActionAdapter:
    if not space.is_bounded():
        raise UsageError(
            f"env.id={name!r} has a Box action space without finite bounds ({space}).",
            "env.bins places its points between the lowest and the highest action.",
            "Wrap the environment so that every action dimension has finite bounds.",
        )
    count = bins or DEFAULT_BINS
    low = np.ravel(space.low).astype(np.float64)
    high = np.ravel(space.high).astype(np.float64)
    levels = [np.linspace(a, b, count) for a, b in zip(low, high, strict=True)]
    max_bins = int(MAX_JOINT_ACTIONS ** (1 / max(len(levels), 1)) + 1e-9)
    fewer_dimensions = "Wrap the environment so that it has fewer dimensions."
    fix = f"Set env.bins={max_bins} or lower." if max_bins >= 2 else fewer_dimensions
    return _joint(levels, space, f"env.bins={count} on {name}", fix)


def _joint(levels: list[Array], space: spaces.Space[Any], setting: str, fix: str) -> ActionAdapter:
    counts = tuple(len(level) for level in levels)
    total = math.prod(counts)
    if total > MAX_JOINT_ACTIONS:
        raise UsageError(
            f"{setting} makes {total:.1e} joint actions (dimensions {' x '.join(map(str, counts))}).",
            "They cannot even be numbered with 64 bits.",
            fix,
        )

    def decode(index: int) -> Any:
        choices = split_actions(int(index), counts)
        action = [level[choice] for level, choice in zip(levels, choices, strict=True)]
        return np.array(action, space.dtype).reshape(space.shape or ())

    return ActionAdapter(counts, decode)
