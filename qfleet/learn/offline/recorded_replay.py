"""A whole data set in memory, as a replay that nothing is added to: for drawing steps at random or by priority."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from qfleet.data import Rollout, Spec
from qfleet.datasets.format import DataFile, Dataset
from qfleet.errors import UsageError
from qfleet.learn.offline.shards import as_rollout
from qfleet.replay import Cut, NStepReturn, Replay, Sampler


def recorded_rollouts(dataset: Dataset, files: list[DataFile], spec: Spec) -> Iterator[Rollout]:
    """The rows of these files as rollouts of one lane, each with whole episodes; memories are blank."""
    recorded = replace(spec, state=())
    for file in files:
        for rows in dataset.rows(file):
            rollout = as_rollout(dataset, rows, recorded)
            if spec.state:
                rollout.state = np.zeros((*rollout.last.shape, *spec.state), np.float32)
            yield rollout


def load_recorded(
    dataset: Dataset,
    files: list[DataFile],
    spec: Spec,
    rng: np.random.Generator,
    make_sampler: Callable[[int], Sampler],
    *,
    cut: Cut,
    n_step: NStepReturn,
    compress: bool = False,
) -> Replay:
    """All rows of these files in a replay of one lane; `make_sampler` gets the most items that it can hold."""
    num_rows = sum(file.rows for file in files)
    sampler = make_sampler(cut.items_in(num_rows))
    replay = Replay(spec, 1, num_rows, sampler, rng, cut=cut, n_step=n_step, compress=compress)
    for rollout in recorded_rollouts(dataset, files, spec):
        replay.add(rollout)
    if not len(replay):
        raise UsageError(
            f"{dataset.place.url} is too short to learn from",
            f"Its {num_rows:,} rows are fewer than one sequence and the n-step return at its end.",
            "Shorten algo.view.burn_in and algo.view.length, or use a larger data set.",
        )
    return replay
