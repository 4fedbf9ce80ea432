"""Recording what an actor does as episodes of a data set. Shapes: T rows of time, B lanes, A actions."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from qfleet.data import Array, Rollout, Spec, State
from qfleet.data.state_reader import saved_array, saved_numbers, saved_tree, saved_value
from qfleet.datasets.format import EpisodeBlock, join_blocks
from qfleet.datasets.format.columns import WHOLE

CHUNK_BYTES = 4 << 20  # that are cut into episodes at once
CHUNK_ROWS = 256
Rows = dict[str, Array]  # columns of rows, one after the other


def recorded_columns(spec: Spec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and the shape of every column of a row. `cut`: the recording stopped at this final observation."""
    columns: dict[str, tuple[str, tuple[int, ...]]] = {
        WHOLE: (spec.dtype, spec.obs),
        "action": ("int64", ()),
        "reward": ("float64", ()),
        "probability": ("float64", ()),
        "terminated": ("bool", ()),
        "last": ("bool", ()),
        "cut": ("bool", ()),
        "policy": ("uint8", ()),
    }
    return columns | ({"mask": ("bool", (spec.num_actions,))} if spec.masked else {})


def row_bytes(spec: Spec) -> int:
    """Bytes of a row in memory."""
    return sum(np.dtype(kind).itemsize * int(np.prod(shape)) for kind, shape in recorded_columns(spec).values())


@dataclass(eq=False)
class RolloutRecorder:
    """Makes whole episodes of the rows of one actor; the rows of episodes that have not ended wait.

    Rows are gathered until a chunk is full; then they are cut at their final observations, all lanes at once.
    """

    spec: Spec
    num_lanes: int
    prefix: str  # of the ids
    policies: list[str]  # their names
    first_lane: int = 0  # of this actor, among the lanes of all
    total_lanes: int = 1  # of all actors
    num_episodes: int | None = None  # evenly from all lanes: the first to end would be the short ones
    filled: int = 0  # rows of the chunk
    chunk: Rows = field(init=False)  # [rows, B, ...]
    begun: list[list[Rows]] = field(init=False)  # by lane: the pieces of its unfinished episode
    numbers: Array = field(init=False)  # [B], of each lane's next episode
    skipping: Array = field(init=False)  # [B], lanes whose episode began before the recording
    playing: Array = field(init=False)  # [B], the policy of each lane

    def __post_init__(self) -> None:
        rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // (self.num_lanes * row_bytes(self.spec))))
        columns = recorded_columns(self.spec)
        self.chunk = {name: np.empty((rows, self.num_lanes, *shape), kind) for name, (kind, shape) in columns.items()}
        self.playing = np.zeros(self.num_lanes, np.uint8)
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.filled = 0
        self.begun = [[] for _ in range(self.num_lanes)]
        self.numbers = np.zeros(self.num_lanes, np.int64)
        self.skipping = np.zeros(self.num_lanes, np.bool_)

    def skip_begun(self) -> None:
        """Leave out the present episode of every lane, whose beginning was not recorded."""
        self.restart()
        self.skipping[:] = True

    def add(self, rollout: Rollout, cut: Array | None = None) -> Iterator[EpisodeBlock]:
        """Add rows; yields the episodes of chunks that are full. `cut` [T, B]: the recording stops at these rows."""
        begin = 0
        size = len(self.chunk["last"])
        while begin < len(rollout.last):
            end = min(len(rollout.last), begin + size - self.filled)
            self._copy(rollout, cut, begin, end)
            begin = end
            if self.filled == size and (block := self.cut()) is not None:
                yield block

    def _copy(self, rollout: Rollout, cut: Array | None, begin: int, end: int) -> None:
        there = slice(self.filled, self.filled + end - begin)
        self.filled = there.stop
        chunk = self.chunk
        chunk[WHOLE][there] = rollout.obs[begin:end]
        chunk["action"][there] = rollout.action[begin:end]
        chunk["reward"][there] = rollout.reward[begin:end]
        chunk["last"][there] = rollout.last[begin:end]
        chunk["cut"][there] = False if cut is None else cut[begin:end]
        chunk["policy"][there] = self.playing
        np.equal(rollout.discount[begin:end], 0, out=chunk["terminated"][there])
        chunk["probability"][there] = np.nan if rollout.probability is None else rollout.probability[begin:end]
        if rollout.mask is not None:
            chunk["mask"][there] = rollout.mask[begin:end]

    def cut(self) -> EpisodeBlock | None:
        """The episodes that ended in the chunk, by lanes; the chunk is empty then."""
        filled = self.filled
        if not filled:
            return None
        self.filled = 0
        last = self.chunk["last"][:filled]
        ends = np.where(last.any(0), filled - np.argmax(last[::-1], 0), 0)  # [B], rows up to the last end
        pieces: list[Rows] = []
        lanes: list[int] = []
        for lane in range(self.num_lanes):
            if end := int(ends[lane]):
                whole = [*self.begun[lane], self._rows(lane, 0, end)]
                self.begun[lane] = []
                pieces += whole
                lanes += [lane] * len(whole)
            if end < filled:
                self.begun[lane].append({name: rows.copy() for name, rows in self._rows(lane, end, filled).items()})
        return self._block(pieces, lanes) if pieces else None

    def _rows(self, lane: int, begin: int, end: int) -> Rows:
        return {name: column[begin:end, lane] for name, column in self.chunk.items()}

    def end_all(self) -> EpisodeBlock | None:
        """Cut the unfinished episodes off at their newest observation: neither end is true."""
        finished = [] if (block := self.cut()) is None else [block]
        lanes = [lane for lane in range(self.num_lanes) for _ in self.begun[lane]]
        pieces = [piece for lane in self.begun for piece in lane]
        for lane in range(self.num_lanes):
            if self.begun[lane]:
                self.begun[lane][-1]["last"][-1] = True
                self.begun[lane][-1]["cut"][-1] = True
        self.begun = [[] for _ in range(self.num_lanes)]
        if pieces and (block := self._block(pieces, lanes)) is not None:
            finished.append(block)
        return join_blocks(finished) if finished else None

    def _block(self, pieces: list[Rows], lanes: list[int]) -> EpisodeBlock | None:
        """The episodes of these pieces, which are ordered by lanes and end with a final observation."""
        rows = {name: np.concatenate([piece[name] for piece in pieces]) for name in self.chunk}
        ends = np.flatnonzero(rows["last"])
        sizes = np.diff(ends, prepend=-1)
        lane = np.repeat(np.array(lanes), [len(piece["last"]) for piece in pieces])[ends]
        wanted, numbers = self._number(lane, sizes)
        if not wanted.any():
            return None
        if not wanted.all():
            kept = np.repeat(wanted, sizes)
            rows = {name: column[kept] for name, column in rows.items()}
            sizes = sizes[wanted]
            lane = lane[wanted]
        ends = np.cumsum(sizes) - 1
        cut = rows["cut"][ends]
        terminated = rows["terminated"][ends - 1] & ~cut
        return EpisodeBlock(
            ids=[
                f"{self.prefix}-{at:04d}-{number:06d}"
                for at, number in zip(lane + self.first_lane, numbers, strict=True)
            ],
            behaviours=[self.policies[at] for at in rows["policy"][ends - sizes + 1].tolist()],
            lengths=sizes - 1,
            terminated=terminated,
            truncated=~terminated & ~cut,
            observations={WHOLE: rows[WHOLE]},
            action=rows["action"],
            reward=rows["reward"],
            probability=rows["probability"],
            mask=rows.get("mask"),
        )

    def _number(self, lane: Array, sizes: Array) -> tuple[Array, Array]:  # [E], [E]
        """Which of these episodes are wanted, and the numbers of those; each is counted in its lane."""
        first = np.flatnonzero(np.diff(lane, prepend=-1))  # of each lane
        counted = sizes > 1
        counted[first] &= ~self.skipping[lane[first]]
        self.skipping[lane[first]] = False
        before: Array = np.cumsum(counted) - counted
        rank: Array = before - np.repeat(before[first], np.diff(first, append=len(lane)))
        numbers = self.numbers[lane] + rank
        self.numbers += np.bincount(lane[counted], minlength=self.num_lanes)
        if self.num_episodes is not None:
            counted &= numbers * self.total_lanes + lane + self.first_lane < self.num_episodes
        return counted, numbers[counted]

    def state_dict(self) -> State:
        """Everything that was recorded and is in no block yet."""
        begun = [piece for lane in self.begun for piece in lane]
        empty = [{name: column[:0, 0] for name, column in self.chunk.items()}]
        return {
            "lengths": np.array([sum(len(piece["last"]) for piece in lane) for lane in self.begun]),
            "begun": {name: np.concatenate([piece[name] for piece in empty + begun]) for name in self.chunk},
            "chunk": {name: column[: self.filled].copy() for name, column in self.chunk.items()},
            "numbers": self.numbers.copy(),
            "skipping": self.skipping.copy(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        lanes = (self.num_lanes,)
        self.numbers = saved_numbers(state, "numbers", lanes, 0, 2**53).copy()
        self.skipping = saved_array(state, "skipping", "b", lanes).copy()
        lengths = saved_numbers(state, "lengths", lanes, 0, 2**40).tolist()
        chunk = saved_rows(state, "chunk", self.spec, (None, *lanes))
        self.filled = len(chunk["last"])
        if self.filled >= len(self.chunk["last"]):
            raise ValueError("chunk: it has too many rows")
        for name, column in chunk.items():
            self.chunk[name][: self.filled] = column
        begun = saved_rows(state, "begun", self.spec, (sum(lengths),))
        ends = np.cumsum(lengths).tolist()
        pieces = [
            {name: column[end - num : end].copy() for name, column in begun.items()}
            for num, end in zip(lengths, ends, strict=True)
        ]
        self.begun = [[piece] if len(piece["last"]) else [] for piece in pieces]


def saved_rows(state: State, name: str, spec: Spec, rows: tuple[int | None, ...]) -> Rows:
    """Columns of rows; ValueError if they are not those of this spec, or not equally many."""
    found = saved_tree(state, name)
    columns = recorded_columns(spec)
    if found.keys() != columns.keys():
        raise ValueError(f"{name}: its columns are {sorted(found)}")
    for column, (kind, shape) in columns.items():
        array = saved_value(found, column)
        if not isinstance(array, np.ndarray) or array.dtype != kind or array.ndim != len(rows) + len(shape):
            raise ValueError(f"{name}: {column} is not an array of {kind}")
        wanted = (*(rows[0] if rows[0] is not None else len(array),), *rows[1:], *shape)
        if array.shape != wanted or len(array) != len(found["last"]):
            raise ValueError(f"{name}: {column} has shape {array.shape}")
    return found
