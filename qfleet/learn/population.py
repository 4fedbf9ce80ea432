"""A population: several learners with weights of their own and one replay. Shapes: P members, N items.

Item k of a batch is member k mod P's, as lane k is of the world: a prioritised sampler draws in order of age, and every
member shall see all ages. Members share what is normalised and what was experienced; nothing else, until at intervals
the worst takes the weights of the best (the exploit of Jaderberg et al. 2017).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qfleet.data import Array, Batch, Report, Sequences
from qfleet.learn.batch_split import part
from qfleet.learn.learner import Learner
from qfleet.learn.plasticity import Reset
from qfleet.nets import QNet


class PopulationLearner:
    """Several learners as one. What there is one of, such as the weights that are saved first, is the leader's."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = list(learners)
        self.leader = 0

    @property
    def first(self) -> Learner:
        """The member that leads."""
        return self.learners[self.leader]

    @property
    def net(self) -> QNet:
        """The leader's network."""
        return self.first.net

    @property
    def target(self) -> QNet:
        """The leader's target network."""
        return self.first.target

    @property
    def reset(self) -> Reset | None:
        """The leader's resets; all have theirs at the same time."""
        return self.first.reset

    @property
    def updates(self) -> int:
        """Updates that each member has made."""
        return self.first.updates

    @updates.setter
    def updates(self, count: int) -> None:
        for learner in self.learners:
            learner.updates = count

    @property
    def learning_rate(self) -> float:
        """The rate that the members' own are multiples of."""
        return self.first.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for learner in self.learners:
            learner.learning_rate = rate

    def rate(self) -> float:
        """The leader's learning rate in the next update."""
        return self.first.rate()

    def update(self, batch: Batch | Sequences) -> Report:
        """Everyone learns from a part of its own; the report is the leader's, with everyone's priorities."""
        num = len(self.learners)
        # All or none: when one member's numbers are not finite no other has moved.
        changes = [learner.examine(part(batch, at, num)) for at, learner in enumerate(self.learners)]
        reports = [learner.apply(change) for learner, change in zip(self.learners, changes, strict=True)]
        priority = np.empty(len(batch.ids), reports[0].priority.dtype)
        for at, report in enumerate(reports):
            priority[at::num] = report.priority
        return Report(reports[self.leader].loss, priority, reports[self.leader].stats)

    def lead(self, scores: Sequence[float]) -> None:
        """The member with the best score leads; of equals the one that did before, or else the first."""
        if scores[self.leader] < max(scores):
            self.leader = scores.index(max(scores))

    def exploit(self, scores: Sequence[float]) -> int | None:
        """The worst member takes the leader's weights, target and moments; returns it, or None if all are equal."""
        worst = scores.index(min(scores))
        if not self.updates or scores[worst] == scores[self.leader]:
            return None
        self.learners[worst].load_model_arrays(self.first.model_arrays())
        self.learners[worst].load_optim_arrays(self.first.optim_arrays())
        return worst

    def weights(self) -> Any:
        """What a board carries to the policies: one member's after the other's."""
        return [learner.weights() for learner in self.learners]

    def begin_with(self, model: dict[str, Array]) -> None:
        """Everyone starts from these weights."""
        for learner in self.learners:
            learner.begin_with(model)

    def finite(self) -> bool:
        """Is everything that would be saved finite?"""
        return all(learner.finite() for learner in self.learners)

    def model_arrays(self) -> dict[str, Array]:
        """The leader's network, under the names that a single learner gives."""
        return self.first.model_arrays()

    def load_model_arrays(self, model: dict[str, Array]) -> None:
        """Write these weights into every network; `load_optim_arrays` has the others' own, and tells who leads."""
        for learner in self.learners:
            learner.load_model_arrays(model)

    def optim_arrays(self) -> dict[str, Array]:
        """The leader's target and moments, and everything of the others, under `member.<number>.`."""
        named = self.first.optim_arrays()
        for at, learner in enumerate(self.learners):
            if at != self.leader:
                own = {f"net.{name}": value for name, value in learner.model_arrays().items()} | learner.optim_arrays()
                named |= {f"member.{at}.{name}": value for name, value in own.items()}
        return named

    def load_optim_arrays(self, named: dict[str, Array]) -> None:
        """Take it all back; the leader is the one without a number."""
        leaders = [at for at in range(len(self.learners)) if not below(named, f"member.{at}.")]
        if len(leaders) != 1:
            raise KeyError(f"weights of {len(leaders) - 1} members are missing")
        (self.leader,) = leaders
        self.first.load_optim_arrays(named)
        for at, learner in enumerate(self.learners):
            if at != self.leader:
                own = below(named, f"member.{at}.")
                learner.load_model_arrays(below(own, "net."))
                learner.load_optim_arrays(own)


def below(named: dict[str, Array], prefix: str) -> dict[str, Array]:
    """The arrays whose names begin so, by the rest of their names."""
    return {name[len(prefix) :]: value for name, value in named.items() if name.startswith(prefix)}


def rate_factors(num: int, spread: float) -> list[float]:
    """Multiples of the learning rate, each `spread` times the one before, with a geometric mean of one."""
    return [float(spread ** (at - (num - 1) / 2)) for at in range(num)]
