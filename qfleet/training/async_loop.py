"""The asynchronous loop: this process learns while actors act in other processes.

A turn inserts one rollout and makes the updates that it allows; then nothing is under way, as after a turn of `inline`.
Rollouts queue up, and actors wait while the queue is full: that is all the back-pressure there is.
"""

import time
from collections.abc import Iterator
from typing import Any

from qfleet.audit.history import NOTED_IDS, HistoryLog
from qfleet.build.components import Components, RemoteActors
from qfleet.data import Array, Batch, Rollout, Sequences, Tick
from qfleet.learn import BatchSource, ReplaySource, run_learner
from qfleet.replay import Replay
from qfleet.system.timers import Stopwatch
from qfleet.training.channels import LatestWeights, RolloutQueue

NAP_SECONDS = 0.001


class RecordedSource:
    """A batch source whose batches and updates are recorded in the history of operations."""

    def __init__(self, batch_source: BatchSource, history: HistoryLog) -> None:
        self.batch_source = batch_source
        self.history = history

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch_source, name)

    def next_batch(self, in_flight_steps: int) -> Batch | Sequences | None:
        """The next batch."""
        batch = self.batch_source.next_batch(in_flight_steps)
        # A remote replay sampled it earlier and records that itself; ids of fresh experience are places in its block.
        here = isinstance(self.batch_source, ReplaySource) and isinstance(self.batch_source.replay, Replay)
        if batch is not None and here:
            self.history.note("learner", "sampled", ids=batch.ids[:NOTED_IDS].tolist())
        return batch

    def after_update(self, batch: Batch | Sequences, priority: Array) -> None:
        """Pass on the batch's new priorities, and record the update."""
        self.batch_source.after_update(batch, priority)
        if isinstance(self.batch_source, ReplaySource):
            limiter = self.batch_source.limiter
            steps = self.batch_source.steps
            self.history.note("learner", "update", number=limiter.updates, env_steps=steps, forgiven=limiter.forgiven)


class AsyncLoop:
    """Runs the learner beside a pool of actors."""

    def __init__(
        self, components: Components, pool: RemoteActors, skipped: int = 0, watch: Stopwatch | None = None
    ) -> None:
        self.components = components
        self.pool = pool
        self.latest_weights = LatestWeights()
        self.watch = watch or Stopwatch()
        self.received_any = False
        batch_source = components.batch_source
        if pool.keeps_history:
            batch_source = RecordedSource(batch_source, pool.history)
        parts = (components.learner, batch_source, RolloutQueue(1), self.latest_weights)
        self.learner = run_learner(*parts, skipped=skipped, watch=self.watch, update=components.update)
        # At once: an evaluation may come before the first step.
        pool.policy.load_weights(0, components.learner.weights())
        pool.publish(components.learner.updates + 1, components.learner.weights())
        pool.start()

    def turn(self) -> Iterator[Tick]:
        """Insert one rollout and make its updates; wait a moment if none has arrived."""
        self.pool.poll()
        yield Tick(busy=True, stats=self.pool.drain_stats())
        yield from self.update()
        if (rollout := self.insert_next()) is None:
            self.nap()
            return
        stats = {"episodes": rollout.finished, "lag": self.pool.version - rollout.version}
        yield Tick(busy=True, stats=stats)
        yield from self.update()

    def insert_next(self) -> Rollout | None:
        """Insert the next rollout into the replay, if one has arrived."""
        with self.watch.insert:
            rollout = self.pool.collect()
            if rollout is not None:
                self.pool.insert(rollout)
                self.received_any = True
        return rollout

    def nap(self) -> None:
        """Wait a moment for experience; the time in which actors start does not count as idle."""
        if not self.received_any:
            time.sleep(NAP_SECONDS)
            return
        with self.watch.idle:
            time.sleep(NAP_SECONDS)

    def update(self) -> Iterator[Tick]:
        """Update until the limiter stops it, then publish the new weights."""
        before = self.components.learner.updates
        while (tick := next(self.learner)).busy:
            self.pool.poll()  # a turn may be long, and a dead actor is to be noticed within 2 s
            yield tick
        if self.components.learner.updates > before:
            with self.watch.sync:
                self.pool.publish(self.latest_weights.version, self.latest_weights.weights)

    def poll(self) -> None:
        """Replace actors that failed."""
        self.pool.poll()
