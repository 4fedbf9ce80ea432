"""Batches of recorded steps and of a run's own (RLPD, Ball et al. 2023). Shapes: N items.

A batch's recorded items have negative ids: item s of the recorded replay is -1 - s.
"""

from dataclasses import dataclass

import numpy as np

from qfleet.data import Array, Batch, Sequences, State
from qfleet.data.state_reader import restore_generator, saved_value
from qfleet.learn.batch_split import join_batches
from qfleet.replay import NStepReturn, Prioritized, Replay


@dataclass(eq=False)
class RecordedShare:
    """Draws a share of every batch from a replay of recorded steps, to which nothing is added."""

    replay: Replay
    share: float

    def num_recorded(self, size: int) -> int:
        """How many of a batch's items are recorded: at least one of each kind."""
        return min(max(1, round(self.share * size)), size - 1)

    def sample(self, own: Replay, size: int, num_batches: int = 1) -> Batch | Sequences | None:
        """`num_batches` batches of `size` items each, as one; None while the run has no steps of its own."""
        recorded = self.num_recorded(size) * num_batches
        mine = own.sample(size * num_batches - recorded)
        if mine is None:
            return None
        theirs = self.replay.sample(recorded)
        if theirs is None:
            raise ValueError("there are no recorded steps")
        both = join_batches([theirs, mine])
        both.ids[:recorded] = -1 - theirs.ids
        weigh_alike(both.weight, recorded, self.replay, own)
        return both

    def update(self, ids: Array, priority: Array) -> None:
        """Set priorities of recorded items, whose ids are negative."""
        self.replay.update(-1 - ids, priority)

    def use_n_step(self, n_step: NStepReturn) -> None:
        """Sum rewards as the run's own replay does."""
        self.replay.n_step = n_step

    def state_dict(self) -> State:
        """Priorities and generator; the rows are those of the data set."""
        return {"sampler": self.replay.sampler.state_dict(), "rng": self.replay.rng.bit_generator.state}

    def load_state_dict(self, state: State) -> None:
        """Restore them."""
        self.replay.sampler.load_state_dict(saved_value(state, "sampler"))
        restore_generator(self.replay.rng, saved_value(state, "rng"))


def weigh_alike(weight: Array, recorded: int, theirs: Replay, own: Replay) -> None:
    """Put importance weights on one scale: each replay divided its own by the largest of its draw."""
    if not isinstance(theirs.sampler, Prioritized):
        return
    tops = np.array([theirs.totals().top, own.totals().top])
    largest = tops.max()
    weight[:recorded] *= np.float32(tops[0] / largest)
    weight[recorded:] *= np.float32(tops[1] / largest)
