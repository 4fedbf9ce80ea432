"""Learning from fresh experience only: no replay, no target network (PQN, Gallici et al. 2024).

Shapes: T rows, B lanes, N items. A block is T rows of every lane of one actor and the row after them, from which it
bootstraps; its Q(lambda) returns are computed once, by the network as it was when the block was taken.
"""

from collections import deque

import numpy as np
import torch

from qfleet.data import Array, Batch, Rollout, Sequences, State
from qfleet.data.saved import saved_count, saved_value
from qfleet.learn.bonus import Counts
from qfleet.learn.feed import Observer, add_paid, lanes_of, news_of, seal
from qfleet.learn.learner import Learner
from qfleet.qlearn import lambda_returns
from qfleet.qlearn.rules import masked
from qfleet.qlearn.views import window
from qfleet.replay import Replay


class FreshFeed:
    """Collects a block, hands it out in shuffled minibatches `epochs` times, and forgets it."""

    def __init__(
        self,
        replay: Replay,
        learner: Learner,
        observer: Observer,
        bonus: Counts | None = None,
        *,
        epochs: int,
        minibatches: int,
        trace: float,
        width: int | None = None,
    ) -> None:
        self.replay, self.learner, self.observer, self.bonus = replay, learner, observer, bonus
        self.epochs, self.minibatches, self.trace = epochs, minibatches, trace
        self.width = width or len(observer.returns)  # lanes of one actor
        self.steps = self.learned_items = 0
        self.waiting: deque[Batch] = deque()  # always empty between turns: a block is learned from in one go

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
        return self.waiting.popleft() if self.waiting else None

    def learned(self, batch: Batch | Sequences, priority: Array) -> None:
        """Nothing to remember."""

    def cut_block(self) -> list[Batch]:
        """Every minibatch of every epoch, in order; final observations are left out."""
        block = self.block()
        returns = self.returns(block)
        used = np.flatnonzero(~block.last[:-1].ravel())
        obs, action = block.obs[:-1].reshape(-1, *block.obs.shape[2:]), block.action[:-1].ravel()
        goals, zeros = returns.ravel(), np.zeros(len(returns.ravel()), np.float32)
        orders = [self.replay.rng.permutation(used) for _ in range(self.epochs)]
        parts = [part for order in orders for part in np.array_split(order, self.minibatches) if len(part)]
        return [
            Batch(obs[at], action[at], goals[at], zeros[at], obs[at], np.ones(len(at), np.float32), at) for at in parts
        ]

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
        """Q(lambda) returns by the network as it is."""
        tensors, rows = self.learner.tensors(block), block.last.shape
        with torch.no_grad():
            values = self.learner.head.values(self.learner.net(tensors.obs.flatten(0, 1)))
            mask = None if tensors.mask is None else tensors.mask.flatten(0, 1)
            best = masked(values, mask).amax(-1)
            best = (best if best.ndim == 1 else best.mean(1)).view(rows)
            last = window(tensors)[1]
            found = lambda_returns(tensors.reward, tensors.discount, best, last, self.trace)
        out: Array = found.cpu().numpy()
        return out

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
            **({} if self.bonus is None else {"bonus": self.bonus.state_dict()}),
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Come back to that moment; without its rows the block begins anew."""
        self.steps, self.learned_items = saved_count(state, "steps"), saved_count(state, "learned_items")
        self.observer.returns = np.array(state["returns"])
        self.waiting.clear()
        if self.bonus is not None:
            self.bonus.load_state_dict(saved_value(state, "bonus"))
        if with_replay:
            self.replay.load_state_dict(state["replay"])
        else:
            self.replay.clear()
            self.learned_items = self.replay.head
