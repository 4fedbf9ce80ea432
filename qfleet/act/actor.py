"""The actor: acts in its world and turns what happens into rollouts. Shapes: B lanes, A actions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from qfleet.act.explore import Explorer
from qfleet.act.policy import Policy, carry
from qfleet.act.population_policy import PopulationPolicy
from qfleet.data import Array, Channel, Rollout, State, Step, Tick, WeightsBoard, World, split_actions
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
    """Adds up rewards per lane and hands out the episodes that ended."""

    def __init__(self, lanes: int) -> None:
        self.returns = np.zeros(lanes, np.float64)
        self.lengths = np.zeros(lanes, np.int64)

    def drop(self, lanes: Array) -> None:
        """Forget these lanes' episodes (bool [B]): nobody knows how they would have ended."""
        self.returns[lanes] = 0.0
        self.lengths[lanes] = 0

    def count(self, reward: Array, stepped: Array, ended: Array) -> list[tuple[float, int]]:
        """Take one row in; (return, length) of each episode it ended."""
        self.returns += reward * stepped
        self.lengths += stepped
        if not ended.any():
            return []
        done = [(float(self.returns[lane]), int(self.lengths[lane])) for lane in np.flatnonzero(ended)]
        self.drop(ended)
        return done


class Actor:
    """One policy in one world of B lanes. `send` starts a step everywhere, `receive` finishes it."""

    is_remote = False  # it is turned by hand in this process

    def __init__(
        self,
        world: World,
        policy: Policy | PopulationPolicy,
        explorer: Explorer,
        rng: np.random.Generator,
        *,
        worker: int = 0,
        incarnation: int = 0,
        tell_values: bool = False,
        elapsed: Callable[[], int] | None = None,
    ) -> None:
        self.world = world
        self.policy = policy
        self.explorer = explorer
        self.rng = rng
        self.source = (worker, incarnation)
        self.steps = self.sequence = 0
        # Steps that all actors have made, by which exploration changes; a lone actor counts its own.
        self.elapsed = elapsed or (lambda: self.steps)
        self.in_flight = 0  # steps sent but not yet received
        self.episodes = EpisodeCounts(world.num)
        self.last = np.zeros(world.num, np.bool_)
        self.now: Step | None = None
        self.action = np.zeros(world.num, np.int64)
        self.tell_values = tell_values  # for priorities and returns that are found from them
        self.value: Array | None = None
        # What a recurrent policy remembered before and after the present action.
        self.memory = self.next_memory = policy.blank(world.num)

    def start(self) -> None:
        """Begin the first episodes."""
        self.now = self.world.reset()
        if self.now.lost is not None:
            self.last = self.now.lost.copy()

    def current(self) -> Step:
        """What the world shows now."""
        if self.now is None:
            raise RuntimeError("the actor was not started")
        return self.now

    def send(self) -> None:
        """Choose actions for what is seen and start the step."""
        now = self.current()
        self.action, self.next_memory, values = self.policy.decide(now.obs, self.memory, self.explore, noisy=True)
        self.value = self.expected(values, now.mask) if self.tell_values else None
        self.in_flight = len(self.last) - int(self.last.sum())
        self.world.send(self.action)

    def explore(self, values: Array) -> Array:  # -> [B]
        """Actions for what is seen now."""
        return self.explorer.choose(values, self.elapsed(), self.rng, self.current().mask)

    def expected(self, values: Array, mask: Array | None) -> Array:  # [B, 2]
        """What the policy expects of its actions, and of the best ones."""
        choices = [self.action] if values.ndim == 2 else split_actions(self.action, self.policy.actions)
        return expected_values(values, choices, mask)

    def receive(self) -> tuple[Rollout, list[tuple[float, int]]]:
        """Finish the step: the row it makes, and the episodes it ended."""
        was = self.current()
        now = self.world.receive()
        last = self.last
        ended = (now.terminated | now.truncated) & ~self.last
        if now.lost is not None:
            # Their observation was the final one after all. One that shows none yet says that it is truncated.
            self.in_flight -= int(np.count_nonzero(now.lost & ~last))
            last = last | now.lost
            ended = ended & ~now.lost
            self.episodes.drop(now.lost)
        finished = self.episodes.count(now.reward, ~last, ended)
        newest = was.obs[:, -1] if self.world.spec.stack > 1 else was.obs
        rollout = Rollout(
            obs=newest[None],
            action=self.action[None],
            reward=now.reward[None],
            discount=(~now.terminated).astype(np.float32)[None],
            last=last[None],
            source=(*self.source, self.sequence),
            version=self.policy.version,
            mask=None if was.mask is None else was.mask[None],
            state=None if self.memory is None else self.memory[None],
            value=None if self.value is None else self.value[None],
        )
        self.memory = carry(self.next_memory, now.reward, last)
        self.steps += self.in_flight
        self.sequence += 1
        self.in_flight = 0
        self.now = now
        self.last = ended if now.lost is None else ended | (now.lost & now.truncated)
        return rollout, finished

    def take_faults(self) -> list[EnvFault]:
        """Environments that failed since this was last asked, where they are supervised."""
        return self.world.take_faults() if isinstance(self.world, ProcessVectorEnv) else []

    def dismiss(self) -> None:
        """It does nothing unasked."""

    def close(self) -> None:
        """Let go of the world."""
        self.world.close()

    def state_dict(self) -> State:
        """Between a receive and a send: the world, what it shows, and the counters."""
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
        """Come back; returns the lanes [B] that could not be brought back to the same observation.

        Such a lane shows its old observation once more as a final one, so its episode ends as truncated; what the
        world shows next there is the first observation of a new episode.
        """
        reached = self.world.load_state_dict(saved_value(state, "world"))
        obs, mask = self._saved_sight(state, reached)
        lanes = (self.world.num,)
        self.last = saved_array(state, "last", FLAGS, lanes).copy()
        self.episodes.returns[:] = saved_array(state, "returns", FLOATS, lanes)
        self.episodes.lengths[:] = saved_numbers(state, "lengths", lanes, 0, 2**53)
        self.steps = saved_count(state, "steps")
        self.sequence = saved_count(state, "sequence")
        self.in_flight = 0  # what was under way when a run goes back is forgotten
        restore_generator(self.rng, saved_value(state, "rng"))
        if self.memory is not None:
            self.memory = saved_array(state, "memory", FLOATS, self.memory.shape).astype(np.float32)
        same = (reached.obs == obs).reshape(len(self.last), -1).all(1)
        lost: Array = ~same | ((reached.terminated | reached.truncated) != self.last)
        if lost.any():
            self._give_up(lost)
        self.now = replace(reached, obs=obs, mask=mask)
        return lost

    def _saved_sight(self, state: State, reached: Step) -> tuple[Array, Array | None]:
        obs = saved_array(state, "obs", reached.obs.dtype.kind, reached.obs.shape)
        if obs.dtype != reached.obs.dtype:
            raise ValueError(f"obs: expected {reached.obs.dtype}, got {obs.dtype}")
        if reached.mask is None:
            return obs, None
        return obs, saved_array(state, "mask", FLAGS, reached.mask.shape)

    def _give_up(self, lost: Array) -> None:
        """What these lanes showed becomes a final observation; the world begins anew there."""
        self.last = self.last | lost
        self.episodes.drop(lost)
        self.world.abandon(lost)


def expected_values(values: Array, choices: list[Array], mask: Array | None) -> Array:  # -> [B, 2]
    """What the policy expects of its action, and of the best one allowed; values are [B, A] or [B, D, A]."""
    # Where no action is allowed nothing is taken away, as in `qlearn.rules.masked`.
    best = values if mask is None else np.where(mask | ~mask.any(-1, keepdims=True), values, -np.inf)
    if values.ndim == 2:
        return np.stack([values[np.arange(len(values)), choices[0]], best.max(1)], 1)
    taken = np.take_along_axis(values, np.stack(choices, 1)[:, :, None], 2)[:, :, 0]
    return np.stack([taken.mean(1), best.max(2).mean(1)], 1)


def joined(parts: Sequence[Rollout]) -> Rollout:
    """Rollouts of one row each as one; its sequence counts such rollouts, its version is the oldest acted by."""
    if len(parts) == 1:
        return parts[0]
    worker, incarnation, sequence = parts[0].source
    together = {
        name: None if getattr(parts[0], name) is None else np.concatenate([getattr(part, name) for part in parts])
        for name in COLUMNS
    }
    return Rollout(
        **together,  # type: ignore[arg-type]
        source=(worker, incarnation, sequence // len(parts)),
        version=min(part.version for part in parts),
        finished=tuple(episode for part in parts for episode in part.finished),
        ends=tuple(row for row, part in enumerate(parts) for _ in part.finished),
    )


def acting(
    actor: Actor, channel: Channel, board: WeightsBoard, rows: int = 1, watch: Stopwatch | None = None
) -> Iterator[Tick]:
    """The actor as a worker: newest weights, act and send; then receive. Every so many rows are handed over."""
    watch = watch or Stopwatch()
    while True:
        parts = []
        for _ in range(rows):
            with watch.sync:
                if (fresh := board.read(actor.policy.version)) is not None:
                    actor.policy.load(*fresh)
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
        rollout = joined(parts)
        while not put(rollout, channel, watch):
            yield Tick(busy=False)
        stats: dict[str, Any] = {"episodes": rollout.finished}
        if faults := actor.take_faults():
            stats["faults"] = [asdict(fault) for fault in faults]
        yield Tick(busy=True, stats=stats)


def put(rollout: Rollout, channel: Channel, watch: Stopwatch) -> bool:
    """Hand it over, if there is room."""
    with watch.sync:
        return channel.put(rollout)
