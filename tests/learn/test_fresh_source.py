"""Fresh experience: Q(lambda) returns of whole blocks against loops, and every step in `epochs` minibatches.

Shapes: T rows of a block, B lanes, A actions.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from qfleet.data import Array, Batch, Spec
from qfleet.learn import FreshSource, Learner, make_batch_source, make_learner
from qfleet.nets import make_net
from qfleet.plan.schema import Algo, AverageTarget, Env, FreshReplay, MlpTorso, NatureTorso, Net, Plan, Radam
from qfleet.replay import make_replay
from tests.learn.parts import same
from tests.replay.streams import random_stream, rollout

LANES, ROWS = 3, 6
VECTOR = Spec((4,), "float32", (3,))
MASKED = Spec((4,), "float32", (3,), masked=True)
JOINT = Spec((4,), "float32", (2, 3))
IMAGE = Spec((36, 36), "uint8", (3,), stack=4)
FRESH = FreshReplay(rows=ROWS, epochs=3, minibatches=4, trace=0.65)


def make_plan(spec: Spec, *, fresh: FreshReplay = FRESH, clip: bool = False, normalize: Any = "off") -> Plan:
    torso = NatureTorso(width=8) if spec.stack > 1 else MlpTorso(sizes=(8, 8))
    return Plan(
        env=Env(id="none", num=LANES, clip_reward=clip, normalize=normalize),
        algo=Algo(discount=0.9, target=AverageTarget(tau=0.5)),  # a target that would be seen to move
        net=Net(torso=torso, decoupled=len(spec.actions) > 1),
        replay=fresh,
    )


def make(plan: Plan, spec: Spec, seed: int = 5) -> tuple[FreshSource, Learner]:
    net = make_net(plan.net, spec, normalize=plan.env.normalize, seed=1)
    learner = make_learner(plan, spec, net, torch.device("cpu"))
    batch_source = make_batch_source(plan, make_replay(plan, spec, LANES, np.random.default_rng(seed)), learner, LANES)
    assert isinstance(batch_source, FreshSource)
    return batch_source, learner


def stream(spec: Spec, num: int, end: float = 0.3) -> dict[str, Array]:
    return random_stream(np.random.default_rng(3), spec, LANES, num, end=end, values=True)


def taken(batch_source: FreshSource) -> list[Batch]:
    """All minibatches that are due."""
    found: list[Batch] = []
    while (batch := batch_source.next_batch(0)) is not None:
        found.append(batch)
    return found


def shown(rows: dict[str, Array], spec: Spec, row: int, lane: int) -> Array:
    """The network's input in this row: frames since the episode began, zeros before."""
    if spec.stack == 1:
        frame: Array = rows["obs"][row, lane]
        return frame
    frames = [np.zeros(spec.obs, spec.dtype)] * spec.stack
    for back in range(spec.stack):
        at = row - back
        if at < 0 or (back and rows["last"][at, lane]):
            break
        frames[spec.stack - 1 - back] = rows["obs"][at, lane]
    return np.stack(frames)


def expected_returns(
    rows: dict[str, Array], first: int, *, clip: bool = False, scale: float = 1.0
) -> dict[tuple[int, int], float]:
    """Q(lambda) of every step of the block that begins at `first`, by (row, lane)."""
    found: dict[tuple[int, int], float] = {}
    for lane in range(LANES):
        after = 0.0
        for row in range(first + ROWS - 1, first - 1, -1):
            reward = float(rows["reward"][row, lane])
            reward = min(max(reward, -1.0), 1.0) if clip else reward
            reward = min(max(reward * scale, -10.0), 10.0) if scale != 1.0 else reward
            mixed = float(rows["value"][row + 1, lane, 1])
            if row < first + ROWS - 1 and not rows["last"][row + 1, lane]:
                mixed = (1 - FRESH.trace) * mixed + FRESH.trace * after
            after = reward + 0.9 * float(rows["discount"][row, lane]) * mixed
            if not rows["last"][row, lane]:
                found[row, lane] = after
    return found


def check_block(
    batches: list[Batch], rows: dict[str, Array], spec: Spec, first: int, expected: dict[tuple[int, int], float]
) -> None:
    """Every step is there once per epoch, with its own observation, action and return."""
    size = len(batches) // FRESH.epochs
    for epoch in range(FRESH.epochs):
        ids = np.concatenate([batch.ids for batch in batches[epoch * size : (epoch + 1) * size]])
        steps = [(first + int(number) // LANES, int(number) % LANES) for number in ids]
        assert sorted(steps) == sorted(expected)
    for batch in batches:
        for place, number in enumerate(batch.ids):
            row, lane = first + int(number) // LANES, int(number) % LANES
            assert batch.reward[place] == pytest.approx(expected[row, lane], abs=1e-4)
            assert batch.action[place] == rows["action"][row, lane]
            np.testing.assert_array_equal(batch.obs[place], shown(rows, spec, row, lane))
            assert (batch.weight[place], batch.discount[place]) == (1.0, 0.0)


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("spec", [VECTOR, MASKED, JOINT, IMAGE], ids=["vector", "masked", "decoupled", "picture"])
def test_blocks_are_learned_from_with_their_lambda_returns(spec: Spec, clip: bool) -> None:
    plan = make_plan(spec, clip=clip)
    batch_source, _ = make(plan, spec)
    rows = stream(spec, 3 * ROWS + 1)
    assert rows["last"].any()
    blocks = 0
    for row in range(3 * ROWS + 1):
        batch_source.insert(rollout(rows, row, row + 1))
        batches = taken(batch_source)
        if row == 0 or row % ROWS:
            assert not batches, "a block is complete when the row after it is there"
            continue
        first = row - ROWS
        check_block(batches, rows, spec, first, expected_returns(rows, first, clip=clip))
        blocks += 1
    assert blocks == 3
    assert batch_source.steps == (~rows["last"]).sum()


def test_final_observations_are_never_learned_from() -> None:
    batch_source, _ = make(make_plan(VECTOR), VECTOR)
    rows = stream(VECTOR, ROWS + 1, end=0.8)
    final = {(row, lane) for row, lane in np.argwhere(rows["last"][:ROWS]).tolist()}
    assert len(final) > LANES
    batch_source.insert(rollout(rows))
    seen = {(int(number) // LANES, int(number) % LANES) for batch in taken(batch_source) for number in batch.ids}
    assert seen.isdisjoint(final)
    assert len(seen) + len(final) == ROWS * LANES


def test_epochs_are_shuffled_and_cut_into_even_parts() -> None:
    batch_source, _ = make(make_plan(VECTOR), VECTOR)
    batch_source.insert(rollout(stream(VECTOR, ROWS + 1, end=0.0)))
    batches = taken(batch_source)
    assert [len(batch.ids) for batch in batches] == [5, 5, 4, 4] * 3
    permutations = [tuple(int(n) for batch in batches[begin : begin + 4] for n in batch.ids) for begin in (0, 4, 8)]
    assert len(set(permutations)) == 3
    assert all(permutation != tuple(range(ROWS * LANES)) for permutation in permutations)


def test_more_minibatches_than_steps_leave_no_empty_batch() -> None:
    plan = make_plan(VECTOR, fresh=FreshReplay(rows=2, epochs=1, minibatches=50))
    batch_source, _ = make(plan, VECTOR)
    batch_source.insert(rollout(stream(VECTOR, 3, end=0.0)))
    assert [len(batch.ids) for batch in taken(batch_source)] == [1] * (2 * LANES)


def test_returns_are_fixed_while_the_block_is_learned_from() -> None:
    batch_source, learner = make(make_plan(VECTOR), VECTOR)
    rows = stream(VECTOR, ROWS + 1)
    batch_source.insert(rollout(rows))
    expected = expected_returns(rows, 0)
    learned = []
    while (batch := batch_source.next_batch(0)) is not None:
        learned.append(batch)
        batch_source.after_update(batch, learner.update(batch).priority)
    assert learner.updates == FRESH.epochs * FRESH.minibatches
    check_block(learned, rows, VECTOR, 0, expected)


def test_normalised_rewards_are_scaled_once() -> None:
    plan = make_plan(VECTOR, normalize="reward")
    batch_source, learner = make(plan, VECTOR)
    rows = stream(VECTOR, ROWS + 1)
    rows["reward"] *= 20
    batch_source.insert(rollout(rows))
    assert learner.net.rewards is not None
    scale = learner.net.rewards.scale()
    assert scale < 0.1
    batches = taken(batch_source)
    check_block(batches, rows, VECTOR, 0, expected_returns(rows, 0, scale=scale))
    for batch in batches:  # what the learner aims at is the return itself
        np.testing.assert_array_equal(learner.to_tensors(batch).reward.numpy(), batch.reward)


def test_no_target_network_is_read_or_updated() -> None:
    batch_source, learner = make(make_plan(VECTOR), VECTOR)
    before = {name: value.clone() for name, value in learner.target.state_dict().items()}
    batch_source.insert(rollout(stream(VECTOR, ROWS + 1)))
    for batch in taken(batch_source):
        learner.update(batch)
    assert all(torch.equal(before[name], value) for name, value in learner.target.state_dict().items())
    with torch.no_grad():
        for parameter in learner.target.parameters():
            parameter.fill_(torch.nan)
    batch_source.insert(rollout(stream(VECTOR, 2 * ROWS + 1), ROWS + 1))
    for batch in taken(batch_source):
        assert np.isfinite(learner.update(batch).loss)


def test_a_block_is_fitted_to_its_returns() -> None:
    plan = make_plan(VECTOR, fresh=FreshReplay(rows=ROWS, epochs=400, minibatches=1, trace=0.65))
    batch_source, learner = make(msgspec.structs.replace(plan, optim=Radam(learning_rate=1e-2)), VECTOR)
    batch_source.insert(rollout(stream(VECTOR, ROWS + 1)))
    losses = [learner.update(batch).loss for batch in taken(batch_source)]
    assert losses[-1] < losses[0] / 20


@pytest.mark.parametrize("moment", [ROWS // 2, ROWS, ROWS + 1, 2 * ROWS - 1])
def test_a_restored_source_continues_bit_for_bit(moment: int) -> None:
    plan = make_plan(VECTOR)
    rows = stream(VECTOR, 3 * ROWS + 1)
    batch_source, _ = make(plan, VECTOR)
    restored, _ = make(plan, VECTOR, seed=99)
    for row in range(moment):
        batch_source.insert(rollout(rows, row, row + 1))
        taken(batch_source)
    state, store = batch_source.state_dict(), batch_source.replay.store
    restored.load_state_dict(state)
    for lanes, begin, end in batch_source.replay.spans():
        restored.replay.store.restore(begin, end, store.read(begin, end, lanes), lanes)
    for row in range(moment, 3 * ROWS + 1):
        both = [taken_after(each, rows, row) for each in (batch_source, restored)]
        assert len(both[0]) == len(both[1])
        for one, other in zip(*both, strict=True):
            assert same(
                *({name: getattr(b, name) for name in ("obs", "action", "reward", "ids")} for b in (one, other))
            )
    assert batch_source.steps == restored.steps


def taken_after(batch_source: FreshSource, rows: dict[str, Array], row: int) -> list[Batch]:
    batch_source.insert(rollout(rows, row, row + 1))
    return taken(batch_source)


def test_without_its_rows_the_block_starts_empty() -> None:
    plan, rows = make_plan(VECTOR), stream(VECTOR, 3 * ROWS)
    batch_source, restored = make(plan, VECTOR)[0], make(plan, VECTOR)[0]
    for row in range(ROWS + 4):
        taken_after(batch_source, rows, row)
    restored.load_state_dict(batch_source.state_dict(), with_replay=False)
    assert restored.steps == batch_source.steps
    sizes = [len(taken_after(restored, rows, row)) for row in range(ROWS + 4, 2 * ROWS + 5)]
    assert sizes == [0] * ROWS + [FRESH.epochs * FRESH.minibatches]


def test_a_rollout_without_values_is_refused() -> None:
    batch_source, _ = make(make_plan(VECTOR), VECTOR)
    rows = stream(VECTOR, ROWS + 1)
    del rows["value"]
    with pytest.raises(ValueError, match="has no values"):
        batch_source.insert(rollout(rows))


def test_images_of_a_block_are_channels_last() -> None:
    batch_source, _ = make(make_plan(IMAGE), IMAGE)
    batch_source.insert(rollout(stream(IMAGE, ROWS + 1)))
    for batch in taken(batch_source):
        assert torch.from_numpy(batch.obs).is_contiguous(memory_format=torch.channels_last)
        assert batch.next_obs is batch.obs
