"""The learning rate's schedule, and batches computed in parts."""

import numpy as np
import pytest
import torch

from qfleet.data import Batch, Spec
from qfleet.learn import Learner, make_learner
from qfleet.learn.optimizer import RateSchedule
from qfleet.nets import make_net
from qfleet.plan import make_plan

SPEC = Spec((4,), "float32", (2,))


def learner(**settings: object) -> Learner:
    plan = make_plan("CartPole-v1", overrides={"net.torso.type": "mlp", "net.torso.sizes": (16,), **settings})
    net = make_net(plan.net, SPEC, normalize="off", seed=1)
    return make_learner(plan, SPEC, net, torch.device("cpu"))


def batch(num: int) -> Batch:
    rng = np.random.default_rng(0)
    obs, next_obs = (rng.normal(size=(num, 4)).astype(np.float32) for _ in range(2))
    ones = np.ones(num, np.float32)
    weight = rng.random(num).astype(np.float32)
    return Batch(obs, rng.integers(0, 2, num), ones, ones * 0.9, next_obs, weight, np.arange(num))


def test_the_rate_warms_up_then_decays() -> None:
    rates = [RateSchedule(2.0, warm_updates=3, decay_updates=8)(updates) for updates in (0, 1, 3, 4, 8, 9)]
    assert rates == pytest.approx([2 * 0.25, 2 * 0.5 * 7 / 8, 2 * 5 / 8, 2 * 4 / 8, 0.0, 0.0])
    assert RateSchedule()(12345) == 1.0


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_grows_with_the_batch(scaling: str, factor: float) -> None:
    settings = {"algo.batch_size": 128, "optim.base_batch": 32, "optim.scaling": scaling, "optim.learning_rate": 1e-3}
    assert learner(**settings).current_rate() == pytest.approx(factor * 1e-3)


@pytest.mark.parametrize("parts", [2, 5])
def test_accumulated_gradients_equal_those_of_the_whole_batch(parts: int) -> None:
    whole, other = learner(), learner(**{"algo.accumulate": parts})
    for _ in range(5):
        one, two = whole.update(batch(32)), other.update(batch(32))
        np.testing.assert_allclose(two.priority, one.priority, rtol=1e-3, atol=1e-5)
        assert two.loss == pytest.approx(one.loss, rel=1e-4)
    for first, second in zip(whole.online_tensors, other.online_tensors, strict=True):
        torch.testing.assert_close(second, first, rtol=1e-3, atol=1e-5)
