"""Batch sources of several actors: each has its own lanes and blocks, and is sealed on its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qfleet.data import Array, Rollout, Spec
from qfleet.learn import FreshSource, ReplaySource, make_batch_source, make_learner
from qfleet.nets import make_net
from qfleet.plan.schema import Actors, Algo, BufferReplay, Env, FreshReplay, MlpTorso, Net, Plan
from qfleet.replay import make_replay
from tests.replay.streams import random_stream, rollout

SPEC, LANES, WIDTH, ROWS = Spec((4,), "float32", (3,)), 4, 2, 5


def make(kind: BufferReplay | FreshReplay, normalize: str = "off") -> ReplaySource | FreshSource:
    plan = Plan(
        env=Env(id="none", num=LANES, normalize=normalize),  # type: ignore[arg-type]
        algo=Algo(discount=0.5, n_step=1 if isinstance(kind, FreshReplay) else 3),
        net=Net(torso=MlpTorso(sizes=(8,))),
        replay=kind,
        actors=Actors(num=LANES // WIDTH),
    )
    net = make_net(plan.net, SPEC, normalize=plan.env.normalize, seed=1)
    learner = make_learner(plan, SPEC, net, torch.device("cpu"))
    batch_source = make_batch_source(plan, make_replay(plan, SPEC, LANES, np.random.default_rng(0)), learner, LANES)
    assert isinstance(batch_source, ReplaySource | FreshSource)
    return batch_source


def send(
    batch_source: ReplaySource | FreshSource, worker: int, num: int, seed: int, end: float = 0.0
) -> dict[str, Array]:
    values = isinstance(batch_source, FreshSource)
    rows = random_stream(np.random.default_rng(seed), SPEC, WIDTH, num, end, values=values)
    batch_source.insert(replace(rollout(rows), source=(worker, 0, seed)))
    return rows


def test_a_workers_rollouts_go_into_its_own_lanes() -> None:
    batch_source = make(BufferReplay(capacity=100))
    second, first = send(batch_source, 1, 7, 1), send(batch_source, 0, 3, 2)
    store = batch_source.replay.store
    assert store.heads.tolist() == [3, 3, 7, 7]
    assert np.array_equal(store.obs[:3, :2], first["obs"])
    assert np.array_equal(store.obs[:7, 2:], second["obs"])
    assert batch_source.steps == 2 * 7 + 2 * 3


@pytest.mark.parametrize("worker", [0, 1])
def test_sealing_a_worker_ends_its_episodes_only(worker: int) -> None:
    batch_source = make(BufferReplay(capacity=100), normalize="reward")
    for who in (0, 1):
        send(batch_source, who, 6, who)
    before, other = len(batch_source.replay), 1 - worker
    assert (batch_source.normalization.returns != 0).all()
    assert batch_source.seal(worker) == WIDTH
    assert len(batch_source.replay) == before + WIDTH * 2  # of n = 3 the two that waited, and the newest is no step
    assert batch_source.steps == 2 * 2 * 6  # accepted steps stay counted
    lanes = slice(WIDTH * worker, WIDTH * worker + WIDTH)
    assert (batch_source.normalization.returns[lanes] == 0).all()
    assert (batch_source.normalization.returns[WIDTH * other : WIDTH * other + WIDTH] != 0).all()
    assert batch_source.seal(worker) == 0
    send(batch_source, worker, 6, 9)
    batch = batch_source.replay.read_batch(
        np.arange(batch_source.replay.tail, batch_source.replay.head), np.ones(len(batch_source.replay), np.float32)
    )
    assert len(batch.ids) == before + WIDTH * 2 + WIDTH * 3


def test_returns_of_lanes_are_independent() -> None:
    apart, alone = (
        make(BufferReplay(capacity=100), normalize="reward"),
        make(BufferReplay(capacity=100), normalize="reward"),
    )
    for seed in range(5):
        send(apart, 0, 3, seed)
        send(apart, 1, 4, 50 + seed)
    for seed in range(5):
        send(alone, 1, 4, 50 + seed)
    assert np.array_equal(apart.normalization.returns[2:], alone.normalization.returns[2:])


def taken(batch_source: ReplaySource | FreshSource) -> list[Array]:
    """The observations of every minibatch that is due."""
    found = []
    while (batch := batch_source.next_batch(0)) is not None:
        found.append(batch.obs)
    return found


def test_a_block_is_the_newest_window_of_one_actor() -> None:
    batch_source = make(FreshReplay(rows=ROWS, epochs=1, minibatches=1))
    fast = send(batch_source, 1, ROWS + 1, 1)
    (block,) = taken(batch_source)
    expected = fast["obs"][:ROWS].reshape(-1, 4)
    assert sorted(map(tuple, block.tolist())) == sorted(map(tuple, expected.tolist()))
    more = send(batch_source, 1, ROWS, 2)
    slow = send(batch_source, 0, ROWS + 1, 3)
    blocks = taken(batch_source)
    assert [len(block) for block in blocks] == [ROWS * WIDTH] * 2  # each in the order they were complete
    windows = [np.concatenate([fast["obs"], more["obs"]])[ROWS : 2 * ROWS], slow["obs"][:ROWS]]
    for block, window in zip(blocks, windows, strict=True):
        assert sorted(map(tuple, block.tolist())) == sorted(map(tuple, window.reshape(-1, 4).tolist()))


def test_a_block_begun_by_a_lost_actor_is_dropped() -> None:
    batch_source = make(FreshReplay(rows=ROWS, epochs=1, minibatches=1))
    send(batch_source, 0, ROWS, 1)
    assert batch_source.seal(0) == WIDTH
    rows = send(batch_source, 0, ROWS, 2)
    assert not taken(batch_source)
    send(batch_source, 0, 1, 3)
    (block,) = taken(batch_source)
    assert sorted(map(tuple, block.tolist())) == sorted(map(tuple, rows["obs"].reshape(-1, 4).tolist()))


def test_a_batch_does_not_change_while_the_next_is_drawn() -> None:
    batch_source = make(BufferReplay(capacity=500))
    rows: Rollout = rollout(random_stream(np.random.default_rng(0), SPEC, LANES, 100, 0.1))
    batch_source.insert(rows)
    first = batch_source.replay.sample(16)
    assert first is not None
    kept = {name: getattr(first, name).copy() for name in ("obs", "action", "reward", "next_obs", "ids", "weight")}
    second = batch_source.replay.sample(16)
    assert second is not None
    assert all(np.array_equal(getattr(first, name), value) for name, value in kept.items())
    assert not np.shares_memory(first.obs, second.obs)
    third = batch_source.replay.sample(16)
    assert third is not None
    assert np.shares_memory(first.obs, third.obs)  # no new memory for every batch
    other = batch_source.replay.sample(8)
    assert other is not None
    assert len(other.obs) == len(other.ids) == 8
    assert not np.shares_memory(third.obs, other.obs)
