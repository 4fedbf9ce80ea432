"""One evaluator for every contestant: a cheap screen, then fresh episodes that count. Needs NumPy only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Act = Callable[[NDArray[Any]], NDArray[Any]]  # [B, ...] observations -> [B] actions


class Lanes(Protocol):
    """The part of a Gymnasium vector environment that playing needs."""

    num_envs: int

    def reset(self, *, seed: int | None = None) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin an episode in every lane."""
        ...

    def step(self, actions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], Any]:
        """One step in every lane."""
        ...


def play(lanes: Lanes, act: Act, seed: int, max_steps: int = 100_000) -> NDArray[np.float64]:
    """The return of the first episode of every lane: whole episodes, so that short ones are not favoured."""
    obs, _ = lanes.reset(seed=seed)
    total = np.zeros(lanes.num_envs)
    alive = np.ones(lanes.num_envs, dtype=bool)
    for _ in range(max_steps):
        obs, reward, terminated, truncated, _ = lanes.step(np.asarray(act(obs)))
        total += np.where(alive, reward, 0.0)
        alive &= ~(np.asarray(terminated) | np.asarray(truncated))
        if not alive.any():
            return total
    raise RuntimeError(f"{int(alive.sum())} of {lanes.num_envs} episodes did not end within {max_steps} steps")


@dataclass
class Judge:
    """Screens a policy, and confirms it with fresh episodes only when the screen passes."""

    screen: Lanes
    confirm: Lanes
    target: float
    seed: int
    rounds: int = 0

    def __call__(self, act: Act) -> dict[str, Any]:
        """Screen mean, confirmed mean (None when the screen failed), and whether the target was verified."""
        self.rounds += 1
        screened = float(play(self.screen, act, self._seed(0)).mean())
        if screened < self.target:
            return {"screen": screened, "mean": None, "verified": False}
        mean = float(play(self.confirm, act, self._seed(1)).mean())
        return {"screen": screened, "mean": mean, "verified": mean >= self.target}

    def _seed(self, purpose: int) -> int:
        # A new seed per round and purpose: no start state is ever seen twice.
        return int(np.random.SeedSequence((self.seed, self.rounds, purpose)).generate_state(1)[0] >> 1)
