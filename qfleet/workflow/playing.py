"""Playing and recording with one actor until there is enough. Shapes: B lanes."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import numpy as np

from qfleet.act import Actor, Policy
from qfleet.act.mixture import Mixture, PlayedPolicy
from qfleet.act.recording import RolloutRecorder
from qfleet.build.seeds import EXPLORE, stream
from qfleet.data import Array, Rollout, World
from qfleet.data.joint_actions import MAX_JOINT_ACTIONS
from qfleet.datasets.format import BlockWriter, Description, EpisodeBlock, WrittenFiles, spec_columns
from qfleet.envs import TRAIN, make_world
from qfleet.errors import UsageError
from qfleet.plan.schema import Plan

SHOW_ROWS = 16  # from one look at faults and progress to the next
Show = Callable[[int, int], object]  # is given the episodes and steps so far


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is recorded: evenly many episodes of all lanes, or steps; `cut`: exactly that number."""

    episodes: int | None = None
    steps: int | None = None
    cut: bool = False

    def share(self, number: int, num_parts: int) -> "Amount":
        """The part of one of several actors; of episodes the lanes' numbers say which are whose."""
        if self.steps is None:
            return self
        return Amount(None, self.steps // num_parts + (number < self.steps % num_parts), self.cut)


@dataclass(eq=False)
class Recording:
    """An actor whose steps are recorded."""

    actor: Actor
    mixture: Mixture
    recorder: RolloutRecorder
    amount: Amount
    show: Show = lambda episodes, steps: None
    episodes: int = 0  # that have ended
    steps: int = 0
    ended_steps: int = 0  # of episodes that have ended
    faults: int = 0  # of environments

    def __post_init__(self) -> None:
        recorder = self.recorder
        self.lane_steps = np.zeros(recorder.num_lanes, np.int64)  # of the present episodes
        self.ended = np.zeros(recorder.num_lanes, np.int64)  # episodes by lane
        first = np.arange(recorder.first_lane, recorder.first_lane + recorder.num_lanes)
        self.wanted = np.maximum(0, -((first - (self.amount.episodes or 0)) // recorder.total_lanes))

    def play(self) -> Iterator[EpisodeBlock]:
        """Yields episodes until there are enough; those that are unfinished then are dropped, or cut off."""
        actor = self.actor
        actor.start()
        self.recorder.playing = self.mixture.playing
        self.mixture.begin_episodes(np.ones(self.recorder.num_lanes, np.bool_))
        while not self._has_enough():
            if actor.last.any():
                self.mixture.begin_episodes(actor.last)
            actor.send()
            yield from self._add(actor.receive()[0])
            if actor.sequence % SHOW_ROWS == 0:
                self.faults += len(actor.take_faults())
                self.show(self.episodes, self.steps)
        self.faults += len(actor.take_faults())
        self.show(self.episodes, self.steps)
        if self.amount.cut:
            yield from self.recorder.add(final_row(actor), ~actor.last[None])
        if (block := self.recorder.cut()) is not None:
            yield block

    def _add(self, rollout: Rollout) -> Iterator[EpisodeBlock]:
        """Record a row; lanes that would make a step too many are cut off before it."""
        surplus = None
        steps = self.amount.steps
        if self.amount.cut and steps is not None and self.steps + self.recorder.num_lanes > steps:
            surplus = np.cumsum(~rollout.last, 1) > steps - self.steps
            if surplus.any():
                rollout.last = rollout.last | surplus
        self._count(~rollout.last[0])
        return self.recorder.add(rollout, surplus)

    def _count(self, steps: Array) -> None:
        num = int(np.count_nonzero(steps))
        self.mixture.count_steps(steps)
        self.lane_steps += steps
        self.steps += num
        if num < len(steps):
            over = ~steps & (self.lane_steps > 0)
            self.ended += over
            self.episodes += int(np.count_nonzero(over))
            self.ended_steps += int(self.lane_steps[over].sum())
            self.lane_steps[over] = 0

    def _has_enough(self) -> bool:
        """Is everything that is wanted recorded, with final observations?"""
        amount = self.amount
        if amount.steps is None:
            return bool((self.ended >= self.wanted).all())
        return (self.steps if amount.cut else self.ended_steps) >= amount.steps


def record_into(writer: BlockWriter, recording: Recording) -> WrittenFiles:
    """Play and write."""
    with closing(writer):
        for block in recording.play():
            writer.add(block)
        return writer.finish()


def make_playing_world(plan: Plan) -> World:
    """The environment itself, also of a run that learned from a data set."""
    return make_world(plan.env, seed=plan.seed, stream=TRAIN)


def describe_world(plan: Plan, world: World) -> Description:
    """What is recorded; refused if a data set cannot hold it."""
    spec = world.spec
    if spec.num_actions > MAX_JOINT_ACTIONS:
        raise UsageError(
            f"a data set cannot hold {spec.num_actions:,} joint actions",
            f"An action is one number, and {MAX_JOINT_ACTIONS:,} of them are the most.",
            "Choose an environment with fewer dimensions of actions.",
        )
    return Description(plan.env.id, spec, spec_columns(spec), world.spaces)


def make_recording(
    plan: Plan,
    world: World,
    parts: list[PlayedPolicy],
    amount: Amount,
    show: Show = lambda episodes, steps: None,
    worker: int = 0,
) -> Recording:
    """An actor in this world, one of several with equally many lanes."""
    lanes = {"first_lane": worker * world.num, "total_lanes": plan.env.num}
    mixture = Mixture(parts, world.spec, world.num, by_steps=amount.steps is not None, **lanes)
    key = (worker, 0) if worker else ()
    policy = cast("Policy", mixture)  # it has what an actor uses of a policy
    actor = Actor(world, policy, mixture, stream(plan.seed, EXPLORE, *key), worker=worker, record_probability=True)
    recorder = RolloutRecorder(
        world.spec, world.num, str(plan.seed), mixture.names, num_episodes=amount.episodes, **lanes
    )
    return Recording(actor, mixture, recorder, amount, show)


def final_row(actor: Actor) -> Rollout:
    """The actor's latest observations as a row of final ones."""
    now = actor.current()
    num = len(actor.last)
    none = np.zeros((1, num), np.float32)
    return Rollout(
        obs=(now.obs[:, -1] if actor.world.spec.stack > 1 else now.obs)[None],
        action=none.astype(np.int64),
        reward=none,
        discount=none + 1,
        last=np.ones((1, num), np.bool_),
        source=(*actor.source, 0),
        version=0,
        mask=None if now.mask is None else now.mask[None],
    )
