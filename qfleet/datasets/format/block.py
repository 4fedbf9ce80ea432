"""Whole episodes, one after the other, as columns of rows: many are written at once. Shapes: R rows, E episodes.

An episode of T steps has T + 1 rows. The values of its last row, but for the observation and the mask, mean nothing.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qfleet.data import Array
from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.episode import RecordedEpisode
from qfleet.datasets.format.statistics import MAX_ACTIONS, Statistics, moments_of
from qfleet.datasets.format.tables import MASK, MAX_REWARD, Layout, StepRows


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeBlock:
    """Episodes that were recorded together. `probability` is NaN where it is unknown."""

    ids: list[str]
    behaviours: list[str]  # the name of each episode's policy
    lengths: Array  # [E] int64, steps
    terminated: Array  # [E] bool
    truncated: Array  # [E] bool
    observations: dict[str, Array]  # [R, *shape] by the name of the column
    action: Array  # [R] int64
    reward: Array  # [R] float64
    probability: Array  # [R] float64
    mask: Array | None = None  # [R, A] bool

    @property
    def starts(self) -> Array:  # [E]
        """The first row of every episode."""
        starts: Array = np.cumsum(self.lengths + 1) - self.lengths - 1
        return starts

    @property
    def num_steps(self) -> int:
        """The steps of all episodes."""
        return int(self.lengths.sum())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        columns = [*self.observations.values(), *([] if self.mask is None else [self.mask])]
        return 24 + sum(array.nbytes // max(1, len(array)) for array in columns)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows in memory."""
        return self.row_bytes * len(self.action)

    def slice(self, begin: int, end: int) -> "EpisodeBlock":
        """Episodes [begin, end), as views."""
        rows = slice(int(self.starts[begin]), int(self.starts[end - 1] + self.lengths[end - 1] + 1))
        return EpisodeBlock(
            self.ids[begin:end],
            self.behaviours[begin:end],
            self.lengths[begin:end],
            self.terminated[begin:end],
            self.truncated[begin:end],
            {name: array[rows] for name, array in self.observations.items()},
            self.action[rows],
            self.reward[rows],
            self.probability[rows],
            None if self.mask is None else self.mask[rows],
        )

    def parts(self, max_bytes: int) -> Iterator["EpisodeBlock"]:
        """The episodes in turn, in blocks of at most `max_bytes` unless one episode is larger."""
        most = max(1, max_bytes // self.row_bytes)
        ends = np.cumsum(self.lengths + 1)
        begin = 0
        while begin < len(self.ids):
            before = ends[begin - 1] if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + most, side="right")))
            yield self if (begin, end) == (0, len(self.ids)) else self.slice(begin, end)
            begin = end

    def problem(self) -> str | None:
        """Why these episodes cannot be written; None if they can."""
        checks = {"a reward is not a finite number of float32": ~(np.abs(self.reward) <= MAX_REWARD)}
        known = ~np.isnan(self.probability)
        checks["a probability is not above 0 and at most 1"] = known & ~(
            (self.probability > 0) & (self.probability <= 1)
        )
        for text in checks:
            checks[text][self.starts + self.lengths] = False
        for name, array in self.observations.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                checks[f"{name} holds a number that is not finite"] = np.asarray(
                    (~np.isfinite(array)).reshape(len(array), -1).any(1)
                )
        for text, wrong in checks.items():
            if wrong.any():
                at = int(np.searchsorted(self.starts, int(wrong.argmax()), side="right")) - 1
                return f"episode {self.ids[at]!r}: {text}"
        return None

    def episodes(self, seed: int | None = None, env_id: str = "") -> Iterator[RecordedEpisode]:
        """The episodes one by one, as views."""
        for number, start in enumerate(self.starts.tolist()):
            end = start + int(self.lengths[number])
            probability = self.probability[start:end]
            yield RecordedEpisode(
                self.ids[number],
                {name: array[start : end + 1] for name, array in self.observations.items()},
                self.action[start:end],
                self.reward[start:end],
                bool(self.terminated[number]),
                bool(self.truncated[number]),
                None if np.isnan(probability).any() else probability,
                None if self.mask is None else self.mask[start : end + 1],
                seed,
                env_id,
                self.behaviours[number],
            )


def join_blocks(blocks: Sequence[EpisodeBlock]) -> EpisodeBlock:
    """The episodes of all blocks as one."""
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    return EpisodeBlock(
        [id for block in blocks for id in block.ids],
        [name for block in blocks for name in block.behaviours],
        np.concatenate([block.lengths for block in blocks]),
        np.concatenate([block.terminated for block in blocks]),
        np.concatenate([block.truncated for block in blocks]),
        {name: np.concatenate([block.observations[name] for block in blocks]) for name in first.observations},
        np.concatenate([block.action for block in blocks]),
        np.concatenate([block.reward for block in blocks]),
        np.concatenate([block.probability for block in blocks]),
        None if first.mask is None else np.concatenate([block.mask for block in blocks if block.mask is not None]),
    )


def rows_block(rows: StepRows, behaviour: str) -> EpisodeBlock:
    """Rows that were read, as episodes of one policy."""
    starts = np.array(rows.starts())
    ends = starts[1:] - 1
    return EpisodeBlock(
        ids=[rows.episode[at] for at in starts[:-1].tolist()],
        behaviours=[behaviour] * len(ends),
        lengths=np.diff(starts) - 1,
        terminated=rows.terminated[ends - 1],
        truncated=rows.truncated[ends - 1],
        observations=rows.observations,
        action=rows.action,
        reward=rows.reward,
        probability=rows.probability,
        mask=rows.mask,
    )


def block_table(block: EpisodeBlock, layout: Layout) -> Any:
    """The rows of a block as they are written."""
    pa = require_arrow()
    sizes = block.lengths + 1
    ends = block.starts + block.lengths
    num = len(block.action)
    none = np.zeros(num, np.bool_)
    none[ends] = True
    which = np.repeat(np.arange(len(block.ids)), sizes)
    columns = [
        pa.array(block.ids, pa.string()).take(pa.array(which)),
        pa.array((np.arange(num) - np.repeat(block.starts, sizes)).astype(np.int32)),
        pa.array(np.where(none, 0, block.action), mask=none),
        pa.array(np.where(none, 0.0, block.reward), mask=none),
        pa.array(_at_ends(block.terminated, ends, num), mask=none),
        pa.array(_at_ends(block.truncated, ends, num), mask=none),
        pa.array(block.probability, mask=none | np.isnan(block.probability)),
    ]
    columns += [_binary(block.observations[each.name], each.dtype, each.num_bytes) for each in layout.observations]
    if layout.masked:
        mask = np.ones((num, layout.num_actions), np.bool_) if block.mask is None else block.mask
        columns.append(_binary(mask, "bool", layout.num_actions))
    return pa.Table.from_arrays(columns, schema=layout.schema())


def _at_ends(flags: Array, ends: Array, num: int) -> Array:
    rows = np.zeros(num, np.bool_)
    rows[ends - 1] = flags
    return rows


def _binary(array: Array, dtype: str, num_bytes: int) -> Any:
    pa = require_arrow()
    data = np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<"))
    buffer = pa.py_buffer(data.reshape(-1).view(np.uint8))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(num_bytes), len(data), [None, buffer])


def block_statistics(block: EpisodeBlock, num_actions: int) -> Statistics:
    """The statistics of the episodes of a block; final observations count too."""
    steps = np.ones(len(block.action), np.bool_)
    steps[block.starts + block.lengths] = False
    reward = np.where(steps, block.reward, 0.0)
    counted = num_actions <= MAX_ACTIONS
    return Statistics(
        {name: moments_of(array) for name, array in block.observations.items()},
        moments_of(block.reward[steps]),
        moments_of(np.add.reduceat(reward, block.starts)),
        moments_of(block.lengths),
        np.bincount(block.action[steps], minlength=num_actions).tolist() if counted else [],
    )


def content_hashes(block: EpisodeBlock) -> list[str]:
    """`RecordedEpisode.content_hash` of every episode."""
    rows = {**{name: block.observations[name] for name in sorted(block.observations)}, "action": block.action}
    rows |= {"reward": block.reward, "probability": block.probability}
    rows |= {} if block.mask is None else {MASK: block.mask}
    columns = [
        (name, array, _memory(array), name in block.observations or name == MASK) for name, array in rows.items()
    ]
    unknown = np.isnan(block.probability)
    ends = zip(block.terminated.tolist(), block.truncated.tolist(), strict=True)
    found = []
    for start, length, (terminated, truncated) in zip(block.starts.tolist(), block.lengths.tolist(), ends, strict=True):
        digest = hashlib.sha256(f"{length} {terminated} {truncated}".encode())
        for name, array, memory, is_longer in columns:
            num = length + is_longer
            if name == "probability" and unknown[start : start + num].any():
                continue
            digest.update(f"\n{name} {array.dtype.str} {(num, *array.shape[1:])}\n".encode())
            digest.update(memory[start : start + num].data)
        found.append(digest.hexdigest())
    return found


def _memory(array: Array) -> Array:  # [R, bytes of a row]
    plain = np.ascontiguousarray(array)
    return plain.reshape(len(plain), -1).view(np.uint8)
