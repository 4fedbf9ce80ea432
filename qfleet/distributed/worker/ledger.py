"""The ledger: which rollouts came in, each exactly once (promises I3). A state machine: no clock, no IO.

A rollout's source is (worker, incarnation, sequence); sequences count from 0 in every incarnation. A sender is answered
with the verdict and `expected(worker)`: after "accept" and "duplicate" it may forget the rollout, after "refuse" of its
own incarnation it sends again from what is expected, and after "refuse" of an older one it leaves.
"""

from typing import Literal, TypeAlias

import numpy as np

from qfleet.data import State
from qfleet.data.state_reader import FLAGS, saved_array, saved_numbers

Source: TypeAlias = tuple[int, int, int]  # worker, incarnation, sequence
Verdict: TypeAlias = Literal["accept", "duplicate", "refuse"]
NOBODY = -1  # the incarnation of a worker that never began
_LARGEST = 2**53


class Ledger:
    """Accepts each rollout of a worker's newest incarnation once and in order."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.incarnations = [NOBODY] * workers  # the newest of each worker
        self.sequences = [0] * workers  # the next one expected from it
        self.dismissed = [False] * workers  # is it gone, and nobody in its place yet?
        self.rollouts = [0] * workers  # accepted from all incarnations
        self.steps = [0] * workers

    @property
    def total_steps(self) -> int:
        """Accepted steps of all workers."""
        return sum(self.steps)

    def begin(self, worker: int, incarnation: int) -> None:
        """From now on only this incarnation of the worker is listened to; to begin it again changes nothing."""
        newest = self.incarnations[worker]
        if incarnation < newest:
            raise ValueError(f"worker {worker}: incarnation {incarnation} is older than {newest}")
        if incarnation > newest:
            self.incarnations[worker] = incarnation
            self.sequences[worker] = 0
            self.dismissed[worker] = False

    def dismiss(self, worker: int) -> None:
        """The worker failed: nothing is accepted from it until its next incarnation begins."""
        self.dismissed[worker] = True

    def expected(self, worker: int) -> int:
        """The sequence that the worker's newest incarnation must send next."""
        return self.sequences[worker]

    def is_current(self, worker: int, incarnation: int) -> bool:
        """Is this the incarnation that is listened to?"""
        known = 0 <= worker < self.workers and not self.dismissed[worker]
        return known and 0 <= incarnation == self.incarnations[worker]

    def judge(self, source: Source, steps: int = 0) -> Verdict:
        """May this rollout of so many steps enter? "accept" counts it: ask once, and then take it in."""
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
        """The counts; with them a restart does not open the window again."""
        return {
            "incarnations": np.array(self.incarnations, np.int64),
            "sequences": np.array(self.sequences, np.int64),
            "dismissed": np.array(self.dismissed, np.bool_),
            "rollouts": np.array(self.rollouts, np.int64),
            "steps": np.array(self.steps, np.int64),
        }

    def load_state_dict(self, state: State) -> None:
        """Take the counts back. Senders that went on since then are behind a gap: begin them anew."""
        shape = (self.workers,)
        incarnations = saved_numbers(state, "incarnations", shape, NOBODY, _LARGEST)
        counts = [saved_numbers(state, name, shape, 0, _LARGEST) for name in ("sequences", "rollouts", "steps")]
        dismissed = saved_array(state, "dismissed", FLAGS, shape)
        if (counts[0] > counts[1]).any():
            raise ValueError("sequences: more than the rollouts that were accepted")
        self.incarnations = incarnations.tolist()
        self.dismissed = dismissed.tolist()
        self.sequences, self.rollouts, self.steps = (count.tolist() for count in counts)
