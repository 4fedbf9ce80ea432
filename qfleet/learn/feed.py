"""The feed: rollouts in, batches out, at the gate's pace; and the learner as a worker. Shapes: T rows, B lanes."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from qfleet.data import Array, Batch, Board, Channel, Rollout, State, Tick
from qfleet.learn.gate import Gate
from qfleet.learn.learner import Learner, NonFiniteUpdate
from qfleet.nets import Normalize, QNet
from qfleet.replay import Replay

SKIPS_IN_A_ROW = 5


class Diverging(Exception):
    """Several updates in a row were not finite; `batch` is the last one tried."""

    def __init__(self, cause: str, batch: Batch) -> None:
        super().__init__(cause)
        self.batch = batch


class Observer:
    """Keeps the network's running normalisation up to date with what comes in."""

    def __init__(self, net: QNet, lanes: int, discount: float) -> None:
        self.net, self.discount = net, discount
        self.returns = np.zeros(lanes, np.float64)  # discounted return so far, the scale that rewards are divided by

    def observe(self, rollout: Rollout) -> None:
        """Fold a rollout's observations and returns into the statistics; final rows carry no reward."""
        if self.net.normalize is not None:
            self.net.normalize.observe(torch.from_numpy(rollout.obs).flatten(0, 1))
        if self.net.rewards is not None:
            for reward, last in zip(rollout.reward, rollout.last, strict=True):
                self.observe_reward(self.net.rewards, reward, last)

    def observe_reward(self, statistics: Normalize, reward: Array, last: Array) -> None:
        """One row of rewards."""
        self.returns = np.where(last, 0.0, self.returns * self.discount + reward)
        statistics.observe(torch.from_numpy(self.returns[~last]))


class Feed:
    """Replay behind the gate: counts what came in and lets batches out in the plan's ratio."""

    def __init__(self, replay: Replay, gate: Gate, observer: Observer, batch_size: int) -> None:
        self.replay, self.gate, self.observer, self.batch_size = replay, gate, observer, batch_size
        self.steps = 0
        self.refill = 0  # items the replay must hold again before learning goes on

    def insert(self, rollout: Rollout) -> None:
        """Remember a rollout."""
        self.steps += self.replay.add(rollout)
        self.observer.observe(rollout)

    def take(self, expected: int) -> Batch | None:
        """A batch if the gate is open, counting steps that are surely coming as well."""
        if len(self.replay) < self.refill:
            self.gate.forgive(self.steps + expected)
            return None
        self.refill = 0
        if not self.gate.is_open(self.steps + expected):
            return None
        return self.replay.sample(self.batch_size)

    def state_dict(self) -> State:
        """Counters, gate, replay without its rows, and the reward scale's memory."""
        return {
            "steps": self.steps,
            "gate": self.gate.state_dict(),
            "replay": self.replay.state_dict(),
            "returns": self.observer.returns.copy(),
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Come back to that moment."""
        self.steps = int(state["steps"])
        self.gate.load_state_dict(state["gate"])
        self.observer.returns = np.array(state["returns"])
        if with_replay:
            self.replay.load_state_dict(state["replay"])
        else:
            self.replay.clear()
            # Half the capacity: short episodes may keep a ring of frames from ever being quite full.
            self.refill = min(self.gate.start_steps, self.replay.capacity // 2, self.steps)


def drain(channel: Channel, feed: Feed) -> None:
    """Remember everything that waits."""
    while (rollout := channel.get()) is not None:
        feed.insert(rollout)


def learning(
    learner: Learner, feed: Feed, channel: Channel, board: Board, expected: Callable[[], int] = lambda: 0
) -> Iterator[Tick]:
    """The learner as a worker: one update per tick while the gate is open.

    `expected` counts steps under way that will surely arrive: their updates are made while the worlds step, so that
    after every receive exactly floor(ratio x steps past the start) updates were made.
    """
    weights = learner.net.state_dict()
    board.publish(learner.updates + 1, weights)
    skipped = 0
    while True:
        drain(channel, feed)
        batch = feed.take(expected())
        if batch is None:
            yield Tick(busy=False)
            continue
        try:
            report = learner.update(batch)
        except NonFiniteUpdate as cause:
            skipped += 1
            if skipped == SKIPS_IN_A_ROW:
                raise Diverging(str(cause), batch) from cause
            yield Tick(busy=True, stats={"skipped": str(cause)})
            continue
        skipped = 0
        feed.gate.passed()
        feed.replay.update(batch.ids, report.priority)
        board.publish(learner.updates + 1, weights)
        yield Tick(busy=True, stats={"loss": report.loss, **report.stats})
