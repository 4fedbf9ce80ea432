"""The ledger: admits each rollout exactly once (promise I3). A state machine: no clock, no IO.

A rollout's source is (worker, incarnation, sequence); sequences count from 0 in every incarnation. A sender that gets
the verdict drops the rollout after "accept" and "duplicate"; after "refuse" it sends again, or ends if its incarnation
is not the current one.
"""

from typing import Literal, TypeAlias

import numpy as np

from qfleet.data import State
from qfleet.data.state_reader import FLAGS, saved_array, saved_numbers

Source: TypeAlias = tuple[int, int, int]  # worker, incarnation, sequence
Verdict: TypeAlias = Literal["accept", "duplicate", "refuse"]
NOT_STARTED = -1  # the incarnation of a worker that was never started
_LARGEST = 2**53


class Ledger:
    """Accepts each rollout of a worker's newest incarnation once and in order."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.incarnations = [NOT_STARTED] * workers  # the newest of each worker
        self.sequences = [0] * workers  # expected next
        self.rollouts = [0] * workers  # accepted, over all incarnations
        self.steps = [0] * workers

    def begin(self, worker: int, incarnation: int) -> None:
        """Accept only this incarnation of the worker from now on; repeating the call changes nothing."""
        newest = self.incarnations[worker]
        if incarnation < newest:
            raise ValueError(f"worker {worker}: incarnation {incarnation} is older than {newest}")
        if incarnation > newest:
            self.incarnations[worker] = incarnation
            self.sequences[worker] = 0

    def is_current(self, worker: int, incarnation: int) -> bool:
        """Is this the incarnation whose rollouts are accepted?"""
        return 0 <= worker < self.workers and 0 <= incarnation == self.incarnations[worker]

    def admit(self, source: Source, steps: int = 0) -> Verdict:
        """Decide whether a rollout is inserted; "accept" counts it and its steps."""
        worker, incarnation, sequence = source
        if not self.is_current(worker, incarnation) or not 0 <= sequence <= self.sequences[worker]:
            return "refuse"
        if sequence < self.sequences[worker]:
            return "duplicate"
        self.sequences[worker] += 1
        self.rollouts[worker] += 1
        self.steps[worker] += steps
        return "accept"

    def state_dict(self) -> State:
        """The counts; with them a restart accepts no rollout a second time."""
        return {
            "incarnations": np.array(self.incarnations, np.int64),
            "sequences": np.array(self.sequences, np.int64),
            "dismissed": np.zeros(self.workers, np.bool_),  # no longer used; older versions read it
            "rollouts": np.array(self.rollouts, np.int64),
            "steps": np.array(self.steps, np.int64),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the counts. Workers that ran since then are behind a gap: start new incarnations."""
        shape = (self.workers,)
        incarnations = saved_numbers(state, "incarnations", shape, NOT_STARTED, _LARGEST)
        counts = [saved_numbers(state, name, shape, 0, _LARGEST) for name in ("sequences", "rollouts", "steps")]
        saved_array(state, "dismissed", FLAGS, shape)
        if (counts[0] > counts[1]).any():
            raise ValueError("sequences: more than the rollouts that were accepted")
        self.incarnations = incarnations.tolist()
        self.sequences, self.rollouts, self.steps = (count.tolist() for count in counts)
