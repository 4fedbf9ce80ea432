"""Updates of chains (gradients without autograd) equal those of autograd, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch

from qfleet.data import Spec
from qfleet.learn import Learner, make_learner
from qfleet.nets import Chain, make_net
from qfleet.plan.schema import (
    Algo,
    DoubleRule,
    Env,
    FreshReplay,
    GruMemory,
    MaxRule,
    MlpTorso,
    MunchausenRule,
    NatureTorso,
    Net,
    Plan,
    QuantileHead,
    SequencesView,
)
from tests.learn.parts import IMAGE, VECTOR, batch, same

KINDS: dict[str, dict[str, Any]] = {
    "max": {"algo": Algo(rule=MaxRule())},
    "double": {"algo": Algo(rule=DoubleRule())},
    "munchausen": {"algo": Algo(rule=MunchausenRule())},
    "squared error": {"algo": Algo(loss="mse")},
    "rescaled": {"algo": Algo(rescale=True)},
    "whole returns": {"replay": FreshReplay()},
    "normalised": {"net": Net(torso=MlpTorso(sizes=(16, 16)), layer_norm=True)},
}


def pair(spec: Spec = VECTOR, **parts: Any) -> tuple[Learner, Learner]:
    """Two equal learners, of which the second uses autograd."""
    plan = Plan(env=Env(id="none"), **{"net": Net(torso=MlpTorso(sizes=(16, 16))), **parts})
    nets = (make_net(plan.net, spec, normalize="off", seed=1) for _ in range(2))
    one, other = (make_learner(plan, spec, net, torch.device("cpu")) for net in nets)
    other.gradients.online_forward, other.gradients.target_forward = other.net, other.target
    return one, other


@pytest.mark.parametrize("num", [1, 8, 12, 100])
@pytest.mark.parametrize("parts", KINDS.values(), ids=KINDS.keys())
def test_updates_equal_autograds_bit_for_bit(parts: dict[str, Any], num: int) -> None:
    one, other = pair(**parts)
    assert isinstance(one.gradients.online_forward, Chain)
    for seed in range(6):
        items = batch(num=num, seed=seed)
        items.reward *= 3.0  # errors on both sides of one, where a Huber loss becomes linear
        items.weight[:] = np.random.default_rng(seed).random(num)
        first, second = one.update(items), other.update(items)
        assert (first.loss, first.stats) == (second.loss, second.stats)
        assert first.priority.tolist() == second.priority.tolist()
    assert same(one.model_arrays(), other.model_arrays())
    assert same(one.optim_arrays(), other.optim_arrays())


@pytest.mark.parametrize("layer_norm", [False, True])
def test_updates_with_masks_and_images_equal_autograds(layer_norm: bool) -> None:
    one, other = pair(IMAGE, net=Net(torso=NatureTorso(width=16), layer_norm=layer_norm))
    items = batch(IMAGE)
    items.next_mask = items.mask = np.random.default_rng(0).random((8, 3)) < 0.5
    assert isinstance(one.gradients.online_forward, Chain)
    assert one.update(items).loss == other.update(items).loss
    assert same(one.model_arrays(), other.model_arrays())


def test_networks_that_are_no_chain_use_autograd() -> None:
    recurrent = {"net": Net(torso=MlpTorso(), memory=GruMemory()), "algo": Algo(view=SequencesView())}
    quantiles = {"net": Net(torso=MlpTorso(), head=QuantileHead())}
    assert not any(isinstance(pair(**parts)[0].gradients.online_forward, Chain) for parts in (recurrent, quantiles))
