"""The feed: rollouts in, batches out, at the gate's pace; and the learner as a worker. Shapes: T rows, B lanes."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import torch

from qfleet.data import Array, Batch, Channel, Rollout, Sequences, State, Tick, WeightsBoard
from qfleet.data.state_reader import FLOATS, saved_array, saved_count, saved_value
from qfleet.learn.count_bonus import VisitCounts
from qfleet.learn.learner import Learner, NonFiniteUpdate
from qfleet.learn.plasticity import Anneal
from qfleet.learn.population import PopulationLearner
from qfleet.learn.rate_limiter import RateLimiter
from qfleet.nets import Normalize, QNet
from qfleet.replay import ALL, Replay
from qfleet.system.timers import Stopwatch

SKIPS_IN_A_ROW = 5


class Diverging(Exception):
    """Several updates in a row were not finite; `batch` is the last one tried."""

    def __init__(self, cause: str, batch: Batch | Sequences) -> None:
        super().__init__(cause)
        self.batch = batch


class Observer:
    """Keeps the network's running normalisation up to date with what is learned from."""

    def __init__(self, net: QNet, lanes: int, discount: float, *, clip: bool = False) -> None:
        self.net = net
        self.discount = discount
        self.clip = clip  # `clip`: rewards will be, when they are cut
        self.returns = np.zeros(lanes, np.float64)  # discounted return so far, the scale that rewards are divided by

    def observe(self, rollout: Rollout, lanes: slice = ALL) -> None:
        """Fold observations and returns of these lanes into the statistics; final rows carry no reward."""
        if self.net.normalize is not None:
            self.net.normalize.observe(torch.from_numpy(rollout.obs).flatten(0, 1))
        if self.net.rewards is not None:
            rewards = np.clip(rollout.reward, -1.0, 1.0) if self.clip else rollout.reward
            for reward, last in zip(rewards, rollout.last, strict=True):
                self.observe_reward(self.net.rewards, reward, last, lanes)

    def observe_reward(self, statistics: Normalize, reward: Array, last: Array, lanes: slice = ALL) -> None:
        """One row of rewards."""
        returns = self.returns[lanes] = np.where(last, 0.0, self.returns[lanes] * self.discount + reward)
        statistics.observe(torch.from_numpy(returns[~last]))

    def forget(self, lanes: slice) -> None:
        """The episodes of these lanes are over."""
        self.returns[lanes] = 0.0


class BatchSource(Protocol):
    """Where batches come from."""

    steps: int
    replay: Replay

    def insert(self, rollout: Rollout) -> None:
        """Take a rollout in."""
        ...

    def seal(self, worker: int) -> int:
        """This actor is gone: nothing joins what it sent to what comes next. Steps whose outcome is now unknown."""
        ...

    def take(self, expected: int) -> Batch | Sequences | None:
        """A batch if one is due, counting steps that are surely coming as well."""
        ...

    def learned(self, batch: Batch | Sequences, priority: Array) -> None:
        """The batch was learned from."""
        ...

    def news(self) -> dict[str, float | None]:
        """What a progress row tells of it; means are since it was last asked."""
        ...

    def state_dict(self) -> State:
        """All but the replay's rows."""
        ...

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Come back to that moment."""
        ...


def news_of(replay: Replay, bonus: VisitCounts | None) -> dict[str, float | None]:
    """The bonus paid and the share of items kept out, where the plan has such things."""
    filtered = {} if replay.filter is None else {"filtered": replay.filter.share}
    return {**({} if bonus is None else bonus.news()), **filtered}


def lanes_of(worker: int, width: int) -> slice:
    """The lanes of one of several actors with `width` lanes each."""
    return slice(worker * width, (worker + 1) * width)


def add_paid(rollout: Rollout, replay: Replay, observer: Observer, bonus: VisitCounts | None) -> int:
    """Remember and observe a rollout, with its bonus if there is one; returns how many steps came in."""
    lanes = lanes_of(rollout.source[0], rollout.last.shape[1])
    paid = rollout if bonus is None else bonus.add(rollout)
    observer.observe(paid, lanes)
    return replay.add(paid, rollout.reward, lanes)


def seal(lanes: slice, replay: Replay, observer: Observer) -> int:
    """The actor of these lanes is gone; returns how many of its steps have no outcome."""
    observer.forget(lanes)
    return replay.seal(lanes)


@dataclass
class DrawnItems:
    """What was drawn since the last news: how many items, their serial numbers and the steps made by then, summed."""

    items: int = 0
    serials: int = 0
    steps: int = 0

    def count(self, ids: Array, steps: int) -> None:
        """One batch."""
        self.items += len(ids)
        self.serials += int(ids.sum())
        self.steps += len(ids) * steps

    def age(self, steps: int, head: int) -> float | None:
        """How many steps ago the mean item came in, when so many steps have made `head` items so far."""
        if not self.items or not head:  # a replay that was not saved begins anew
            return None
        return max(0.0, (self.steps - self.serials * steps / head) / self.items)


class ReplaySource:
    """Replay behind the gate: counts what came in and lets batches out in the plan's ratio."""

    def __init__(
        self,
        replay: Replay,
        limiter: RateLimiter,
        observer: Observer,
        batch_size: int,
        anneal: Anneal | None = None,
        bonus: VisitCounts | None = None,
        members: int = 1,
        width: int | None = None,
    ) -> None:
        self.replay = replay
        self.limiter = limiter
        self.observer = observer
        self.batch_size = batch_size
        # each member gets a batch of its own
        self.anneal = anneal
        self.bonus = bonus
        self.members = members
        self.width = width or len(observer.returns)  # lanes of one actor
        self.steps = 0
        self.refill = 0  # items that must have been ready again before learning goes on
        self.drawn = DrawnItems()
        self.refold()

    def refold(self) -> None:
        """Sum rewards as so many updates ask for."""
        if self.anneal is not None:
            self.replay.fold = self.anneal.fold(self.limiter.updates)

    def insert(self, rollout: Rollout) -> None:
        """Remember a rollout."""
        self.steps += add_paid(rollout, self.replay, self.observer, self.bonus)

    def seal(self, worker: int) -> int:
        """End the episodes of an actor that is gone."""
        return seal(lanes_of(worker, self.width), self.replay, self.observer)

    def take(self, expected: int) -> Batch | Sequences | None:
        """A batch if the gate is open, counting steps that are surely coming as well."""
        if self.refill and self.replay.ready < self.refill:
            self.limiter.forgive(self.steps + expected)
            return None
        self.refill = 0
        if not self.limiter.is_open(self.steps + expected):
            return None
        return self.replay.sample(self.batch_size * self.members)

    def learned(self, batch: Batch | Sequences, priority: Array) -> None:
        """Count it, and remember how surprising its items still are."""
        self.limiter.passed()
        self.drawn.count(batch.ids, self.steps)
        self.replay.update(*known(batch.ids, priority))
        self.refold()

    def news(self) -> dict[str, float | None]:
        """How old the items drawn were, in steps; the bonus paid and the share of items kept out."""
        age = self.drawn.age(self.steps, self.replay.head)
        self.drawn = DrawnItems()
        return {"replay_age": age, **news_of(self.replay, self.bonus)}

    def state_dict(self) -> State:
        """Counters, gate, replay without its rows, and the memory of rewards and visits."""
        return {
            "steps": self.steps,
            "gate": self.limiter.state_dict(),
            "batch_size": self.batch_size,
            "replay": self.replay.state_dict(),
            "returns": self.observer.returns.copy(),
            "refill": self.refill,
            "drawn": asdict(self.drawn),
            **({} if self.bonus is None else {"bonus": self.bonus.state_dict()}),
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Come back to that moment; an older version's batch was the plan's own, it kept no `refill`, no `drawn`."""
        self.steps = saved_count(state, "steps")
        self.limiter.load_state_dict(state["gate"])
        if "batch_size" in state:
            self.batch_size = saved_count(state, "batch_size")
        self.refill = saved_count(state, "refill") if "refill" in state else 0
        drawn = saved_value(state, "drawn") if "drawn" in state else asdict(DrawnItems())
        self.drawn = DrawnItems(*(saved_count(drawn, name, 2**62) for name in ("items", "serials", "steps")))
        self.observer.returns = saved_array(state, "returns", FLOATS, self.observer.returns.shape).copy()
        self.refold()
        if self.bonus is not None:
            self.bonus.load_state_dict(saved_value(state, "bonus"))
        if with_replay:
            self.replay.load_state_dict(state["replay"])
        else:
            self.replay.clear()
            # Half the capacity: short episodes may keep a ring of frames from ever being quite full.
            wanted = self.replay.cut.items_in(min(self.limiter.start_steps, self.steps))
            self.refill = min(wanted, self.replay.capacity // 2)


def known(ids: Array, priority: Array) -> tuple[Array, Array]:
    """The items whose priorities are known: a learner that is lost takes those of its part along."""
    missing = np.isnan(priority)
    return (ids[~missing], priority[~missing]) if missing.any() else (ids, priority)


def drain(channel: Channel, batch_source: BatchSource) -> None:
    """Remember everything that waits."""
    while (rollout := channel.get()) is not None:
        batch_source.insert(rollout)


def learning(
    learner: Learner | PopulationLearner,
    batch_source: BatchSource,
    channel: Channel,
    board: WeightsBoard,
    expected: Callable[[], int] = lambda: 0,
    skipped: int = 0,
    watch: Stopwatch | None = None,
) -> Iterator[Tick]:
    """The learner as a worker: one update per tick while the gate is open.

    `expected` counts steps under way that will surely arrive: their updates are made while the worlds step, so that
    after every receive exactly floor(ratio x steps past the start) updates were made. `skipped` updates in a row were
    not finite so far.
    """
    watch = watch or Stopwatch()
    weights = learner.weights()
    board.publish(learner.updates + 1, weights)
    while True:
        with watch.insert:
            drain(channel, batch_source)
        with watch.sample:
            batch = batch_source.take(expected())
        if batch is None:
            yield Tick(busy=False)
            continue
        try:
            with watch.update:
                report = learner.update(batch)
        except NonFiniteUpdate as cause:
            skipped += 1
            if skipped >= SKIPS_IN_A_ROW:
                raise Diverging(str(cause), batch) from cause
            yield Tick(busy=True, stats={"skipped": str(cause)})
            continue
        skipped = 0
        with watch.sample:
            batch_source.learned(batch, report.priority)
            for ids, priority in report.late:
                batch_source.replay.update(*known(ids, priority))
        with watch.sync:
            board.publish(learner.updates + 1, weights)
        yield Tick(busy=True, stats={"loss": report.loss, **report.stats})
