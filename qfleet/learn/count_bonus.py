"""A bonus for rare observations, added to rewards before they are stored (Tang et al. 2017). Shapes: T rows, B lanes.

r + scale / sqrt(n(s)), where n(s) counts the visits to observations with the same hash as s. A visit is counted when
its row is added, and its bonus does not change afterwards.
"""

import math
from dataclasses import replace

import numpy as np

from qfleet.data import Array, Rollout, Spec, State
from qfleet.data.state_reader import FLOATS, saved_array, saved_count, saved_numbers, saved_value
from qfleet.plan.schema import CountBonus, Plan

# Images with sides of at least LARGE_IMAGE are shrunk to SMALL_IMAGE.
LARGE_IMAGE = 16
SMALL_IMAGE = 8
MAX_DEVIATIONS = 10.0  # standardised observations are clipped to +-MAX_DEVIATIONS
EPS = 1e-6


class Standardize:
    """Standardises observations by the mean and deviation of the first `settle_steps` rows, which then stay fixed.

    If they changed, observations would change their hash and lose their counts. Bytes are only centred and divided by
    255, because most pixels hardly change.
    """

    def __init__(self, spec: Spec, settle_steps: int) -> None:
        self.bytes = spec.dtype == "uint8"
        self.settle_steps = settle_steps
        self.count = 0
        size = self.flatten(np.zeros((1, *spec.obs), spec.dtype)).shape[1]
        self.sum = np.zeros(size)
        self.square = np.zeros(size)

    @property
    def is_ready(self) -> bool:
        """Whether the statistics are complete."""
        return self.count >= self.settle_steps

    def flatten(self, obs: Array) -> Array:  # [N, *obs] -> [N, D]
        """Observations as flat vectors; large images are shrunk to 8 x 8 by averaging blocks."""
        if obs.ndim >= 3 and min(obs.shape[-2:]) >= LARGE_IMAGE:
            for axis in (-2, -1):
                edges = np.linspace(0, obs.shape[axis], SMALL_IMAGE, endpoint=False).astype(np.int64)
                widths = np.diff([*edges, obs.shape[axis]])
                total = np.add.reduceat(obs.astype(np.float64), edges, axis)
                obs = total / (widths[:, None] if axis == -2 else widths)
        return obs.reshape(len(obs), -1).astype(np.float64) / (255.0 if self.bytes else 1.0)

    def observe(self, x: Array) -> None:  # [N, D]
        """Update the statistics."""
        self.count += len(x)
        self.sum += x.sum(0)
        self.square += (x * x).sum(0)

    def standardize(self, x: Array) -> Array:  # [N, D]
        """Differences from the mean in standard deviations."""
        mean = self.sum / max(1, self.count)
        if self.bytes:
            centred: Array = x - mean
            return centred
        deviation = np.sqrt(np.maximum(self.square / max(1, self.count) - mean * mean, 0.0))
        scaled: Array = np.clip((x - mean) / np.maximum(deviation, EPS), -MAX_DEVIATIONS, MAX_DEVIATIONS)
        return scaled


class VisitCounts:
    """Counts visits by hash; the bonus is scale / sqrt(visits)."""

    def __init__(
        self,
        spec: Spec,
        rng: np.random.Generator,
        *,
        scale: float,
        bits: int = 32,
        grid: float | None = None,
        settle_steps: int = 1_000,
        clip: bool = False,
    ) -> None:
        self.scale = scale
        self.grid = grid
        self.clip = clip
        self.statistics = Standardize(spec, settle_steps)
        size = len(self.statistics.sum)
        self.planes = rng.standard_normal((size, bits))
        self.factors = rng.integers(-(2**63), 2**63 - 1, size) | 1
        self.visits: dict[int, int] = {}
        # sums since the last metrics
        self.paid = 0.0
        self.steps = 0

    def with_bonus(self, rollout: Rollout) -> Rollout:
        """The rollout with the bonus added to its rewards, which are clipped first if the plan clips them."""
        reward = np.clip(rollout.reward, -1.0, 1.0) if self.clip else rollout.reward.copy()
        for obs, last, row in zip(rollout.obs, rollout.last, reward, strict=True):
            row[~last] += self.bonus(self.statistics.flatten(obs)[~last])
        return replace(rollout, reward=reward)

    def bonus(self, x: Array) -> Array:  # [N, D] -> [N]
        """Count these observations and return their bonus; zero until the statistics are complete."""
        if not self.statistics.is_ready:
            self.statistics.observe(x)
            return np.zeros(len(x), np.float32)
        keys = self.keys(self.statistics.standardize(x)).tolist()
        for key in keys:
            self.visits[key] = self.visits.get(key, 0) + 1
        bonus = np.array([self.scale / math.sqrt(self.visits[key]) for key in keys], np.float32)
        self.paid += float(bonus.sum(dtype=np.float64))
        self.steps += len(bonus)
        return bonus

    def keys(self, x: Array) -> Array:  # [N, D] -> [N] int64
        """Hashes: the cell of the grid, or on which side of each random hyperplane an observation lies (SimHash)."""
        if self.grid is not None:
            # Multiplying by random odd numbers, modulo 2^64, spreads cells over all keys.
            cells: Array = (np.floor(x / self.grid).astype(np.int64) * self.factors).sum(1)
            return cells
        sides: Array = (x @ self.planes > 0) @ (1 << np.arange(self.planes.shape[1]))
        return sides

    def take_metrics(self) -> dict[str, float]:
        """The mean bonus since the last call, and the number of different observations so far."""
        mean = self.paid / self.steps if self.steps else 0.0
        self.paid = 0.0
        self.steps = 0
        return {"bonus_mean": mean, "states_seen": len(self.visits)}

    def state_dict(self) -> State:
        """Everything but the hash function, which follows from the seed."""
        num = len(self.visits)
        statistics = self.statistics
        return {
            "keys": np.fromiter(self.visits.keys(), np.int64, num),
            "visits": np.fromiter(self.visits.values(), np.int64, num),
            "count": statistics.count,
            "sum": statistics.sum.copy(),
            "square": statistics.square.copy(),
            "paid": self.paid,
            "steps": self.steps,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the counts and statistics."""
        statistics = self.statistics
        keys = saved_numbers(state, "keys", (None,), -(2**63), 2**63 - 1).tolist()
        visits = saved_numbers(state, "visits", (len(keys),), 1, 2**53).tolist()
        self.visits = dict(zip(keys, visits, strict=True))
        statistics.count = saved_count(state, "count")
        statistics.sum[:] = saved_array(state, "sum", FLOATS, statistics.sum.shape)
        statistics.square[:] = saved_array(state, "square", FLOATS, statistics.square.shape)
        self.paid = float(saved_value(state, "paid"))
        self.steps = saved_count(state, "steps")


def make_count_bonus(plan: Plan, spec: Spec, rng: np.random.Generator) -> VisitCounts | None:
    """The plan's bonus, if any."""
    match plan.algo.bonus:
        case CountBonus(scale=scale, bits=bits, grid=grid, settle_steps=settle_steps):
            clip = plan.env.clip_reward
            return VisitCounts(spec, rng, scale=scale, bits=bits, grid=grid, settle_steps=settle_steps, clip=clip)
        case _:
            return None
