"""Learning from fresh experience only: no replay, no target network (PQN, Gallici et al. 2024).

Shapes: T rows, B lanes, N items. A block is T rows of every lane of one actor and the row after them, from which it
bootstraps; its Q(lambda) returns are computed once, from what the actor expected when it acted, as the authors do.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from qfleet.data import Array, Batch, Rollout, Sequences, State
from qfleet.data.state_reader import FLOATS, saved_array, saved_count, saved_value
from qfleet.learn.batch_source import Observer, add_paid, lanes_of, news_of, seal
from qfleet.learn.count_bonus import VisitCounts
from qfleet.learn.learner import Learner
from qfleet.qlearn import lambda_returns
from qfleet.replay import Replay


@dataclass(frozen=True, slots=True)
class FreshBatch:
    """A minibatch to be: which steps of a block it holds. Cut when its turn comes: all at once are far larger."""

    obs: Array  # [T * B, ...]
    action: Array  # [T * B]
    goal: Array  # [T * B]
    at: Array  # [N]

    def cut(self) -> Batch:
        """The minibatch. What follows a step is not looked at: its return holds all of it."""
        obs = take_rows(self.obs, self.at)
        goal = self.goal[self.at]
        num = len(self.at)
        nothing = np.zeros(num, np.float32)
        alike = np.ones(num, np.float32)
        return Batch(obs, self.action[self.at], goal, nothing, obs, alike, self.at)


class FreshSource:
    """Collects a block, hands it out in shuffled minibatches `epochs` times, and forgets it."""

    def __init__(
        self,
        replay: Replay,
        learner: Learner,
        observer: Observer,
        bonus: VisitCounts | None = None,
        *,
        epochs: int,
        minibatches: int,
        trace: float,
        width: int | None = None,
    ) -> None:
        self.replay = replay
        self.learner = learner
        self.observer = observer
        self.bonus = bonus
        self.epochs = epochs
        self.minibatches = minibatches
        self.trace = trace
        self.width = width or len(observer.returns)  # lanes of one actor
        self.steps = self.learned_items = 0
        self.waiting: deque[FreshBatch] = deque()  # always empty between turns: a block is learned from in one go

    def insert(self, rollout: Rollout) -> None:
        """Take a row in."""
        self.steps += add_paid(rollout, self.replay, self.observer, self.bonus)

    def seal(self, worker: int) -> int:
        """Drop the block that an actor had begun: it is gone."""
        return seal(lanes_of(worker, self.width), self.replay, self.observer)

    def take(self, expected: int) -> Batch | None:
        """The next minibatch, if a block is complete."""
        while not self.waiting and self.replay.head > self.learned_items:
            self.waiting.extend(self.cut_block())
        return self.waiting.popleft().cut() if self.waiting else None

    def learned(self, batch: Batch | Sequences, priority: Array) -> None:
        """Nothing to remember."""

    def cut_block(self) -> list[FreshBatch]:
        """Every minibatch of every epoch, in order; final observations are left out."""
        block = self.block()
        goal = self.returns(block).ravel()
        used = np.flatnonzero(~block.last[:-1].ravel())
        obs = laid_out(block.obs[:-1].reshape(-1, *block.obs.shape[2:]))
        action = block.action[:-1].ravel()
        orders = [self.replay.rng.permutation(used) for _ in range(self.epochs)]
        places = [part for order in orders for part in np.array_split(order, self.minibatches) if len(part)]
        return [FreshBatch(obs, action, goal, at) for at in places]

    def block(self) -> Sequences:
        """The oldest window of every lane of one actor that was not learned from."""
        begin = max(self.learned_items, self.replay.tail)
        serials = np.arange(begin, begin + self.replay.width_at(begin))
        self.learned_items = int(serials[-1]) + 1
        block = self.replay.take(serials, np.ones(len(serials), np.float32))
        if not isinstance(block, Sequences):
            raise TypeError("fresh experience is cut in sequences")
        return block

    def returns(self, block: Sequences) -> Array:  # [T, B]
        """Q(lambda) returns."""
        reward = self.learner.scaled(torch.from_numpy(block.reward).to(self.learner.device)).cpu()
        discount, best, last = map(torch.from_numpy, (block.discount, self.told(block.ids), block.last))
        out: Array = lambda_returns(reward, discount, best, last, self.trace).numpy()
        return out

    def told(self, serials: Array) -> Array:  # [T + 1, B]
        """What the actor expected of the best action in every row."""
        store = self.replay.store
        items = self.replay.at(serials)
        if store.value is None:
            raise ValueError("this store keeps no values")
        rows = items // store.lanes + np.arange(self.replay.cut.window + 1)[:, None]
        found: Array = store.value[rows % store.rows, items % store.lanes, 1]
        return found

    def news(self) -> dict[str, float | None]:
        """The bonus paid."""
        return news_of(self.replay, self.bonus)

    def state_dict(self) -> State:
        """Counters, the block begun, and the memory of rewards and visits."""
        return {
            "steps": self.steps,
            "learned_items": self.learned_items,
            "replay": self.replay.state_dict(),
            "returns": self.observer.returns.copy(),
            "told": True,  # rows hold values; those of older versions do not (`run.older`)
            **({} if self.bonus is None else {"bonus": self.bonus.state_dict()}),
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Come back to that moment; without its rows the block begins anew."""
        self.steps = saved_count(state, "steps")
        self.learned_items = saved_count(state, "learned_items")
        self.observer.returns = saved_array(state, "returns", FLOATS, self.observer.returns.shape).copy()
        self.waiting.clear()
        if self.bonus is not None:
            self.bonus.load_state_dict(saved_value(state, "bonus"))
        if with_replay:
            self.replay.load_state_dict(state["replay"])
        else:
            self.replay.clear()
            self.learned_items = self.replay.head


def laid_out(obs: Array) -> Array:
    """Pictures with their channels last, as convolutions want them, seen through the axes they had: once per block."""
    if obs.ndim != 4:
        return obs
    out: Array = torch.from_numpy(obs).contiguous(memory_format=torch.channels_last).numpy()
    return out


def take_rows(obs: Array, at: Array) -> Array:
    """Some rows, laid out as all are."""
    if obs.ndim != 4:
        return obs[at]
    found: Array = obs.transpose(0, 2, 3, 1)[at].transpose(0, 3, 1, 2)
    return found
