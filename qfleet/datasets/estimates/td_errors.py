"""How consistent a policy's own values are with recorded steps."""

from collections.abc import Sequence

import numpy as np

from qfleet.data import Array
from qfleet.datasets.estimates.estimate import DataEstimate
from qfleet.datasets.estimates.intervals import ratio_estimate
from qfleet.datasets.estimates.valued_episode import ValuedEpisode


def episode_errors(episode: ValuedEpisode, gamma: float) -> Array:  # [T]
    """r + gamma max_a Q(s', a) - Q(s, a) of every step; nothing follows a terminating step."""
    best = episode.values[1:].max(1)
    target = episode.reward + gamma * np.where(episode.bootstrap > 0, best, 0.0)
    errors: Array = target - episode.values[np.arange(episode.num_steps), episode.action]
    return errors


def td_errors(episodes: Sequence[ValuedEpisode], gamma: float, seed: int) -> dict[str, DataEstimate]:
    """Means over steps of the absolute one-step TD error and of its Huber loss (kappa 1)."""
    errors = [np.abs(episode_errors(episode, gamma)) for episode in episodes]
    huber = [np.where(each <= 1.0, 0.5 * each**2, each - 0.5) for each in errors]
    num = np.array([len(each) for each in errors], np.float64)
    return {
        "td_error": ratio_estimate(np.array([each.sum() for each in errors]), num, seed),
        "td_loss": ratio_estimate(np.array([each.sum() for each in huber]), num, seed),
    }
