"""Several policies in one world: which of them plays a lane is decided anew for every episode. Shapes: B lanes.

The shares are those of episodes, or those of steps. Nothing is drawn for it: the policy that is furthest behind its
share plays next.
"""

from dataclasses import dataclass, field

import numpy as np

from qfleet.act.explore import ChooseActions, best_or_random, greedy
from qfleet.act.policy import Policy
from qfleet.data import Array, Spec

Chosen = tuple[Array, Array | None, Array]
NO_VALUES = np.zeros((0, 0), np.float32)
MAX_POLICIES = 250  # their numbers fit into a byte


@dataclass(frozen=True)
class PlayedPolicy:
    """One policy of a mixture: its greedy actions, or with probability `epsilon` any that is allowed."""

    name: str
    epsilon: float
    policy: Policy | None  # None: all actions are random
    share: float = 1.0  # in relation to those of the others


@dataclass(eq=False)
class Mixture:
    """The policies as one, in the places of an actor's policy and of its explorer."""

    parts: list[PlayedPolicy]
    spec: Spec
    num_lanes: int
    by_steps: bool = False
    first_lane: int = 0  # among `total_lanes` of all actors
    total_lanes: int = 1
    version: int = 0
    playing: Array = field(init=False)  # [B], the number of each lane's policy
    best: Array = field(init=False)  # [B], the greedy actions of the latest step

    def __post_init__(self) -> None:
        self.actions = self.spec.actions
        self.shares = np.array([part.share for part in self.parts]) / sum(part.share for part in self.parts)
        self.epsilons = np.array([part.epsilon for part in self.parts])
        self.playing = np.zeros(self.num_lanes, np.uint8)
        self.best = np.zeros(self.num_lanes, np.int64)
        self.begun = np.zeros(self.num_lanes, np.int64)  # episodes of each lane
        self.steps = np.zeros(len(self.parts))
        self.assigned = np.zeros(len(self.parts))  # of episodes that begin now
        self.outputs: list[tuple[Array, Array]] = []  # lanes, and the values of their policy
        self.order: list[int] = []  # the policy of each episode, by its number among those of all lanes

    @property
    def names(self) -> list[str]:
        """The names of the policies."""
        return [part.name for part in self.parts]

    def begin_episodes(self, lanes: Array) -> None:
        """Choose the policies of the episodes that these lanes (bool [B]) begin next."""
        if len(self.parts) == 1:
            return
        self.assigned = np.zeros(len(self.parts))
        for lane in np.flatnonzero(lanes).tolist():
            episode = int(self.begun[lane]) * self.total_lanes + self.first_lane + lane
            self.playing[lane] = self._furthest_behind(self.steps) if self.by_steps else self._policy_of(episode)
            self.begun[lane] += 1
            self.assigned[self.playing[lane]] += 1

    def count_steps(self, lanes: Array) -> None:
        """These lanes (bool [B]) have made a step."""
        if self.by_steps and len(self.parts) > 1:
            self.steps += np.bincount(self.playing[lanes], minlength=len(self.parts))

    def _furthest_behind(self, counts: Array) -> int:
        """The policy that lacks most of its share."""
        # Of several lanes that begin at once, those that were assigned already count as one step each.
        counts = counts + self.assigned
        return int((self.shares * (counts.sum() + 1) - counts).argmax())

    def _policy_of(self, episode: int) -> int:
        counts = np.bincount(self.order, minlength=len(self.parts)).astype(np.float64)
        while len(self.order) <= episode:
            chosen = int((self.shares * (len(self.order) + 1) - counts).argmax())
            counts[chosen] += 1
            self.order.append(chosen)
        return self.order[episode]

    # As a policy

    def initial_state(self, lanes: int) -> Array | None:  # [B, S]
        """The state at the beginning of episodes; only a policy that plays alone may have one."""
        policy = self.parts[0].policy
        return None if policy is None or len(self.parts) > 1 else policy.initial_state(lanes)

    def select_actions(self, obs: Array, state: Array | None, choose: ChooseActions, *, noisy: bool) -> Chosen:
        """Actions [B], the next recurrent state, and values that nobody needs; a network's noise is off."""
        alone = self.parts[0].policy
        if len(self.parts) == 1 and alone is not None:

            def choose_alone(values: Array) -> Array:
                self.outputs = [(np.arange(len(values)), values)]
                return choose(values)

            return alone.select_actions(obs, state, choose_alone, noisy=False)
        self.outputs = []
        for number, part in enumerate(self.parts):
            lanes = np.flatnonzero(self.playing == number)
            if part.policy is not None and len(lanes):
                part.policy.set_noisy(False)
                self.outputs.append((lanes, part.policy.forward(np.ascontiguousarray(obs[lanes]))[0]))
        return choose(NO_VALUES), None, NO_VALUES

    # As an explorer

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """Each lane's best action by its own policy, or any allowed one."""
        self.best = np.zeros(self.num_lanes, np.int64)
        for lanes, found in self.outputs:
            self.best[lanes] = greedy(found, None if mask is None else mask[lanes], self.actions)
        return best_or_random(self.best, self.epsilons[self.playing], rng, mask, self.actions)

    def probability(self, action: Array, values: Array, step: int, mask: Array | None) -> Array | None:
        """By the policy that has chosen the action."""
        epsilon = self.epsilons[self.playing]
        num_allowed = np.prod(self.actions, dtype=np.float64) if mask is None else np.maximum(mask.sum(1), 1)
        probability: Array = epsilon / num_allowed + (1.0 - epsilon) * (action == self.best)
        return probability

    def epsilon(self, step: int) -> float | None:
        """The mean over the lanes."""
        return float(self.epsilons[self.playing].mean())
