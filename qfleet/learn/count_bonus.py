"""A bonus for rare observations, added to rewards before they are stored (Tang et al. 2017). Shapes: T rows, B lanes.

r + scale / sqrt(n(s)), where n(s) counts the visits to observations with the same hash as s. A visit is counted when
its row comes in and its bonus stays as it was then.
"""

import math
from dataclasses import replace

import numpy as np

from qfleet.data import Array, Rollout, Spec, State
from qfleet.data.state_reader import FLOATS, saved_array, saved_count, saved_numbers, saved_value
from qfleet.plan.schema import CountBonus, Plan

# sides from which pictures are shrunk, and to about what
LARGE_PICTURE = 16
SMALL_PICTURE = 8
FAR = 10.0  # standard deviations; what lies further out is all the same
TINY = 1e-6


class Standardize:
    """Observations as numbers of mean 0 and deviation 1, by the first `settle_steps` rows; they do not move later.

    A cell that moved would forget its visits. Bytes are centred and divided by 255 only, for most pixels hardly change.
    """

    def __init__(self, spec: Spec, settle_steps: int) -> None:
        self.bytes = spec.dtype == "uint8"
        self.settle_steps = settle_steps
        self.count = 0
        size = self.flat(np.zeros((1, *spec.obs), spec.dtype)).shape[1]
        self.sum = np.zeros(size)
        self.square = np.zeros(size)

    @property
    def settled(self) -> bool:
        """Has it seen enough?"""
        return self.count >= self.settle_steps

    def flat(self, obs: Array) -> Array:  # [N, *obs] -> [N, D]
        """Observations as plain numbers; large pictures are shrunk to the means of about 8 x 8 blocks."""
        if obs.ndim >= 3 and min(obs.shape[-2:]) >= LARGE_PICTURE:
            for axis in (-2, -1):
                edges = np.linspace(0, obs.shape[axis], SMALL_PICTURE, endpoint=False).astype(np.int64)
                widths = np.diff([*edges, obs.shape[axis]])
                total = np.add.reduceat(obs.astype(np.float64), edges, axis)
                obs = total / (widths[:, None] if axis == -2 else widths)
        return obs.reshape(len(obs), -1).astype(np.float64) / (255.0 if self.bytes else 1.0)

    def observe(self, x: Array) -> None:  # [N, D]
        """Take rows in."""
        self.count += len(x)
        self.sum += x.sum(0)
        self.square += (x * x).sum(0)

    def scaled(self, x: Array) -> Array:  # [N, D]
        """In standard deviations from the mean."""
        mean = self.sum / max(1, self.count)
        if self.bytes:
            centred: Array = x - mean
            return centred
        deviation = np.sqrt(np.maximum(self.square / max(1, self.count) - mean * mean, 0.0))
        scaled: Array = np.clip((x - mean) / np.maximum(deviation, TINY), -FAR, FAR)
        return scaled


class VisitCounts:
    """Counts visits by hash and pays scale / sqrt(visits)."""

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
        # since the last news
        self.paid = 0.0
        self.steps = 0

    def add(self, rollout: Rollout) -> Rollout:
        """The rollout with its bonus; rewards are clipped first, if the plan clips them."""
        reward = np.clip(rollout.reward, -1.0, 1.0) if self.clip else rollout.reward.copy()
        for obs, last, row in zip(rollout.obs, rollout.last, reward, strict=True):
            row[~last] += self.bonus(self.statistics.flat(obs)[~last])
        return replace(rollout, reward=reward)

    def bonus(self, x: Array) -> Array:  # [N, D] -> [N]
        """Count these observations, and tell what each is worth; nothing while the statistics settle."""
        if not self.statistics.settled:
            self.statistics.observe(x)
            return np.zeros(len(x), np.float32)
        keys = self.keys(self.statistics.scaled(x)).tolist()
        for key in keys:
            self.visits[key] = self.visits.get(key, 0) + 1
        worth = np.array([self.scale / math.sqrt(self.visits[key]) for key in keys], np.float32)
        self.paid += float(worth.sum(dtype=np.float64))
        self.steps += len(worth)
        return worth

    def keys(self, x: Array) -> Array:  # [N, D] -> [N] int64
        """Cells of the grid, or the side of each random hyperplane that the observation lies on."""
        if self.grid is not None:
            # Multiplying by random odd numbers, modulo 2^64, spreads cells over all keys.
            cells: Array = (np.floor(x / self.grid).astype(np.int64) * self.factors).sum(1)
            return cells
        sides: Array = (x @ self.planes > 0) @ (1 << np.arange(self.planes.shape[1]))
        return sides

    def news(self) -> dict[str, float]:
        """The mean bonus since it was last told, and how many different observations were met."""
        mean = self.paid / self.steps if self.steps else 0.0
        self.paid = 0.0
        self.steps = 0
        return {"bonus_mean": mean, "states_seen": len(self.visits)}

    def state_dict(self) -> State:
        """Everything but the hash, which the seed decides."""
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
        """Take it back."""
        statistics = self.statistics
        keys = saved_numbers(state, "keys", (None,), -(2**63), 2**63 - 1).tolist()
        visits = saved_numbers(state, "visits", (len(keys),), 1, 2**53).tolist()
        self.visits = dict(zip(keys, visits, strict=True))
        statistics.count = saved_count(state, "count")
        statistics.sum[:] = saved_array(state, "sum", FLOATS, statistics.sum.shape)
        statistics.square[:] = saved_array(state, "square", FLOATS, statistics.square.shape)
        self.paid = float(saved_value(state, "paid"))
        self.steps = saved_count(state, "steps")


def make_bonus(plan: Plan, spec: Spec, rng: np.random.Generator) -> VisitCounts | None:
    """The bonus that the plan names, if any."""
    match plan.algo.bonus:
        case CountBonus(scale=scale, bits=bits, grid=grid, settle_steps=settle_steps):
            clip = plan.env.clip_reward
            return VisitCounts(spec, rng, scale=scale, bits=bits, grid=grid, settle_steps=settle_steps, clip=clip)
        case _:
            return None
