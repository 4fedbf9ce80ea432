"""What takes the place of actors when nothing acts: a run that learns from a data set."""

import numpy as np

from qfleet.act.explore import Explorer
from qfleet.act.policy import Policy
from qfleet.act.population_policy import PopulationPolicy
from qfleet.data import Array, State


class GreedyExplorer:
    """No exploration: what a run without actors reports."""

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """Never called: nothing acts."""
        raise TypeError("nothing acts in this run")

    def probability(self, action: Array, values: Array, step: int, mask: Array | None) -> Array | None:
        """Never asked for: nothing acts."""
        return None

    def epsilon(self, step: int) -> float | None:
        """There is none."""
        return None


class NoActor:
    """Holds the policy; it never acts."""

    is_remote = False

    def __init__(self, policy: Policy | PopulationPolicy) -> None:
        self.policy = policy
        self.explorer: Explorer = GreedyExplorer()

    def start(self) -> None:
        """No episode begins."""

    def state_dict(self) -> State:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: State) -> Array:
        """No lane can be lost."""
        return np.zeros(0, np.bool_)

    def stop(self) -> None:
        """Nothing to stop."""

    def close(self) -> None:
        """Nothing to close."""
