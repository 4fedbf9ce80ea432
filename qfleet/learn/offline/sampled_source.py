"""Batches drawn from a whole data set in memory, at random or by priority. Shapes: N items.

Nothing acts. `steps` of the run are the recorded steps that were learned from, each as often as it was drawn.
"""

from dataclasses import dataclass

import numpy as np

from qfleet.data import Array, Batch, Rollout, Sequences, State
from qfleet.data.state_reader import saved_count, saved_value
from qfleet.datasets.format import open_dataset
from qfleet.learn.batch_source import StepRecorder
from qfleet.learn.offline.recorded_replay import load_recorded
from qfleet.plan.schema import DatasetReplay, Plan, PrioritizedOrder
from qfleet.replay import Prioritized, Replay, Sampler, SequenceCut, Uniform, make_n_step


@dataclass(eq=False)
class SampledSource:
    """Draws batches from a replay that holds the data set."""

    replay: Replay  # stays empty, for a checkpoint holds no rows; its generator draws
    recorded: Replay
    num_steps: int  # of the data set
    batch_size: int
    steps: int = 0
    recorder: StepRecorder | None = None  # never: nothing acts

    def insert(self, rollout: Rollout) -> None:
        """Nothing acts, so nothing is inserted."""
        raise TypeError("a data set does not grow while it is learned from")

    def seal(self, worker: int) -> int:
        """There are no actors that could be lost."""
        return 0

    def next_batch(self, in_flight_steps: int) -> Batch | Sequences | None:
        """Draw a batch."""
        self.recorded.reseed(self.replay.rng)  # a run that goes back to a checkpoint replaces it
        batch = self.recorded.sample(self.batch_size)
        if batch is not None:
            self.steps += self.count_steps(batch)
        return batch

    def count_steps(self, batch: Batch | Sequences) -> int:
        """The steps that a batch learns from."""
        cut = self.recorded.cut
        if isinstance(batch, Sequences) and isinstance(cut, SequenceCut):
            return int(np.count_nonzero(~batch.last[cut.burn_in : cut.burn_in + cut.length]))
        return len(batch.ids)

    def after_update(self, batch: Batch | Sequences, priority: Array) -> None:
        """Set the priorities of the batch's items."""
        self.set_priorities(batch.ids, priority)

    def set_priorities(self, ids: Array, priority: Array) -> None:
        """Set priorities; those of a lost learner's part are NaN, and stay."""
        known = ~np.isnan(priority)
        self.recorded.update(ids[known], priority[known])

    def take_metrics(self) -> dict[str, float | None]:
        """How often the data set could have been passed through by now."""
        return {"epoch": self.steps / self.num_steps}

    def take_warnings(self) -> list[str]:
        """There are none after the data set was read."""
        return []

    def close(self) -> None:
        """Release the data set."""
        self.recorded.close()
        self.replay.close()

    def state_dict(self) -> State:
        """Counters, generator and priorities; the rows are those of the data set."""
        counts = {"steps": self.steps, "batch_size": self.batch_size}
        return {**counts, "replay": self.replay.state_dict(), "sampler": self.recorded.sampler.state_dict()}

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Restore it."""
        self.steps = saved_count(state, "steps")
        self.batch_size = saved_count(state, "batch_size", low=1)
        self.replay.load_state_dict(saved_value(state, "replay"))
        self.recorded.sampler.load_state_dict(saved_value(state, "sampler"))


def make_sampled_source(plan: Plan, replay: Replay) -> SampledSource:
    """The source of a plan that draws from a data set; all of it is read now."""
    settings = plan.replay
    if not isinstance(settings, DatasetReplay):
        raise TypeError("this plan learns from no data set")
    dataset = open_dataset(settings.path, settings.version)
    files = dataset.require_files(settings.split)

    def make_sampler(items: int) -> Sampler:
        order = settings.order
        if not isinstance(order, PrioritizedOrder):
            return Uniform()
        names = ("alpha", "beta_start", "beta_end", "beta_updates", "eps")
        return Prioritized(items, **{name: getattr(order, name) for name in names})

    recorded = load_recorded(
        dataset, files, replay.spec, replay.rng, make_sampler, cut=replay.cut, n_step=make_n_step(plan)
    )
    return SampledSource(replay, recorded, sum(file.steps for file in files), plan.algo.batch_size)
