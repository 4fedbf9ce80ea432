"""The rate limiter's exact count, the observer's statistics, and the learner's loop when updates are not finite."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.data import Array, Batch
from qfleet.learn import (
    Diverging,
    Learner,
    NormalizationStatistics,
    RateLimiter,
    ReplaySource,
    make_batch_source,
    make_count_bonus,
    make_rate_limiter,
    run_learner,
)
from qfleet.plan import updates_per_step
from qfleet.plan.schema import Algo, BufferReplay, CountBonus, Env, FreshReplay, NoBonus, Plan
from qfleet.replay import make_replay
from qfleet.training.channels import LatestWeights, RolloutQueue
from tests.learn.parts import VECTOR, batch, make, same
from tests.replay.streams import random_stream, rollout


def limited(samples_per_insert: float, batch_size: int = 1, start: int = 0) -> Plan:
    """A plan of which only the ratio of updates to steps matters."""
    algo = Algo(batch_size=batch_size, learn_start_steps=start)
    return Plan(env=Env(id="none"), algo=algo, replay=BufferReplay(samples_per_insert=samples_per_insert))


@pytest.mark.parametrize(
    ("samples_per_insert", "batch_size", "start", "lanes"),
    [(0.7, 3, 1_001, 7), (1 / 3, 7, 0, 8), (0.1, 1, 5, 3), (1e-05, 1, 0, 8), (32.0, 256, 1_000, 8), (0.3, 1, 999, 16)],
)
def test_the_limiter_allows_exactly_the_floor(
    samples_per_insert: float, batch_size: int, start: int, lanes: int
) -> None:
    ratio = updates_per_step(limited(samples_per_insert, batch_size))
    assert ratio == Fraction(str(samples_per_insert)) / batch_size
    limiter = RateLimiter(ratio, start)
    for steps in range(0, 1_000_000, 97 * lanes):
        while limiter.can_update(steps):
            limiter.count_update()
        assert limiter.updates == max(0, (steps - start) * ratio.numerator // ratio.denominator)
    assert limiter.updates > 0


def test_a_ratio_that_floats_round_wrongly() -> None:
    assert int(1.1 * 10**17) != 11 * 10**16
    assert make_rate_limiter(limited(1.1)).allowed_updates(10**17) == 11 * 10**16
    assert [make_rate_limiter(limited(0.7)).allowed_updates(10 * tens) for tens in range(1_000)] == [
        7 * tens for tens in range(1_000)
    ]


@given(st.integers(1, 400), st.integers(1, 64), st.integers(0, 100), st.lists(st.integers(0, 20), max_size=30))
def test_the_limiter_does_not_depend_on_how_steps_arrive(
    hundredths: int, batch_size: int, start: int, arrivals: list[int]
) -> None:
    limiter, steps = make_rate_limiter(limited(hundredths / 100, batch_size, start)), 0
    for more in arrivals:
        steps += more
        while limiter.can_update(steps):
            limiter.count_update()
    assert limiter.updates == max(0, steps - start) * hundredths // (100 * batch_size)


def test_the_limiters_count_survives_a_restart() -> None:
    limiter, again = RateLimiter(Fraction(1), 0), RateLimiter(Fraction(1), 0)
    for _ in range(5):
        limiter.count_update()
    again.load_state_dict(limiter.state_dict())
    assert (
        [limiter.can_update(steps) for steps in (5, 6)]
        == [again.can_update(steps) for steps in (5, 6)]
        == [False, True]
    )


def test_forgiven_updates_are_never_made() -> None:
    limiter = RateLimiter(Fraction(1, 2), 10)
    limiter.count_update()
    limiter.forgive(30)  # ten were allowed, one was made
    assert [limiter.can_update(steps) for steps in (30, 31, 32)] == [False, False, True]
    again = RateLimiter(Fraction(1, 2), 10)
    again.load_state_dict(limiter.state_dict())
    assert [again.can_update(steps) for steps in (31, 32)] == [False, True]


class Script:
    """A replay that returns given batches and records the priorities it is updated with."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches
        self.updated: list[Array] = []

    def __len__(self) -> int:
        return len(self.batches)

    def sample(self, size: int) -> Batch | None:
        return self.batches.pop(0) if self.batches else None

    def update(self, ids: Array, priority: Array) -> None:
        self.updated.append(priority)


def source_of(learner: Learner, batches: list[Batch]) -> tuple[ReplaySource, Script]:
    script = Script(batches)
    batch_source = ReplaySource(script, RateLimiter(Fraction(1), 0), NormalizationStatistics(learner.net, 1, 0.99), 8)  # type: ignore[arg-type]
    batch_source.steps = 1_000
    return batch_source, script


def good() -> Batch:
    return batch()


def bad() -> Batch:
    return batch(reward=np.nan)


def test_five_consecutive_bad_batches_raise_and_leave_the_weights_unchanged() -> None:
    learner = make()
    before = learner.model_arrays()
    batch_source, script = source_of(learner, [bad() for _ in range(9)])
    worker = run_learner(learner, batch_source, RolloutQueue(1), LatestWeights())
    for _ in range(4):
        assert "skipped" in next(worker).stats
    with pytest.raises(Diverging, match="nan") as caught:
        next(worker)
    assert len(script.batches) == 4
    assert np.isnan(caught.value.batch.reward[0])
    assert same(learner.model_arrays(), before)
    assert learner.updates == batch_source.limiter.updates == 0
    assert not script.updated


def test_a_good_batch_resets_the_count_of_bad_ones() -> None:
    learner = make()
    batches = [*(bad() for _ in range(4)), good(), *(bad() for _ in range(4)), good()]
    batch_source, script = source_of(learner, batches)
    worker = run_learner(learner, batch_source, RolloutQueue(1), LatestWeights())
    kinds = ["loss" if "loss" in next(worker).stats else "skipped" for _ in range(10)]
    assert kinds == [*["skipped"] * 4, "loss", *["skipped"] * 4, "loss"]
    assert learner.updates == batch_source.limiter.updates == len(script.updated) == 2


def test_the_worker_publishes_waits_and_learns_at_the_limiters_rate() -> None:
    learner, board = make(), LatestWeights()
    batch_source, script = source_of(learner, [good() for _ in range(10)])
    batch_source.steps, under_way = 2, [0]
    worker = run_learner(learner, batch_source, RolloutQueue(1), board, lambda: under_way[0])
    assert [next(worker).busy for _ in range(4)] == [True, True, False, False]
    assert board.version == learner.updates + 1 == 3
    under_way[0] = 1  # a step that will surely arrive may be learned for already
    assert [next(worker).busy for _ in range(3)] == [True, False, False]
    assert len(script.updated) == 3
    assert script.updated[0].shape == (8,)


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_observers_statistics_are_those_of_the_rollouts(lanes: int) -> None:
    learner = make(normalize="both")
    normalization = NormalizationStatistics(learner.net, lanes, discount=0.9)
    rows = random_stream(np.random.default_rng(1), VECTOR, lanes, 60, end=0.2)
    for row in range(60):
        normalization.observe(rollout(rows, row, row + 1))
    seen = rows["obs"].reshape(-1, 4)
    returns = []
    for lane in range(lanes):
        total = 0.0
        for reward, last in zip(rows["reward"][:, lane], rows["last"][:, lane], strict=True):
            total = 0.0 if last else 0.9 * total + float(reward)
            returns += [] if last else [total]
    assert learner.net.normalize is not None
    assert learner.net.rewards is not None
    assert learner.net.normalize.mean.numpy() == pytest.approx(seen.astype(np.float64).mean(0), abs=1e-9)
    assert learner.net.rewards.count.item() == len(returns)
    assert learner.net.rewards.scale() == pytest.approx(1 / np.std(returns), rel=1e-6)


@pytest.mark.parametrize("clip", [False, True], ids=["raw", "clipped"])
@pytest.mark.parametrize("bonus", [NoBonus(), CountBonus(settle_steps=10**6)], ids=["", "bonus"])
@pytest.mark.parametrize("replay", [BufferReplay(capacity=100), FreshReplay(rows=8)], ids=["replay", "fresh"])
def test_rewards_are_scaled_by_the_statistics_of_inserted_rollouts(
    replay: BufferReplay | FreshReplay, bonus: NoBonus | CountBonus, clip: bool
) -> None:
    plan = Plan(env=Env(id="none", clip_reward=clip), algo=Algo(discount=0.0, bonus=bonus), replay=replay)
    learner, rng = make(normalize="reward"), np.random.default_rng(0)
    batch_source = make_batch_source(
        plan, make_replay(plan, VECTOR, 2, rng), learner, 2, make_count_bonus(plan, VECTOR, rng)
    )
    rows = random_stream(rng, VECTOR, 2, 60, end=0.2, values=True)
    rows["reward"] *= 50.0
    batch_source.insert(rollout(rows))
    rewards = rows["reward"][~rows["last"]].astype(np.float64)
    assert learner.net.rewards is not None
    spread = np.std(np.clip(rewards, -1, 1) if clip else rewards)  # the bonus is still nothing
    assert learner.net.rewards.scale() == pytest.approx(1 / spread, rel=1e-6)
