"""Evaluation without a world: the TD errors of the policy's own network on recorded episodes of another split."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from qfleet.act import Policy
from qfleet.build.components import Components
from qfleet.build.offline.plan_dataset import open_plan_dataset
from qfleet.data import Array, Batch, Sequences
from qfleet.datasets.format import Dataset, Split
from qfleet.learn import Learner
from qfleet.learn.offline.dataset_source import recorded_spec
from qfleet.learn.offline.open_shards import open_shards
from qfleet.learn.offline.shard_cache import ShardCache
from qfleet.learn.offline.shards import DataShard
from qfleet.learn.offline.windows import cut_windows, episode_windows
from qfleet.plan.schema import DatasetReplay
from qfleet.plan.traits import clones
from qfleet.qlearn import SequenceView, Tensors, View
from qfleet.replay import SequenceCut, make_cut, make_n_step
from qfleet.training.log.run_status import Row
from qfleet.watch.statistics import summarize

ITEMS_PER_CALL = 1_024
TD_ERROR = "td_error"
CROSS_ENTROPY = "cross_entropy"  # of a cloned policy and the recorded actions


@dataclass(eq=False)
class HeldOutEvaluator:
    """Scores are minus the mean absolute TD error of an episode, with the network itself as the target network.

    For a head that describes a distribution the error is its loss, for a cloned policy its cross-entropy. A small error
    says that values are consistent with the data, not that the policy is good.
    """

    components: Components
    dataset: Dataset = field(init=False)
    caches: dict[Split, ShardCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dataset = open_plan_dataset(self.components.plan)

    def validate(self, policy: Policy, stop: Callable[[], bool] = lambda: False) -> Row | None:
        """The errors on the same validation episodes each time; None if `stop` interrupted it."""
        return self.evaluate("validation", policy, self.components.plan.eval.episodes, stop)

    def test(self, policy: Policy, episodes: int | None = None, stop: Callable[[], bool] = lambda: False) -> Row | None:
        """The errors on test episodes; None if `stop` interrupted it."""
        return self.evaluate("test", policy, episodes or self.components.plan.eval.test_episodes, stop)

    def close(self) -> None:
        """Release the shards."""
        self.caches.clear()

    def evaluate(self, split: Split, policy: Policy, episodes: int, stop: Callable[[], bool]) -> Row | None:
        """The row of an evaluation on the first episodes of a split."""
        scores: list[float] = []
        lengths: list[int] = []
        cache = self.cache(split)
        for number in range(len(cache.files)):
            shard = cache.shard(number)
            for items in episode_items(shard)[: episodes - len(scores)]:
                if stop():
                    return None
                scores.append(-self.mean_error(policy, shard, items))
                lengths.append(len(items))
        measure = CROSS_ENTROPY if clones(self.components.plan) else TD_ERROR
        row = {"split": split, "on": "data", "measure": measure, "epsilon": 0.0, "cut_episodes": 0}
        found = summarize(scores)
        return {**row, measure: -found["mean"], "length_mean": float(np.mean(lengths)), **found}

    def cache(self, split: Split) -> ShardCache:
        """The shards of a split."""
        settings = self.components.plan.replay
        if not isinstance(settings, DatasetReplay):
            raise TypeError("this plan learns from no data set")
        if split not in self.caches:
            files = self.dataset.require_files(split)
            self.caches[split] = open_shards(self.dataset, files, recorded_spec(self.components.spec), settings)
        return self.caches[split]

    def mean_error(self, policy: Policy, shard: DataShard, items: Array) -> float:
        """The mean absolute TD error of an episode."""
        cut = make_cut(self.components.plan.algo)
        if isinstance(cut, SequenceCut):
            return self.mean_error_of_windows(policy, cut, shard, items)
        n_step = make_n_step(self.components.plan)
        total = 0.0
        for begin in range(0, len(items), ITEMS_PER_CALL):
            part = items[begin : begin + ITEMS_PER_CALL]
            batch = cut.cut(shard.store, part, n_step, np.ones(len(part), np.float32), part)
            total += float(self.errors(policy, batch).sum())
        return total / len(items)

    def mean_error_of_windows(self, policy: Policy, cut: SequenceCut, shard: DataShard, items: Array) -> float:
        """The same by windows in which every step is once; the mean error of a window is what `eta` = 0 leaves."""
        windows = episode_windows(items[:1], np.array([len(items)]), cut.length, cut.length)
        view = SequenceView(cut.burn_in, cut.length, eta=0.0)
        n_step = make_n_step(self.components.plan)
        [state_size] = self.components.spec.state
        total = 0.0
        per_call = max(1, ITEMS_PER_CALL // cut.rows)
        for begin in range(0, len(windows), per_call):
            part = slice(begin, begin + per_call)
            places = (windows.first[part], windows.begin[part], windows.end[part])
            batch = cut_windows(cut, shard, places, n_step, places[1], state_size)
            errors = self.errors(policy, batch, view).numpy()
            total += float((errors * windows.num_steps[part]).sum())
        return total / len(items)

    def errors(self, policy: Policy, batch: Batch | Sequences, view: View | None = None) -> torch.Tensor:  # [N]
        """The absolute TD error of every item, or the loss of a distribution."""
        learner = self.components.learner
        if not isinstance(learner, Learner):
            raise TypeError("a population does not learn from a data set")
        fields: dict[str, Any] = {}
        for name in type(batch).__slots__:
            array = getattr(batch, name)
            if name != "ids":
                fields[name] = None if array is None else torch.from_numpy(array).to(learner.device)
        fields["reward"] = learner.normalize_reward(fields["reward"])
        net = policy.net
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            own = learner.gradients
            _, error, _ = own.compute_loss(own.head, own.rule, view or own.view, net, net, Tensors(**fields))
        return error.cpu()


def episode_items(shard: DataShard) -> list[Array]:
    """The items of every episode of a shard."""
    ends = np.flatnonzero(np.diff(shard.items) > 1) + 1
    return np.split(shard.items, ends)
