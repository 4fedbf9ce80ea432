"""The actor: acts in its world and returns the steps as rollouts. Shapes: B lanes, A actions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from qfleet.act.explore import Explorer
from qfleet.act.policy import Policy
from qfleet.act.policy_inputs import add_reward
from qfleet.act.population_policy import PopulationPolicy
from qfleet.data import Array, Channel, Episode, Rollout, State, Step, Tick, WeightsBoard, World, split_actions
from qfleet.data.array_messages import COLUMNS
from qfleet.data.state_reader import (
    FLAGS,
    FLOATS,
    restore_generator,
    saved_array,
    saved_count,
    saved_numbers,
    saved_value,
)
from qfleet.envs import EnvFault, ProcessVectorEnv
from qfleet.system.timers import Stopwatch


class EpisodeCounts:
    """Return and length of the current episode of each lane."""

    def __init__(self, lanes: int) -> None:
        self.returns = np.zeros(lanes, np.float64)
        self.lengths = np.zeros(lanes, np.int64)

    def drop(self, lanes: Array) -> None:
        """Drop the episodes of these lanes (bool [B])."""
        self.returns[lanes] = 0.0
        self.lengths[lanes] = 0

    def count(self, reward: Array, stepped: Array, ended: Array, info: Array | None = None) -> list[Episode]:
        """Add one row; returns each episode it ended, with its row of `info` [B, I]."""
        self.returns += reward * stepped
        self.lengths += stepped
        if not ended.any():
            return []
        lanes = np.flatnonzero(ended)
        finished: list[Episode] = [(float(self.returns[lane]), int(self.lengths[lane])) for lane in lanes]
        if info is not None:
            finished = [(*episode, *info[lane].tolist()) for episode, lane in zip(finished, lanes, strict=True)]
        self.drop(ended)
        return finished


class Actor:
    """One policy in one world of B lanes. `send` starts a step in all lanes, `receive` finishes it."""

    is_remote = False  # it runs in this process

    def __init__(
        self,
        world: World,
        policy: Policy | PopulationPolicy,
        explorer: Explorer,
        rng: np.random.Generator,
        *,
        worker: int = 0,
        incarnation: int = 0,
        record_values: bool = False,
        record_probability: bool = False,
        exploration_step: Callable[[], int] | None = None,
    ) -> None:
        self.world = world
        self.policy = policy
        self.explorer = explorer
        self.rng = rng
        self.source = (worker, incarnation)
        self.steps = 0
        self.sequence = 0
        # The steps of all actors, on which exploration depends; a lone actor counts its own.
        self.exploration_step = exploration_step or (lambda: self.steps)
        self.in_flight = 0  # steps sent but not yet received
        self.episodes = EpisodeCounts(world.num)
        self.last = np.zeros(world.num, np.bool_)
        self.now: Step | None = None
        self.action = np.zeros(world.num, np.int64)
        self.record_values = record_values  # into rollouts, for initial priorities and lambda returns
        self.value: Array | None = None
        self.record_probability = record_probability  # of the actions, for a data set
        self.probability: Array | None = None
        # The recurrent state before and after the current action.
        self.memory = self.next_memory = policy.initial_state(world.num)

    def start(self) -> None:
        """Start the first episodes."""
        self.now = self.world.reset()
        if self.now.lost is not None:
            self.last = self.now.lost.copy()

    def current(self) -> Step:
        """The world's latest step."""
        if self.now is None:
            raise RuntimeError("the actor was not started")
        return self.now

    def send(self) -> None:
        """Choose actions and start the step."""
        now = self.current()
        self.action, self.next_memory, values = self.policy.select_actions(
            now.obs, self.memory, self.explore, noisy=True
        )
        self.value = self.expected_values(values, now.mask) if self.record_values else None
        self.in_flight = len(self.last) - int(self.last.sum())
        self.world.send(self.action)

    def explore(self, values: Array) -> Array:  # -> [B]
        """Exploring actions for the latest step."""
        step = self.exploration_step()
        mask = self.current().mask
        action = self.explorer.choose(values, step, self.rng, mask)
        if self.record_probability:
            self.probability = self.explorer.probability(action, values, step, mask)
        return action

    def expected_values(self, values: Array, mask: Array | None) -> Array:  # [B, 2]
        """The values of the chosen and of the best actions."""
        choices = [self.action] if values.ndim == 2 else split_actions(self.action, self.policy.actions)
        return taken_and_best_values(values, choices, mask)

    def receive(self) -> tuple[Rollout, list[Episode]]:
        """Finish the step: returns its row, and the episodes it ended."""
        previous = self.current()
        now = self.world.receive()
        last = self.last
        ended = (now.terminated | now.truncated) & ~self.last
        if now.lost is not None:
            # In a lost lane the previous observation was the final one. If it has no new one yet, it is truncated.
            self.in_flight -= int(np.count_nonzero(now.lost & ~last))
            last = last | now.lost
            ended = ended & ~now.lost
            self.episodes.drop(now.lost)
        finished = self.episodes.count(now.reward, ~last, ended, now.info)
        newest_frame = previous.obs[:, -1] if self.world.spec.stack > 1 else previous.obs
        rollout = Rollout(
            obs=newest_frame[None],
            action=self.action[None],
            reward=now.reward[None],
            discount=(~now.terminated).astype(np.float32)[None],
            last=last[None],
            source=(*self.source, self.sequence),
            version=self.policy.version,
            mask=None if previous.mask is None else previous.mask[None],
            state=None if self.memory is None else self.memory[None],
            value=None if self.value is None else self.value[None],
            probability=None if self.probability is None else self.probability[None],
        )
        self.memory = add_reward(self.next_memory, now.reward, last)
        self.steps += self.in_flight
        self.sequence += 1
        self.in_flight = 0
        self.now = now
        self.last = ended if now.lost is None else ended | (now.lost & now.truncated)
        return rollout, finished

    def take_faults(self) -> list[EnvFault]:
        """Failures of supervised environments since the last call."""
        return self.world.take_faults() if isinstance(self.world, ProcessVectorEnv) else []

    def stop(self) -> None:
        """Nothing to stop: it runs only when called."""

    def close(self) -> None:
        """Close the world."""
        self.world.close()

    def state_dict(self) -> State:
        """The world, its latest step and the counters; to be called between a receive and a send."""
        now = self.current()
        return {
            "world": self.world.state_dict(),
            "obs": now.obs,
            "mask": now.mask,
            "last": self.last,
            "returns": self.episodes.returns.copy(),
            "lengths": self.episodes.lengths.copy(),
            "steps": self.steps,
            "sequence": self.sequence,
            "memory": self.memory,
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: State) -> Array:
        """Restore; returns the lanes [B] whose environment did not reach the saved observation.

        Such a lane repeats its saved observation as a final one, so that its episode ends as truncated; its next
        observation is the first of a new episode.
        """
        reached = self.world.load_state_dict(saved_value(state, "world"))
        obs, mask = self._saved_obs(state, reached)
        lanes = (self.world.num,)
        self.last = saved_array(state, "last", FLAGS, lanes).copy()
        self.episodes.returns[:] = saved_array(state, "returns", FLOATS, lanes)
        self.episodes.lengths[:] = saved_numbers(state, "lengths", lanes, 0, 2**53)
        self.steps = saved_count(state, "steps")
        self.sequence = saved_count(state, "sequence")
        self.in_flight = 0  # a step under way when a run rolls back is dropped
        restore_generator(self.rng, saved_value(state, "rng"))
        if self.memory is not None:
            self.memory = saved_array(state, "memory", FLOATS, self.memory.shape).astype(np.float32)
        same = (reached.obs == obs).reshape(len(self.last), -1).all(1)
        lost: Array = ~same | ((reached.terminated | reached.truncated) != self.last)
        if lost.any():
            self._abandon_lanes(lost)
        self.now = replace(reached, obs=obs, mask=mask)
        return lost

    def _saved_obs(self, state: State, reached: Step) -> tuple[Array, Array | None]:
        obs = saved_array(state, "obs", reached.obs.dtype.kind, reached.obs.shape)
        if obs.dtype != reached.obs.dtype:
            raise ValueError(f"obs: expected {reached.obs.dtype}, got {obs.dtype}")
        if reached.mask is None:
            return obs, None
        return obs, saved_array(state, "mask", FLAGS, reached.mask.shape)

    def _abandon_lanes(self, lost: Array) -> None:
        """Make the observation of these lanes final and start new episodes there."""
        self.last = self.last | lost
        self.episodes.drop(lost)
        self.world.abandon(lost)


def taken_and_best_values(values: Array, choices: list[Array], mask: Array | None) -> Array:  # -> [B, 2]
    """The values of the chosen action and of the best allowed one, from values [B, A] or [B, D, A]."""
    # Where no action is allowed the mask is ignored, as in `qlearn.rules.masked`.
    best = values if mask is None else np.where(mask | ~mask.any(-1, keepdims=True), values, -np.inf)
    if values.ndim == 2:
        return np.stack([values[np.arange(len(values)), choices[0]], best.max(1)], 1)
    taken = np.take_along_axis(values, np.stack(choices, 1)[:, :, None], 2)[:, :, 0]
    return np.stack([taken.mean(1), best.max(2).mean(1)], 1)


def concatenate_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Join rollouts of one row each. The sequence of the result counts joined rollouts; its version is the oldest."""
    if len(parts) == 1:
        return parts[0]
    worker, incarnation, sequence = parts[0].source
    columns = {
        name: None if getattr(parts[0], name) is None else np.concatenate([getattr(part, name) for part in parts])
        for name in COLUMNS
    }
    return Rollout(
        **columns,  # type: ignore[arg-type]
        source=(worker, incarnation, sequence // len(parts)),
        version=min(part.version for part in parts),
        finished=tuple(episode for part in parts for episode in part.finished),
        ends=tuple(row for row, part in enumerate(parts) for _ in part.finished),
    )


def run_actor(
    actor: Actor, channel: Channel, board: WeightsBoard, rows: int = 1, watch: Stopwatch | None = None
) -> Iterator[Tick]:
    """The actor as a worker: load the newest weights, send, receive; put a rollout of every `rows` rows."""
    watch = watch or Stopwatch()
    while True:
        parts = []
        for _ in range(rows):
            with watch.sync:
                if (newer := board.read(actor.policy.version)) is not None:
                    actor.policy.load_weights(*newer)
            with watch.infer:
                actor.send()
            yield Tick(busy=True)
            with watch.env:
                rollout, finished = actor.receive()
            rollout.finished = tuple(finished)
            rollout.ends = (0,) * len(finished)
            parts.append(rollout)
            if len(parts) < rows:
                yield Tick(busy=True)
        rollout = concatenate_rollouts(parts)
        while not timed_put(rollout, channel, watch):
            yield Tick(busy=False)
        stats: dict[str, Any] = {"episodes": rollout.finished}
        if faults := actor.take_faults():
            stats["faults"] = [asdict(fault) for fault in faults]
        yield Tick(busy=True, stats=stats)


def timed_put(rollout: Rollout, channel: Channel, watch: Stopwatch) -> bool:
    """Put a rollout into the channel, if there is room."""
    with watch.sync:
        return channel.put(rollout)
