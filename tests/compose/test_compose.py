"""Every combination of what a plan can choose makes one finite update, moves the weights and writes priorities."""

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch

from qfleet.data import Rollout, Spec
from qfleet.learn import make_learner
from qfleet.nets import make_net
from qfleet.plan.schema import (
    Adam,
    Algo,
    AverageTarget,
    CopyTarget,
    DoubleRule,
    Env,
    MaxRule,
    MlpTorso,
    NatureTorso,
    Net,
    Plan,
    PrioritizedSampler,
    Replay,
    Rmsprop,
    Sgd,
    UniformSampler,
)
from qfleet.replay import Prioritized, make_replay
from tests.replay.streams import random_stream, rollout

SPECS = {
    "vector": Spec((4,), "float32", (3,)),
    "picture": Spec((36, 36), "uint8", (3,), stack=4),
    "masked": Spec((4,), "float32", (3,), masked=True),
}
LANES, ROWS, BATCH = 2, 12, 8


def stream(spec: Spec) -> Rollout:
    return rollout(random_stream(np.random.default_rng(1), spec, LANES, ROWS, end=0.2))


STREAMS = {name: stream(spec) for name, spec in SPECS.items()}


@dataclass(frozen=True)
class Choice:
    """One of each axis."""

    rule: MaxRule | DoubleRule
    dueling: bool
    loss: Literal["huber", "mse"]
    sampler: UniformSampler | PrioritizedSampler
    n_step: int
    target: CopyTarget | AverageTarget
    optim: Adam | Rmsprop | Sgd
    world: str

    def plan(self) -> Plan:
        return Plan(
            env=Env(id="none", num=LANES),
            algo=Algo(rule=self.rule, n_step=self.n_step, target=self.target, loss=self.loss, batch_size=BATCH),
            optim=self.optim,
            net=Net(
                torso=NatureTorso(width=8) if self.world == "picture" else MlpTorso(sizes=(8, 8)), dueling=self.dueling
            ),
            replay=Replay(capacity=16, sampler=self.sampler),
        )

    def __str__(self) -> str:
        parts = (self.rule, self.sampler, self.target, self.optim)
        names = [type(part).__name__ for part in parts]
        return "-".join([*names, "dueling" if self.dueling else "plain", self.loss, f"n{self.n_step}", self.world])


CHOICES = [
    Choice(*axes)  # type: ignore[arg-type]
    for axes in itertools.product(
        [MaxRule(), DoubleRule()],
        [False, True],
        ["huber", "mse"],
        [UniformSampler(), PrioritizedSampler()],
        [1, 3],
        [CopyTarget(every_updates=1), AverageTarget(tau=0.5)],
        [Adam(), Rmsprop(), Sgd()],
        list(SPECS),
    )
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_one_update(choice: Choice) -> None:
    plan, spec = choice.plan(), SPECS[choice.world]
    replay = make_replay(plan, spec, LANES, np.random.default_rng(2))
    replay.add(STREAMS[choice.world])
    learner = make_learner(plan, make_net(plan.net, spec, normalize="off", seed=1), torch.device("cpu"))
    before, target_before = learner.model_arrays(), learner.optim_arrays()
    batch = replay.sample(BATCH)
    assert batch is not None
    report = learner.update(batch)
    replay.update(batch.ids, report.priority)
    assert np.isfinite(report.loss)
    assert report.loss > 0
    after, target_after = learner.model_arrays(), learner.optim_arrays()
    assert learner.finite()
    for name, value in before.items():
        assert not np.array_equal(value, after[name]), f"{name} did not move"
        old, new = target_before[f"target.{name}"], target_after[f"target.{name}"]
        follows = isinstance(choice.target, CopyTarget)
        assert np.array_equal(new, after[name]) == follows, f"{name}: the target did not follow as told"
        assert not np.array_equal(new, old), f"{name}: the target stood still"
    check_priorities(replay.sampler, batch.ids, report.priority)


def check_priorities(sampler: object, ids: np.ndarray[tuple[int], np.dtype[np.int64]], priority: object) -> None:
    """What the learner found is what the sampler now draws by."""
    if isinstance(sampler, Prioritized):
        leaves = sampler.tree[len(sampler.tree) // 2 + ids % sampler.capacity]
        assert leaves == pytest.approx((np.asarray(priority) + sampler.eps) ** sampler.alpha)
