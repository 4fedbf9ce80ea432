"""Weighted importance sampling per decision (Precup, Sutton and Singh 2000). Shapes: N episodes, T steps, R resamples.

rho_t = prod_(k <= t) pi(a_k | s_k) / b(a_k | s_k);  V = sum_t gamma^t sum_i rho_it r_it / sum_i rho_it
An episode that has ended keeps its last weight, with rewards of 0: otherwise long episodes alone would count.
"""

from collections.abc import Sequence

import numpy as np

from qfleet.data import Array
from qfleet.datasets.estimates.estimate import DataEstimate, refuse, too_few
from qfleet.datasets.estimates.intervals import percentiles, resample_counts
from qfleet.datasets.estimates.valued_episode import ValuedEpisode

MIN_EFFECTIVE = 20.0  # episodes, by the size of equal weights that would vary as much
MIN_EFFECTIVE_PARTS = 20.0  # the same of what each episode adds: where rewards are rare, weights alone look too good
ROUNDING = 1e-6  # of a mean weight that is exactly 1 on paper
LARGEST_LOG = 600.0  # of a weight, so that sums of weights stay finite
MAX_SHARE = 0.2  # of the weight of all episodes that one may have
STEPS_PER_BLOCK = 500


def log_ratios(episode: ValuedEpisode) -> Array:  # [T]
    """log pi(a|s) - log b(a|s); -inf where the evaluated policy never acts so."""
    if episode.probability is None:
        raise ValueError("the probabilities of the recorded actions are not known")
    target = episode.target[np.arange(episode.num_steps), episode.action]
    with np.errstate(divide="ignore"):
        found: Array = np.log(target) - np.log(episode.probability)
    return found


def weight_table(episodes: Sequence[ValuedEpisode]) -> Array:  # [N, T]
    """rho of every episode and step, in each column divided by the largest, so that nothing overflows."""
    horizon = max(each.num_steps for each in episodes)
    logs = np.empty((len(episodes), horizon))
    for at, episode in enumerate(episodes):
        sums = np.cumsum(log_ratios(episode))
        logs[at, : len(sums)] = sums
        logs[at, len(sums) :] = sums[-1]
    top = logs.max(0)
    weights: Array = np.exp(logs - np.where(np.isfinite(top), top, 0.0))
    return weights


def effective_size(weight: Array) -> tuple[float, float]:  # [N]
    """(sum w)^2 / sum w^2, and the largest share of one episode (Kong 1992)."""
    total = weight.sum()
    if total <= 0:
        return 0.0, 1.0
    return float(total**2 / (weight**2).sum()), float(weight.max() / total)


def weighted_returns(weights: Array, rewards: Array, gamma: float, counts: Array) -> Array:  # [N, T] x 2, [R, N] -> [R]
    """V of every resample; a step at which no episode has weight adds nothing."""
    total = np.zeros(len(counts))
    for begin in range(0, weights.shape[1], STEPS_PER_BLOCK):
        block = weights[:, begin : begin + STEPS_PER_BLOCK]
        below = counts @ block
        above = counts @ (block * rewards[:, begin : begin + STEPS_PER_BLOCK])
        each = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        total += each @ gamma ** np.arange(begin, begin + block.shape[1])
    return total


def parts_of_estimate(weights: Array, rewards: Array, gamma: float) -> Array:  # [N, T] x 2 -> [N]
    """What every episode adds to V."""
    parts = np.zeros(len(weights))
    for begin in range(0, weights.shape[1], STEPS_PER_BLOCK):
        block = weights[:, begin : begin + STEPS_PER_BLOCK]
        total = block.sum(0)
        shares = np.divide(block, total, out=np.zeros_like(block), where=total > 0)
        discounts = gamma ** np.arange(begin, begin + block.shape[1])
        parts += (shares * rewards[:, begin : begin + STEPS_PER_BLOCK]) @ discounts
    return parts


def mean_weights(episodes: Sequence[ValuedEpisode], counts: Array) -> Array:  # [R, N] -> [R]
    """The mean of whole episodes' weights in every resample; its expectation is 1 (a likelihood ratio's)."""
    logs = np.array([log_ratios(each).sum() for each in episodes])
    found: Array = counts @ np.exp(np.minimum(logs, LARGEST_LOG)) / len(episodes)
    return found


def importance_estimate(episodes: Sequence[ValuedEpisode], gamma: float, seed: int) -> DataEstimate:
    """The discounted return of the evaluated policy, within the lengths that were recorded."""
    if reason := too_few(len(episodes)):
        return refuse(reason)
    if any(each.probability is None for each in episodes):
        return refuse("the data set does not have the probabilities of the recorded actions")
    weights = weight_table(episodes)
    rewards = np.zeros_like(weights)
    for at, episode in enumerate(episodes):
        rewards[at, : episode.num_steps] = episode.reward
    counts = resample_counts(len(episodes), seed).astype(np.float64)
    support = support_of(episodes, weights, rewards, gamma, counts)
    if reason := thin(support):
        return refuse(reason, support)
    value = weighted_returns(weights, rewards, gamma, np.ones((1, len(episodes))))
    low, high = percentiles(weighted_returns(weights, rewards, gamma, counts))
    return DataEstimate(float(value[0]), low, high, support=support)


def support_of(
    episodes: Sequence[ValuedEpisode], weights: Array, rewards: Array, gamma: float, counts: Array
) -> dict[str, float]:  # [N, T] x 2, [R, N]
    """What the estimate rests on."""
    size, share = effective_size(weights[:, -1])
    parts, _ = effective_size(np.abs(parts_of_estimate(weights, rewards, gamma)))
    low, high = np.percentile(mean_weights(episodes, counts), (2.5, 97.5))
    found = {"episodes": float(len(episodes)), "effective_episodes": size, "largest_weight": share}
    return found | {"effective_parts": parts, "mean_weight_low": float(low), "mean_weight_high": float(high)}


def thin(support: dict[str, float]) -> str:
    """Why the support is too thin for a number; empty if it is not."""
    size = support["effective_episodes"]
    share = support["largest_weight"]
    parts = support["effective_parts"]
    low = support["mean_weight_low"]
    high = support["mean_weight_high"]
    if size < MIN_EFFECTIVE:
        return f"{size:.1f} episodes are effective, and it needs {MIN_EFFECTIVE:g}"
    if share > MAX_SHARE:
        return f"one episode has {share:.0%} of all weight, and {MAX_SHARE:.0%} is the most"
    if parts < MIN_EFFECTIVE_PARTS:
        return f"its value is that of {parts:.1f} effective episodes, and it needs {MIN_EFFECTIVE_PARTS:g}"
    if high < 1.0 - ROUNDING or low > 1.0 + ROUNDING:
        return f"the mean weight is {low:.2g} to {high:.2g}, and would be 1 if what the policy does was recorded"
    return ""
