"""Episode seeds, and the recorded actions that restore an episode when they are repeated. B lanes."""

from typing import Final

import numpy as np

from qfleet.data import Array, State
from qfleet.data.state_reader import INTEGERS, check_lanes, saved_array, saved_numbers

TRAIN: Final = 0
VALIDATION: Final = 1
TEST: Final = 2

_FIRST_CAPACITY = 256
_MAX_EPISODES = 2**53


def episode_seed(seed: int, stream: int, lane: int, episode: int) -> int:
    """A seed below 2**31 for one episode; two streams never share a seed, because the low two bits are the stream."""
    bits = int(np.random.SeedSequence((seed, stream, lane, episode)).generate_state(1)[0])
    return (bits >> 3) << 2 | stream


class EpisodeRecorder:
    """For each lane: the number of its episode, that episode's seed, and the actions since its reset."""

    def __init__(self, num: int, seed: int, stream: int) -> None:
        self._seed = seed
        self._stream = stream
        self.number = np.full(num, -1, np.int64)  # [B]
        self.seed = np.zeros(num, np.int64)  # [B]
        self.length = np.zeros(num, np.int64)  # [B]
        self._actions = np.zeros((num, _FIRST_CAPACITY), np.int32)

    def rewind(self) -> None:
        """Start over: the next episode of every lane is its first."""
        self.number[:] = -1

    def begin(self, lanes: Array) -> Array:
        """Start the next episode in these lanes (bool [B]); their seeds, sorted by lane."""
        rows = np.flatnonzero(lanes)
        self.number[rows] += 1
        self.seed[rows] = [episode_seed(self._seed, self._stream, int(r), int(self.number[r])) for r in rows]
        self.length[rows] = 0
        return self.seed[rows]

    def record(self, action: Array, lanes: Array) -> None:
        """Record the actions [B] of these lanes (bool [B])."""
        rows = np.flatnonzero(lanes)
        columns = self.length[rows]
        if columns.size and columns.max() == self._actions.shape[1]:
            self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)], axis=1)
        self._actions[rows, columns] = action[rows]
        self.length[rows] = columns + 1

    def actions(self, lane: int) -> Array:
        """The actions of one lane since its reset."""
        return self._actions[lane, : self.length[lane]]

    def state_dict(self) -> State:
        """Episode numbers, seeds and all actions, concatenated by lane."""
        actions = [self.actions(lane) for lane in range(len(self.length))]
        return {
            "number": self.number.copy(),
            "seed": self.seed.copy(),
            "length": self.length.copy(),
            "actions": np.concatenate(actions),
        }

    def load_state_dict(self, state: State, num_actions: int) -> None:
        """Restore the record of a world with the same number of lanes; an invalid record changes nothing."""
        check_lanes(len(saved_array(state, "length", INTEGERS, (None,))), len(self.length))
        shape = self.length.shape
        actions = saved_numbers(state, "actions", (None,), 0, num_actions - 1)
        length = saved_numbers(state, "length", shape, 0, actions.size).astype(np.int64)
        if int(length.sum()) != actions.size:
            raise ValueError(f"length: {int(length.sum())} actions in all, but {actions.size} are recorded")
        number = saved_numbers(state, "number", shape, 0, _MAX_EPISODES)
        seed = saved_numbers(state, "seed", shape, 0, 2**31 - 1)
        self.number[:] = number
        self.seed[:] = seed
        self.length[:] = length
        capacity = max(_FIRST_CAPACITY, int(length.max(initial=0)))
        self._actions = np.zeros((len(length), capacity), np.int32)
        for lane, end in enumerate(np.cumsum(length)):
            self._actions[lane, : length[lane]] = actions[end - length[lane] : end]
