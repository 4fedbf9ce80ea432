"""A population: several learners, each with its own weights, and one replay. Shapes: P members, N items.

Item k of a batch belongs to member k mod P, as lane k of the world does: a prioritised sampler draws in order of age,
and every member shall learn from items of all ages. Members share experience and running normalisation only; at
intervals the worst member copies the weights of the best (the exploit of Jaderberg et al. 2017).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qfleet.data import Array, Batch, Report, Sequences
from qfleet.learn.batch_split import strided_part
from qfleet.learn.learner import Learner, strip_prefix
from qfleet.learn.plasticity import Reset
from qfleet.nets import QNet


class PopulationLearner:
    """Several learners as one. Where a run has one value, such as the saved model, it is the leader's."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = list(learners)
        self.leader_index = 0

    @property
    def leader(self) -> Learner:
        """The member with the best score."""
        return self.learners[self.leader_index]

    @property
    def net(self) -> QNet:
        """The leader's network."""
        return self.leader.net

    @property
    def target(self) -> QNet:
        """The leader's target network."""
        return self.leader.target

    @property
    def reset(self) -> Reset | None:
        """The leader's resets; all members reset at the same updates."""
        return self.leader.reset

    @property
    def updates(self) -> int:
        """Updates that each member has made."""
        return self.leader.updates

    @updates.setter
    def updates(self, count: int) -> None:
        for learner in self.learners:
            learner.updates = count

    @property
    def learning_rate(self) -> float:
        """The learning rate that each member multiplies by its own factor."""
        return self.leader.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for learner in self.learners:
            learner.learning_rate = rate

    def current_rate(self) -> float:
        """The leader's learning rate in the next update."""
        return self.leader.current_rate()

    def update(self, batch: Batch | Sequences) -> Report:
        """Each member learns from its part; returns the leader's report, with all priorities."""
        num = len(self.learners)
        # All or none: if one member's update is not finite, no member has stepped.
        updates = [learner.prepare_update(strided_part(batch, at, num)) for at, learner in enumerate(self.learners)]
        reports = [learner.apply_update(pending) for learner, pending in zip(self.learners, updates, strict=True)]
        priority = np.empty(len(batch.ids), reports[0].priority.dtype)
        for at, report in enumerate(reports):
            priority[at::num] = report.priority
        return Report(reports[self.leader_index].loss, priority, reports[self.leader_index].stats)

    def choose_leader(self, scores: Sequence[float]) -> None:
        """Make the member with the best score the leader; of equals the present leader, or else the first."""
        if scores[self.leader_index] < max(scores):
            self.leader_index = scores.index(max(scores))

    def exploit(self, scores: Sequence[float]) -> int | None:
        """Copy the leader's weights, target and moments to the worst member; its index, None if all are equal."""
        worst = scores.index(min(scores))
        if not self.updates or scores[worst] == scores[self.leader_index]:
            return None
        self.learners[worst].load_model_arrays(self.leader.model_arrays())
        self.learners[worst].load_optim_arrays(self.leader.optim_arrays())
        return worst

    def weights(self) -> Any:
        """The weights to publish, one entry per member."""
        return [learner.weights() for learner in self.learners]

    def load_initial_weights(self, model: dict[str, Array]) -> None:
        """Start all members from these weights."""
        for learner in self.learners:
            learner.load_initial_weights(model)

    def is_finite(self) -> bool:
        """Whether all that is saved is finite."""
        return all(learner.is_finite() for learner in self.learners)

    def model_arrays(self) -> dict[str, Array]:
        """The leader's network, under the names of a single learner."""
        return self.leader.model_arrays()

    def load_model_arrays(self, model: dict[str, Array]) -> None:
        """Write these weights into every network; `load_optim_arrays` then sets the leader and the others' weights."""
        for learner in self.learners:
            learner.load_model_arrays(model)

    def optim_arrays(self) -> dict[str, Array]:
        """The leader's target and moments; all arrays of the other members, under `member.<number>.`."""
        named = self.leader.optim_arrays()
        for at, learner in enumerate(self.learners):
            if at != self.leader_index:
                own = {f"net.{name}": value for name, value in learner.model_arrays().items()} | learner.optim_arrays()
                named |= {f"member.{at}.{name}": value for name, value in own.items()}
        return named

    def load_optim_arrays(self, named: dict[str, Array]) -> None:
        """Restore all members; the leader is the one whose arrays have no number."""
        leaders = [at for at in range(len(self.learners)) if not strip_prefix(named, f"member.{at}.")]
        if len(leaders) != 1:
            raise KeyError(f"weights of {len(leaders) - 1} members are missing")
        (self.leader_index,) = leaders
        self.leader.load_optim_arrays(named)
        for at, learner in enumerate(self.learners):
            if at != self.leader_index:
                own = strip_prefix(named, f"member.{at}.")
                learner.load_model_arrays(strip_prefix(own, "net."))
                learner.load_optim_arrays(own)


def rate_factors(num: int, spread: float) -> list[float]:
    """Multiples of the learning rate, each `spread` times the one before, with a geometric mean of one."""
    return [float(spread ** (at - (num - 1) / 2)) for at in range(num)]
