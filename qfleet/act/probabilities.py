"""With which probability an explorer takes an action. Shapes: B lanes, A actions, D action dimensions."""

import numpy as np

from qfleet.data import Array, split_actions


def epsilon_greedy_probability(
    action: Array, best: Array, epsilon: float | Array, mask: Array | None, counts: tuple[int, ...]
) -> Array:  # -> [B]
    """The probability of these actions, if these are the best ones."""
    num_allowed = np.prod(counts, dtype=np.float64) if mask is None else np.maximum(mask.sum(1), 1)
    is_best = action == best
    probability: Array = np.asarray(epsilon / num_allowed + (1.0 - np.asarray(epsilon)) * is_best, np.float64)
    return probability


def softmax_probability(
    action: Array, values: Array, temperature: float, mask: Array | None, counts: tuple[int, ...]
) -> Array:  # -> [B]
    """The probability of these actions where each has the weight exp(value / temperature)."""
    allowed = values.astype(np.float64) if mask is None else np.where(mask, values, -np.inf)
    weights = np.exp((allowed - allowed.max(-1, keepdims=True)) / temperature)
    shares = weights / weights.sum(-1, keepdims=True)
    if values.ndim == 2:
        probability: Array = shares[np.arange(len(shares)), action]
        return probability
    choices = np.stack(split_actions(action, counts), 1)
    return np.asarray(np.take_along_axis(shares, choices[:, :, None], 2)[:, :, 0].prod(1))
