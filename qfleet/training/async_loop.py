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

    def __init__(self, feed: BatchSource, history: HistoryLog) -> None:
        self.feed = feed
        self.history = history

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    def take(self, expected: int) -> Batch | Sequences | None:
        """The next batch."""
        batch = self.feed.take(expected)
        # A remote replay drew it some time ago and notes that itself; ids of fresh experience are places in its block.
        if batch is not None and isinstance(self.feed, ReplaySource) and isinstance(self.feed.replay, Replay):
            self.history.note("learner", "sampled", ids=batch.ids[:NOTED_IDS].tolist())
        return batch

    def learned(self, batch: Batch | Sequences, priority: Array) -> None:
        """It was learned from."""
        self.feed.learned(batch, priority)
        if isinstance(self.feed, ReplaySource):
            gate = self.feed.gate
            steps = self.feed.steps
            self.history.note("learner", "update", number=gate.updates, env_steps=steps, forgiven=gate.forgiven)


class AsyncLoop:
    """Turns the learner of a line whose actors are a fleet."""

    def __init__(self, line: Components, fleet: RemoteActors, skipped: int = 0, watch: Stopwatch | None = None) -> None:
        self.line = line
        self.fleet = fleet
        self.shelf = LatestWeights()
        self.watch = watch or Stopwatch()
        self.heard = False  # `heard`: has a rollout come yet?
        feed = RecordedSource(line.feed, fleet.history) if fleet.keeps_history else line.feed
        self.learner = learning(line.learner, feed, RolloutQueue(1), self.shelf, skipped=skipped, watch=self.watch)
        # From the first moment on: an evaluation may come before the first step.
        fleet.policy.load(0, line.learner.weights())
        fleet.publish(line.learner.updates + 1, line.learner.weights())
        fleet.start()

    def turn(self) -> Iterator[Tick]:
        """One rollout and the updates that go with it; an empty one if none has come."""
        self.fleet.tend()
        yield Tick(busy=True, stats=self.fleet.news())
        yield from self.update()
        if (rollout := self.take_in()) is None:
            self.nap()
            return
        stats = {"episodes": rollout.finished, "lag": self.fleet.version - rollout.version}
        yield Tick(busy=True, stats=stats)
        yield from self.update()

    def take_in(self) -> Rollout | None:
        """The next rollout, remembered."""
        with self.watch.insert:
            rollout = self.fleet.collect()
            if rollout is not None:
                self.fleet.take_in(rollout)
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
            self.fleet.tend()  # a turn may be long, and a death is to be seen within 2 s
            yield tick
        if self.line.learner.updates > before:
            with self.watch.sync:
                self.fleet.publish(self.shelf.version, self.shelf.weights)

    def tend(self) -> None:
        """Replace actors that failed."""
        self.fleet.tend()
