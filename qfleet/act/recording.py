"""Recording what an actor does as episodes of a data set. Shapes: B lanes, A actions."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from qfleet.act.actor import Actor
from qfleet.act.explore import epsilon_greedy, greedy
from qfleet.data import Array, Rollout
from qfleet.datasets.format import RecordedEpisode
from qfleet.datasets.format.columns import WHOLE


@dataclass(eq=False)
class RecordingExplorer:
    """Epsilon-greedy with one epsilon, which remembers the probability of every action that it chose."""

    rate: float
    counts: tuple[int, ...]
    probability: Array = field(default_factory=lambda: np.zeros(0))  # [B], of the newest actions

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """An action for each lane."""
        action = epsilon_greedy(values, self.rate, rng, mask, self.counts)
        num_allowed = np.prod(self.counts, dtype=np.float64) if mask is None else np.maximum(mask.sum(1), 1)
        best = action == greedy(values, mask, self.counts)
        self.probability = np.broadcast_to(self.rate / num_allowed + (1.0 - self.rate) * best, best.shape).copy()
        return action

    def epsilon(self, step: int) -> float | None:
        """Always the same."""
        return self.rate


@dataclass(eq=False)
class _Lane:
    """The rows of an episode so far."""

    rows: list[tuple[Array, int, float, float, Array | None]] = field(default_factory=list)
    terminated: bool = False
    number: int = 0  # of the episode in this lane


@dataclass(eq=False)
class RolloutRecorder:
    """Makes whole episodes of the rows of one actor; the rows of an episode that has not ended wait."""

    num_lanes: int
    prefix: str  # of the ids
    seed: int | None = None
    env_id: str = ""
    behaviour: str = ""
    num_episodes: int | None = None  # evenly from all lanes: the first to end would be the short ones
    lanes: list[_Lane] = field(init=False)

    def __post_init__(self) -> None:
        self.lanes = [_Lane() for _ in range(self.num_lanes)]

    def add(self, rollout: Rollout, probability: Array | None = None) -> Iterator[RecordedEpisode]:
        """Add rows; yields the episodes they end. `probability` is [T, B]."""
        for at in range(len(rollout.last)):
            for lane in range(self.num_lanes):
                chance = np.nan if probability is None else float(probability[at, lane])
                mask = None if rollout.mask is None else rollout.mask[at, lane].copy()
                row = (rollout.obs[at, lane].copy(), int(rollout.action[at, lane]), float(rollout.reward[at, lane]))
                ended = self._add_row(lane, (*row, chance, mask), bool(rollout.last[at, lane]))
                if ended is not None:
                    yield ended
                self.lanes[lane].terminated = rollout.discount[at, lane] == 0 and not rollout.last[at, lane]

    def _add_row(
        self, number: int, row: tuple[Array, int, float, float, Array | None], last: bool
    ) -> RecordedEpisode | None:
        lane = self.lanes[number]
        lane.rows.append(row)
        if not last:
            return None
        wanted = self.num_episodes is None or lane.number * self.num_lanes + number < self.num_episodes
        ended = self._episode(number, lane) if wanted and len(lane.rows) > 1 else None
        lane.number += len(lane.rows) > 1
        lane.rows.clear()
        return ended

    def _episode(self, number: int, lane: _Lane) -> RecordedEpisode:
        obs, action, reward, probability, mask = zip(*lane.rows, strict=True)
        return RecordedEpisode(
            id=f"{self.prefix}-{number:04d}-{lane.number:06d}",
            observations={WHOLE: np.stack(obs)},
            action=np.array(action[:-1], np.int64),
            reward=np.array(reward[:-1], np.float64),
            terminated=bool(lane.terminated),
            truncated=not lane.terminated,
            probability=None if np.isnan(probability[0]) else np.array(probability[:-1]),
            mask=None if mask[0] is None else np.stack(mask),
            seed=self.seed,
            env_id=self.env_id,
            behaviour=self.behaviour,
        )


def record_episodes(actor: Actor, recorder: RolloutRecorder) -> Iterator[RecordedEpisode]:
    """The episodes that an actor with a RecordingExplorer plays, without end."""
    explorer = actor.explorer
    if not isinstance(explorer, RecordingExplorer):
        raise TypeError("the probabilities of actions are known to a RecordingExplorer only")
    actor.start()
    while True:
        actor.send()
        probability = explorer.probability[None]
        rollout, _ = actor.receive()
        yield from recorder.add(rollout, probability)
