"""The runtime of a fleet: learning goes on here while actors act elsewhere.

A turn takes one rollout in and makes the updates it allows; then everything is at rest, as after a turn of `inline`.
Rollouts wait until their turn comes, and actors wait for room: that is all the back-pressure there is.
"""

import time
from collections.abc import Iterator
from typing import Any

from qfleet.audit.history import NOTED_IDS, HistoryLog
from qfleet.build.components import Components, RemoteActors
from qfleet.data import Array, Batch, Rollout, Sequences, Tick
from qfleet.learn import BatchSource, ReplaySource, learning
from qfleet.replay import Replay
from qfleet.system.timers import Stopwatch
from qfleet.training.channels import LatestWeights, RolloutQueue

NAP_SECONDS = 0.001


class RecordedSource:
    """A feed whose batches and updates are written down."""

    def __init__(self, batch_source: BatchSource, history: HistoryLog) -> None:
        self.batch_source = batch_source
        self.history = history

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch_source, name)

    def take(self, expected: int) -> Batch | Sequences | None:
        """The next batch."""
        batch = self.batch_source.take(expected)
        # A remote replay drew it some time ago and notes that itself; ids of fresh experience are places in its block.
        if (
            batch is not None
            and isinstance(self.batch_source, ReplaySource)
            and isinstance(self.batch_source.replay, Replay)
        ):
            self.history.note("learner", "sampled", ids=batch.ids[:NOTED_IDS].tolist())
        return batch

    def learned(self, batch: Batch | Sequences, priority: Array) -> None:
        """It was learned from."""
        self.batch_source.learned(batch, priority)
        if isinstance(self.batch_source, ReplaySource):
            limiter = self.batch_source.limiter
            steps = self.batch_source.steps
            self.history.note("learner", "update", number=limiter.updates, env_steps=steps, forgiven=limiter.forgiven)


class AsyncLoop:
    """Turns the learner of a line whose actors are a fleet."""

    def __init__(self, line: Components, pool: RemoteActors, skipped: int = 0, watch: Stopwatch | None = None) -> None:
        self.line = line
        self.pool = pool
        self.shelf = LatestWeights()
        self.watch = watch or Stopwatch()
        self.heard = False  # `heard`: has a rollout come yet?
        batch_source = RecordedSource(line.batch_source, pool.history) if pool.keeps_history else line.batch_source
        self.learner = learning(
            line.learner, batch_source, RolloutQueue(1), self.shelf, skipped=skipped, watch=self.watch
        )
        # From the first moment on: an evaluation may come before the first step.
        pool.policy.load(0, line.learner.weights())
        pool.publish(line.learner.updates + 1, line.learner.weights())
        pool.start()

    def turn(self) -> Iterator[Tick]:
        """One rollout and the updates that go with it; an empty one if none has come."""
        self.pool.tend()
        yield Tick(busy=True, stats=self.pool.news())
        yield from self.update()
        if (rollout := self.take_in()) is None:
            self.nap()
            return
        stats = {"episodes": rollout.finished, "lag": self.pool.version - rollout.version}
        yield Tick(busy=True, stats=stats)
        yield from self.update()

    def take_in(self) -> Rollout | None:
        """The next rollout, remembered."""
        with self.watch.insert:
            rollout = self.pool.collect()
            if rollout is not None:
                self.pool.take_in(rollout)
                self.heard = True
        return rollout

    def nap(self) -> None:
        """Wait a moment for experience. Before the first of it actors are only starting, which is nobody's idleness."""
        if not self.heard:
            time.sleep(NAP_SECONDS)
            return
        with self.watch.idle:
            time.sleep(NAP_SECONDS)

    def update(self) -> Iterator[Tick]:
        """Updates until the gate shuts; then everyone may have the new weights."""
        before = self.line.learner.updates
        while (tick := next(self.learner)).busy:
            self.pool.tend()  # a turn may be long, and a death is to be seen within 2 s
            yield tick
        if self.line.learner.updates > before:
            with self.watch.sync:
                self.pool.publish(self.shelf.version, self.shelf.weights)

    def tend(self) -> None:
        """Replace actors that failed."""
        self.pool.tend()
