"""Sources of batches: rollouts in, batches out, at the limiter's rate; the learner's loop. Shapes: T rows, B lanes."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from qfleet.data import Array, Batch, Channel, Report, Rollout, Sequences, State, Tick, WeightsBoard
from qfleet.data.state_reader import FLOATS, saved_array, saved_count, saved_value
from qfleet.learn.count_bonus import VisitCounts
from qfleet.learn.learner import Learner, NonFiniteUpdate
from qfleet.learn.offline.mixed_batches import RecordedShare
from qfleet.learn.plasticity import Anneal
from qfleet.learn.population import PopulationLearner
from qfleet.learn.rate_limiter import RateLimiter
from qfleet.nets import QNet
from qfleet.replay import ALL, Replay
from qfleet.replay.drawn_items import DrawnItems
from qfleet.system.timers import Stopwatch

MAX_CONSECUTIVE_SKIPS = 5


class Diverging(Exception):
    """Several consecutive updates were not finite; `batch` is the last one."""

    def __init__(self, cause: str, batch: Batch | Sequences) -> None:
        super().__init__(cause)
        self.batch = batch


class NormalizationStatistics:
    """Updates the network's running normalisation with every rollout."""

    def __init__(self, net: QNet, lanes: int, discount: float, *, clip: bool = False) -> None:
        self.net = net
        self.discount = discount
        self.clip = clip  # whether the replay clips rewards
        self.returns = np.zeros(lanes, np.float64)  # discounted return so far; rewards are divided by its deviation

    def observe(self, rollout: Rollout, lanes: slice = ALL) -> None:
        """Update the statistics with observations and returns of these lanes; final rows have no reward."""
        if self.net.normalize is not None:
            self.net.normalize.observe(torch.from_numpy(rollout.obs).flatten(0, 1))
        if self.net.rewards is not None:
            rewards = np.clip(rollout.reward, -1.0, 1.0) if self.clip else rollout.reward
            for reward, last in zip(rewards, rollout.last, strict=True):
                returns = self.returns[lanes] = np.where(last, 0.0, self.returns[lanes] * self.discount + reward)
                self.net.rewards.observe(torch.from_numpy(returns[~last]))

    def reset_returns(self, lanes: slice) -> None:
        """Start new returns in these lanes, whose episodes are over."""
        self.returns[lanes] = 0.0


class StepRecorder(Protocol):
    """Records everything that is inserted into a batch source."""

    def add(self, rollout: Rollout) -> None:
        """Record a rollout."""

    def seal(self, worker: int) -> None:
        """An actor is lost: its episodes end where they are."""


class BatchSource(Protocol):
    """A source of batches to learn from."""

    steps: int
    replay: Replay
    recorder: StepRecorder | None

    def insert(self, rollout: Rollout) -> None:
        """Add a rollout."""

    def seal(self, worker: int) -> int:
        """End the episodes of a lost actor; returns the number of its steps whose outcome stays unknown."""

    def next_batch(self, in_flight_steps: int) -> Batch | Sequences | None:
        """A batch if one is due, counting `in_flight_steps` as already made; else None."""

    def after_update(self, batch: Batch | Sequences, priority: Array) -> None:
        """Record that the batch was learned from, with the new priorities of its items."""

    def set_priorities(self, ids: Array, priority: Array) -> None:
        """Set the priorities of items of an earlier batch."""

    def take_metrics(self) -> dict[str, float | None]:
        """Metrics for a progress row; means are over the time since the last call."""

    def state_dict(self) -> State:
        """All state but the replay's rows."""

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Restore a saved state; without the replay, start an empty one."""

    def close(self) -> None:
        """Release what it holds."""


@runtime_checkable
class SizedSource(BatchSource, Protocol):
    """A source whose batches may change their size during a run."""

    batch_size: int


def source_metrics(replay: Replay, bonus: VisitCounts | None) -> dict[str, float | None]:
    """The mean bonus and the share of filtered items, if the plan has them."""
    filtered = {} if replay.filter is None else {"filtered": replay.filter.share}
    return {**({} if bonus is None else bonus.take_metrics()), **filtered}


def lanes_of(worker: int, lanes_per_actor: int | None) -> slice:
    """The lanes of one of several actors with `lanes_per_actor` lanes each; None: there is one actor."""
    return ALL if lanes_per_actor is None else slice(worker * lanes_per_actor, (worker + 1) * lanes_per_actor)


def insert_with_bonus(
    rollout: Rollout, replay: Replay, normalization: NormalizationStatistics, bonus: VisitCounts | None
) -> int:
    """Add a rollout, with its bonus if there is one, to replay and statistics; returns its number of steps."""
    lanes = lanes_of(rollout.source[0], rollout.last.shape[1])
    with_bonus = rollout if bonus is None else bonus.with_bonus(rollout)
    normalization.observe(with_bonus, lanes)
    return replay.add(with_bonus, rollout.reward, lanes)


def seal_lanes(lanes: slice, replay: Replay, normalization: NormalizationStatistics) -> int:
    """End the episodes of a lost actor's lanes; returns the number of its steps whose outcome stays unknown."""
    normalization.reset_returns(lanes)
    return replay.seal(lanes)


@dataclass(eq=False)
class ReplaySource:
    """Samples batches from the replay, in the plan's ratio of updates to steps."""

    replay: Replay
    limiter: RateLimiter
    normalization: NormalizationStatistics
    batch_size: int
    anneal: Anneal | None = None
    bonus: VisitCounts | None = None
    num_members: int = 1  # each gets a separate batch
    lanes_per_actor: int | None = None  # None: there is one actor
    recorded: RecordedShare | None = None  # what a part of every batch is drawn from
    first_own: int = 0  # items before this one were loaded into the replay
    steps: int = 0
    refill: int = 0  # items that an emptied replay must hold before learning continues
    drawn: DrawnItems = field(default_factory=DrawnItems)
    recorder: StepRecorder | None = None

    def __post_init__(self) -> None:
        self.update_n_step()

    def update_n_step(self) -> None:
        """Set the annealed n and gamma for the current number of updates."""
        if self.anneal is not None:
            self.replay.n_step = self.anneal.n_step(self.limiter.updates)
            if self.recorded is not None:
                self.recorded.use_n_step(self.replay.n_step)

    def insert(self, rollout: Rollout) -> None:
        """Add a rollout to the replay."""
        if self.recorder is not None:
            self.recorder.add(rollout)
        self.steps += insert_with_bonus(rollout, self.replay, self.normalization, self.bonus)

    def seal(self, worker: int) -> int:
        """End the episodes of a lost actor."""
        if self.recorder is not None:
            self.recorder.seal(worker)
        return seal_lanes(lanes_of(worker, self.lanes_per_actor), self.replay, self.normalization)

    def next_batch(self, in_flight_steps: int) -> Batch | Sequences | None:
        """A batch if the limiter allows an update, counting `in_flight_steps` as already made."""
        if self.refill and self.replay.items_added < self.refill:
            self.limiter.forgive(self.steps + in_flight_steps)
            return None
        self.refill = 0
        if not self.limiter.can_update(self.steps + in_flight_steps):
            return None
        if self.recorded is not None:
            return self.recorded.sample(self.replay, self.batch_size, self.num_members)
        return self.replay.sample(self.batch_size * self.num_members)

    def after_update(self, batch: Batch | Sequences, priority: Array) -> None:
        """Count the update and set the priorities of its items."""
        self.limiter.count_update()
        self.drawn.count(batch.ids, self.steps, self.first_own)
        self.set_priorities(batch.ids, priority)
        self.update_n_step()

    def set_priorities(self, ids: Array, priority: Array) -> None:
        """Set priorities, where they are known."""
        known, values = known_priorities(ids, priority)
        if self.recorded is None:
            return self.replay.update(known, values)
        own = known >= 0
        self.recorded.update(known[~own], values[~own])
        self.replay.update(known[own], values[own])
        return None

    def take_metrics(self) -> dict[str, float | None]:
        """The mean age in steps of the items drawn; the shares of recorded and of filtered items; the mean bonus."""
        age = self.drawn.age(self.steps, self.replay.head - self.first_own)
        has_data = self.recorded is not None or self.first_own > 0
        data = {"replay_recorded": self.drawn.recorded_share()} if has_data else {}
        self.drawn = DrawnItems()
        return {"replay_age": age, **data, **source_metrics(self.replay, self.bonus)}

    def state_dict(self) -> State:
        """Counters, limiter, replay without its rows, returns so far and visit counts."""
        return {
            "steps": self.steps,
            "gate": self.limiter.state_dict(),
            "batch_size": self.batch_size,
            "replay": self.replay.state_dict(),
            "returns": self.normalization.returns.copy(),
            "refill": self.refill,
            "drawn": asdict(self.drawn),
            **({} if self.bonus is None else {"bonus": self.bonus.state_dict()}),
            **({} if self.recorded is None else {"recorded": self.recorded.state_dict()}),
            **({"first_own": self.first_own} if self.first_own else {}),
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Restore a saved state; older versions saved no `batch_size`, `refill` or `drawn`."""
        self.steps = saved_count(state, "steps")
        self.limiter.load_state_dict(state["gate"])
        if "batch_size" in state:
            self.batch_size = saved_count(state, "batch_size")
        self.refill = saved_count(state, "refill") if "refill" in state else 0
        self.drawn = DrawnItems.from_state(state["drawn"]) if "drawn" in state else DrawnItems()
        self.first_own = saved_count(state, "first_own") if "first_own" in state else 0
        if self.recorded is not None:
            self.recorded.load_state_dict(saved_value(state, "recorded"))
        self.normalization.returns = saved_array(state, "returns", FLOATS, self.normalization.returns.shape).copy()
        self.update_n_step()
        if self.bonus is not None:
            self.bonus.load_state_dict(saved_value(state, "bonus"))
        if with_replay:
            self.replay.load_state_dict(state["replay"])
        else:
            self.replay.clear()
            # At most half the capacity: with short episodes a ring of frames may never be quite full.
            start_items = self.replay.cut.items_in(min(self.limiter.start_steps, self.steps))
            self.refill = min(start_items, self.replay.capacity // 2)

    def close(self) -> None:
        """Close the replay."""
        self.replay.close()


def known_priorities(ids: Array, priority: Array) -> tuple[Array, Array]:
    """The items with a priority; those of a lost learner's part are NaN."""
    missing = np.isnan(priority)
    return (ids[~missing], priority[~missing]) if missing.any() else (ids, priority)


def drain(channel: Channel, batch_source: BatchSource) -> None:
    """Add all waiting rollouts to the source."""
    while (rollout := channel.get()) is not None:
        batch_source.insert(rollout)


def run_learner(
    learner: Learner | PopulationLearner,
    batch_source: BatchSource,
    channel: Channel,
    board: WeightsBoard,
    in_flight_steps: Callable[[], int] = lambda: 0,
    skipped: int = 0,
    watch: Stopwatch | None = None,
    update: Callable[[Batch | Sequences], Report] | None = None,
) -> Iterator[Tick]:
    """The learner as a worker: one update per tick while the source has a batch.

    `in_flight_steps` counts steps that were sent but not received: their updates are made while the environments step,
    so that after every receive exactly floor(ratio x steps past the start) updates were made. `skipped` is the number
    of consecutive updates so far that were not finite. `update` is that of the group whose rank 0 `learner` is, if any.
    """
    watch = watch or Stopwatch()
    update = update or learner.update
    weights = learner.weights()
    board.publish(learner.updates + 1, weights)
    while True:
        with watch.insert:
            drain(channel, batch_source)
        with watch.sample:
            batch = batch_source.next_batch(in_flight_steps())
        if batch is None:
            yield Tick(busy=False)
            continue
        try:
            with watch.update:
                report = update(batch)
        except NonFiniteUpdate as cause:
            skipped += 1
            if skipped >= MAX_CONSECUTIVE_SKIPS:
                raise Diverging(str(cause), batch) from cause
            yield Tick(busy=True, stats={"skipped": str(cause)})
            continue
        skipped = 0
        with watch.sample:
            batch_source.after_update(batch, report.priority)
            for ids, priority in report.late:
                batch_source.set_priorities(ids, priority)
        with watch.sync:
            board.publish(learner.updates + 1, weights)
        yield Tick(busy=True, stats={"loss": report.loss, **report.stats})
