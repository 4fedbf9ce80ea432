"""Normalisation by the statistics of the data set that is learned from: known before the first step, and never changed.

They are saved with the weights, and other learners get them with rank 0's state.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from qfleet.build.components import Components
from qfleet.build.offline.plan_dataset import open_plan_dataset
from qfleet.data import Array, Spec
from qfleet.datasets.format import DataFile, Dataset, Moments, merge_moments, moments_of, spec_columns
from qfleet.learn import Learner
from qfleet.learn.offline.shards import policy_observations
from qfleet.nets.normalize import Normalize
from qfleet.plan.schema import DatasetReplay, Plan
from qfleet.plan.traits import learns_from_data


def use_data_statistics(components: Components) -> None:
    """If the plan learns from a data set and normalises, set the means and deviations of its split."""
    plan = components.plan
    learner = components.learner
    if not learns_from_data(plan) or plan.env.normalize == "off" or not isinstance(learner, Learner):
        return
    dataset = open_plan_dataset(plan)
    files = dataset.require_files(plan.replay.split if isinstance(plan.replay, DatasetReplay) else "all")
    net = learner.net
    if net.normalize is not None:
        use_moments(net.normalize, observation_moments(dataset, files, components.spec), components.spec.obs)
    if net.rewards is not None:
        use_moments(net.rewards, return_moments(plan, dataset, files), ())


def use_moments(normalize: Normalize, moments: Moments, shape: tuple[int, ...]) -> None:
    """Set mean and variance; those of a frame are those of every frame of a stack, one number is that of all."""
    count = max(1, min(moments.count))
    mean = np.array(moments.mean, np.float64)
    var = np.array(moments.m2, np.float64) / count
    numbers = {"mean": mean, "var": var}
    for name, values in numbers.items():
        buffer = getattr(normalize, name)
        buffer.copy_(buffer.new_tensor(values.reshape(shape) if values.size > 1 else values.reshape(())))
    normalize.count.fill_(count)


def observation_moments(dataset: Dataset, files: list[DataFile], spec: Spec) -> Moments:
    """Moments of each element of what policies see; read from all files if the data set has another form."""
    recorded = dataset.manifest.observations
    if recorded == spec_columns(spec):
        splits = sorted({str(file.split) for file in files})
        return merged(dataset.statistics[split].observations[recorded[0].name] for split in splits)
    return merged(moments_of(policy_observations(dataset, rows, spec)) for file in files for rows in dataset.rows(file))


def return_moments(plan: Plan, dataset: Dataset, files: list[DataFile]) -> Moments:
    """Moments of the discounted return so far at every step, by whose deviation rewards are divided, as online."""
    return merged(
        moments_of(returns_so_far(plan, episode.reward)) for file in files for episode in dataset.episodes(file)
    )


def returns_so_far(plan: Plan, reward: Array) -> Array:  # [T] -> [T]
    """G_t = gamma G_{t-1} + r_t, with rewards as the plan learns from them."""
    rewards = np.clip(reward, -1.0, 1.0) if plan.env.clip_reward else reward
    return np.fromiter(accumulate_discounted(rewards.tolist(), plan.algo.discount), np.float64, len(rewards))


def accumulate_discounted(rewards: Iterable[float], discount: float) -> Iterator[float]:
    """The discounted sum so far after every reward."""
    total = 0.0
    for reward in rewards:
        total = discount * total + reward
        yield total


def merged(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts together, from the first to the last."""
    whole: Moments | None = None
    for part in parts:
        whole = part if whole is None else merge_moments(whole, part)
    if whole is None:
        raise ValueError("there are no values")
    return whole
