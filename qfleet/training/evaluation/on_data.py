"""What recorded episodes say about a policy: errors, agreement, calibration and off-policy estimates.

The environment is not needed. In memory: one decoded data file, the episodes (`max_bytes`), and once more the
observations of those that are fitted on. Of the others only the first observation is kept. Shapes: T steps, A actions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qfleet.act import Policy
from qfleet.build.custom_parts import CustomParts
from qfleet.build.resolve import usable_device
from qfleet.data import Array, Spec
from qfleet.datasets.estimates import (
    FittedQSettings,
    ValuedEpisode,
    agreement,
    calibration,
    epsilon_greedy_probabilities,
    fitted_q_estimate,
    importance_estimate,
    is_fitted,
    ratio_estimate,
    td_errors,
)
from qfleet.datasets.format import DataFile, Dataset, Split
from qfleet.errors import UsageError
from qfleet.learn.offline.shards import DataShard, load_shard
from qfleet.plan import read_plan
from qfleet.plan.schema import Plan
from qfleet.replay import NStepReturn, StepCut
from qfleet.training.checkpoints.saved_policy import restore_policy
from qfleet.training.evaluation.held_out import ITEMS_PER_CALL, episode_items


@dataclass(frozen=True, slots=True)
class OnDataSettings:
    """On which episodes a policy is evaluated, and as what: epsilon-greedy, for a greedy one has weights of 0 only."""

    split: Split = "test"
    epsilon: float = 0.1
    seed: int = 0
    episodes: int = 1_000  # at most
    fit_updates: int = 4_000  # of a fitted Q evaluation
    fit_seeds: int = 3
    max_bytes: int = 1 << 30  # of episodes in memory: no more are read when they have as many


SHOW_EVERY_EPISODES = 100
Show = Callable[[str], object]


def say_nothing(text: str) -> None:
    """Show no progress."""


def evaluate_on_data(
    plan: Plan, policy: Policy, dataset: Dataset, settings: OnDataSettings, show: Show = say_nothing
) -> dict[str, Any]:
    """Every number with its interval over episodes, or with the reason why it is refused; `show` gets the progress."""
    spec = require_policy(plan, policy, dataset)
    gamma = plan.algo.discount
    episodes = read_episodes(valued_episodes(policy, spec, dataset, settings), settings, show)
    scale = 1.0 if policy.net.rewards is None else policy.net.rewards.scale()
    learned = [learned_from(plan, each, scale) for each in episodes]
    returns = np.array([each.returns(gamma)[0] for each in episodes])
    fit = FittedQSettings(gamma, settings.fit_seeds, settings.fit_updates, seed=settings.seed)
    found = {**td_errors(learned, gamma, settings.seed), **agreement(episodes, settings.seed)}
    estimates = {
        "recorded_return": ratio_estimate(returns, np.ones(len(returns)), settings.seed),
        "fitted_q": fitted_q_estimate(episodes, fit, show),
        "weighted_importance": importance_estimate(episodes, gamma, settings.seed),
    }
    return {
        "version": dataset.version,
        "split": settings.split,
        "episodes": len(episodes),
        "memory_full": memory_full(episodes, settings),
        "steps": sum(each.num_steps for each in episodes),
        "discount": gamma,
        "epsilon": settings.epsilon,
        "seed": settings.seed,
        "fit": {"updates": fit.updates, "seeds": fit.num_seeds},
        "numbers": {name: each.row() for name, each in (found | estimates).items()},
        "calibration": calibration(learned, gamma, settings.seed),
    }


def load_for_data(folder: Path, dataset: Dataset) -> tuple[Plan, Policy]:
    """A run's plan and best policy, with the spec of a data set: spaces.json is not needed."""
    plan = read_plan(folder / "run.toml")
    spec = dataset.manifest.spec.spec()
    policy, _ = restore_policy(folder, plan, spec, CustomParts(), "best", torch.device(usable_device(plan)))
    return plan, policy


def require_policy(plan: Plan, policy: Policy, dataset: Dataset) -> Spec:
    """The spec, if the policy has no memory, values joint actions, and fits the data."""
    if policy.net.memory is not None or plan.net.decoupled:
        raise UsageError(
            "this policy cannot be evaluated on recorded episodes",
            "It has a memory (net.memory), or values each dimension of an action by itself (net.decoupled).",
            "Evaluate it in its environment: qfleet eval RUN.",
        )
    spec = dataset.manifest.spec.spec()
    own = policy.spec
    if own is None or (own.input_shape, own.dtype, own.actions) != (spec.input_shape, spec.dtype, spec.actions):
        raise UsageError(
            f"the policy does not fit the data set {dataset.place.url}",
            f"Recorded are observations {spec.input_shape} {spec.dtype} and actions {spec.actions}.",
            "Name a run that was trained on this data set, or in the same environment.",
        )
    return spec


def learned_from(plan: Plan, episode: ValuedEpisode, scale: float = 1.0) -> ValuedEpisode:
    """The episode with rewards as the plan learns from them, clipped and scaled: values are in their units."""
    reward = np.clip(episode.reward, -1.0, 1.0) if plan.env.clip_reward else episode.reward
    return replace(episode, reward=reward * scale)


def read_episodes(found: Iterator[ValuedEpisode], settings: OnDataSettings, show: Show) -> list[ValuedEpisode]:
    """The first episodes, until they are as many as wanted or as large as allowed."""
    episodes: list[ValuedEpisode] = []
    num_bytes = 0
    for episode in found:
        episodes.append(episode)
        num_bytes += episode.num_bytes
        if len(episodes) % SHOW_EVERY_EPISODES == 0:
            show(f"{len(episodes):,} episodes of at most {settings.episodes:,}, {num_bytes >> 20:,} MiB")
        if len(episodes) >= settings.episodes or num_bytes >= settings.max_bytes:
            break
    return episodes


def memory_full(episodes: list[ValuedEpisode], settings: OnDataSettings) -> bool:
    """Were fewer episodes read than wanted, because no more may be in memory?"""
    return len(episodes) < settings.episodes and sum(each.num_bytes for each in episodes) >= settings.max_bytes


def valued_episodes(policy: Policy, spec: Spec, dataset: Dataset, settings: OnDataSettings) -> Iterator[ValuedEpisode]:
    """The episodes of a split, one after the other."""
    for file in dataset.require_files(settings.split):
        yield from file_episodes(policy, spec, dataset, file, settings)


def file_episodes(
    policy: Policy, spec: Spec, dataset: Dataset, file: DataFile, settings: OnDataSettings
) -> Iterator[ValuedEpisode]:
    """The episodes of a data file, with the policy's values."""
    shard = load_shard(dataset, file, spec)
    for items, episode in zip(episode_items(shard), dataset.episodes(file), strict=True):
        obs, mask = observations(shard, items)
        values = policy_values(policy, obs, mask)
        target = epsilon_greedy_probabilities(values, settings.epsilon)
        recorded = (episode.action, episode.reward, episode.terminated)
        kept = obs if is_fitted(episode.id, settings.seed) else obs[:1].copy()
        yield ValuedEpisode(episode.id, kept, *recorded, values, target, episode.probability)


def observations(shard: DataShard, items: Array) -> tuple[Array, Array | None]:  # [T + 1, *input_shape], [T + 1, A]
    """The observations of an episode as the network reads them, and its masks."""
    one_step = NStepReturn(1, 1.0)
    batch = StepCut(1).cut(shard.store, items, one_step, np.ones(len(items), np.float32), items)
    obs = np.concatenate([batch.obs, batch.next_obs[-1:]])
    if batch.mask is None or batch.next_mask is None:
        return obs, None
    return obs, np.concatenate([batch.mask, batch.next_mask[-1:]])


def policy_values(policy: Policy, obs: Array, mask: Array | None) -> Array:  # [T + 1, A]
    """The values of all actions; -inf where an action is not allowed. A final state may allow none: then all count."""
    policy.set_noisy(False)
    parts = [policy.forward(obs[at : at + ITEMS_PER_CALL])[0] for at in range(0, len(obs), ITEMS_PER_CALL)]
    values = np.concatenate(parts).astype(np.float64)
    if mask is None:
        return values
    return np.where(mask | ~mask.any(1, keepdims=True), values, -np.inf)
