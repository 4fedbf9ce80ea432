"""Learning from fresh experience only: no replay, no target network (PQN, Gallici et al. 2024).

Shapes: T rows, B lanes, N items. A block is T rows of every lane of one actor and the row after them, from which it
bootstraps; its Q(lambda) returns are computed once, from the values the actor acted by, as the authors do.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from qfleet.data import Array, Batch, Rollout, Sequences, State
from qfleet.data.state_reader import FLOATS, saved_array, saved_count, saved_value
from qfleet.learn.batch_source import (
    NormalizationStatistics,
    StepRecorder,
    insert_with_bonus,
    lanes_of,
    seal_lanes,
    source_metrics,
)
from qfleet.learn.count_bonus import VisitCounts
from qfleet.learn.learner import Learner
from qfleet.qlearn import lambda_returns
from qfleet.replay import Replay


@dataclass(frozen=True, slots=True)
class FreshBatch:
    """The steps of a block that make a minibatch, which is copied only when it is due: all copies would be large."""

    obs: Array  # [T * B, ...]
    action: Array  # [T * B]
    returns: Array  # [T * B]
    indices: Array  # [N]

    def cut(self) -> Batch:
        """The minibatch. Its rewards are whole returns, so the next observations are not used."""
        obs = take_rows(self.obs, self.indices)
        returns = self.returns[self.indices]
        num = len(self.indices)
        discount = np.zeros(num, np.float32)
        weight = np.ones(num, np.float32)
        return Batch(obs, self.action[self.indices], returns, discount, obs, weight, self.indices)


@dataclass(eq=False)
class FreshSource:
    """Collects a block, returns it in shuffled minibatches `epochs` times, and drops it."""

    replay: Replay
    learner: Learner
    normalization: NormalizationStatistics
    bonus: VisitCounts | None
    epochs: int
    minibatches: int
    trace: float
    lanes_per_actor: int
    steps: int = 0
    learned_items: int = 0
    waiting: deque[FreshBatch] = field(default_factory=deque)  # empty between turns: one turn learns from a block
    recorder: StepRecorder | None = None

    def insert(self, rollout: Rollout) -> None:
        """Add a row to the block."""
        if self.recorder is not None:
            self.recorder.add(rollout)
        self.steps += insert_with_bonus(rollout, self.replay, self.normalization, self.bonus)

    def seal(self, worker: int) -> int:
        """Drop the block that a lost actor had begun."""
        if self.recorder is not None:
            self.recorder.seal(worker)
        return seal_lanes(lanes_of(worker, self.lanes_per_actor), self.replay, self.normalization)

    def next_batch(self, in_flight_steps: int) -> Batch | None:
        """The next minibatch, if a block is complete."""
        while not self.waiting and self.replay.head > self.learned_items:
            self.waiting.extend(self.cut_block())
        return self.waiting.popleft().cut() if self.waiting else None

    def after_update(self, batch: Batch | Sequences, priority: Array) -> None:
        """Nothing to record: fresh experience has no priorities."""

    def set_priorities(self, ids: Array, priority: Array) -> None:
        """Ignored, for the same reason."""

    def cut_block(self) -> list[FreshBatch]:
        """Every minibatch of every epoch, in order; final observations are left out."""
        block = self.next_block()
        returns = self.lambda_returns(block).ravel()
        used = np.flatnonzero(~block.last[:-1].ravel())
        obs = to_channels_last(block.obs[:-1].reshape(-1, *block.obs.shape[2:]))
        action = block.action[:-1].ravel()
        shuffled = [self.replay.rng.permutation(used) for _ in range(self.epochs)]
        parts = [part for steps in shuffled for part in np.array_split(steps, self.minibatches) if len(part)]
        return [FreshBatch(obs, action, returns, indices) for indices in parts]

    def next_block(self) -> Sequences:
        """The oldest window of every lane of one actor that was not learned from."""
        begin = max(self.learned_items, self.replay.tail)
        serials = np.arange(begin, begin + self.replay.items_in_row(begin))
        self.learned_items = int(serials[-1]) + 1
        block = self.replay.read_batch(serials, np.ones(len(serials), np.float32))
        if not isinstance(block, Sequences):
            raise TypeError("fresh experience is cut in sequences")
        return block

    def lambda_returns(self, block: Sequences) -> Array:  # [T, B]
        """Q(lambda) returns."""
        reward = self.learner.normalize_reward(torch.from_numpy(block.reward).to(self.learner.device)).cpu()
        discount, values, last = map(torch.from_numpy, (block.discount, self.best_values(block.ids), block.last))
        returns: Array = lambda_returns(reward, discount, values, last, self.trace).numpy()
        return returns

    def best_values(self, serials: Array) -> Array:  # [T + 1, B]
        """max_a Q of every row, as the actor computed it."""
        store = self.replay.store
        items = self.replay.items_at(serials)
        if store.value is None:
            raise ValueError("this store keeps no values")
        rows = items // store.lanes + np.arange(self.replay.cut.window + 1)[:, None]
        values: Array = store.value[rows % store.rows, items % store.lanes, 1]
        return values

    def take_metrics(self) -> dict[str, float | None]:
        """The mean bonus, if the plan has one."""
        return source_metrics(self.replay, self.bonus)

    def state_dict(self) -> State:
        """Counters, the block begun, returns so far and visit counts."""
        return {
            "steps": self.steps,
            "learned_items": self.learned_items,
            "replay": self.replay.state_dict(),
            "returns": self.normalization.returns.copy(),
            "told": True,  # rows hold values; those of older versions do not (`training/checkpoints/migrations.py`)
            **({} if self.bonus is None else {"bonus": self.bonus.state_dict()}),
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Restore a saved state; without the replay, start a new block."""
        self.steps = saved_count(state, "steps")
        self.learned_items = saved_count(state, "learned_items")
        self.normalization.returns = saved_array(state, "returns", FLOATS, self.normalization.returns.shape).copy()
        self.waiting.clear()
        if self.bonus is not None:
            self.bonus.load_state_dict(saved_value(state, "bonus"))
        if with_replay:
            self.replay.load_state_dict(state["replay"])
        else:
            self.replay.clear()
            self.learned_items = self.replay.head

    def close(self) -> None:
        """Close the replay."""
        self.replay.close()


def to_channels_last(obs: Array) -> Array:
    """Images in channels-last memory format, which convolutions need, with the same axes: once per block."""
    if obs.ndim != 4:
        return obs
    converted: Array = torch.from_numpy(obs).contiguous(memory_format=torch.channels_last).numpy()
    return converted


def take_rows(obs: Array, indices: Array) -> Array:
    """Some rows, in the memory format of all."""
    if obs.ndim != 4:
        return obs[indices]
    rows: Array = obs.transpose(0, 2, 3, 1)[indices].transpose(0, 3, 1, 2)
    return rows
