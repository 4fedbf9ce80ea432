"""Learners and batches for tests."""

import numpy as np
import torch

from qfleet.data import Array, Batch, Spec
from qfleet.learn import Learner, make_learner
from qfleet.nets import make_net
from qfleet.plan.schema import Adam, Algo, Env, MlpTorso, NatureTorso, Net, Plan, Radam, Rmsprop, Sgd

VECTOR = Spec((4,), "float32", (3,))
IMAGE = Spec((36, 36), "uint8", (3,), stack=4)  # the smallest image the Nature torso takes


def make(
    spec: Spec = VECTOR,
    optim: Adam | Radam | Rmsprop | Sgd | None = None,
    algo: Algo | None = None,
    *,
    normalize: str = "off",
    seed: int = 1,
) -> Learner:
    """A small learner."""
    torso = NatureTorso(width=16) if spec.stack > 1 else MlpTorso(sizes=(16, 16))
    plan = Plan(env=Env(id="none"), algo=algo or Algo(), optim=optim or Adam(), net=Net(torso=torso))
    net = make_net(plan.net, spec, normalize=normalize, seed=seed)
    return make_learner(plan, spec, net, torch.device("cpu"))


def batch(spec: Spec = VECTOR, num: int = 8, seed: int = 0, reward: float | None = None) -> Batch:
    """A random batch; `reward` replaces the first item's."""
    rng = np.random.default_rng(seed)

    def random_obs() -> Array:
        size = (num, *spec.input_shape)
        return (rng.integers(0, 256, size) if spec.dtype == "uint8" else rng.normal(size=size)).astype(spec.dtype)

    rewards = rng.normal(size=num).astype(np.float32)
    if reward is not None:
        rewards[0] = reward
    return Batch(
        obs=random_obs(),
        action=rng.integers(0, spec.num_actions, num),
        reward=rewards,
        discount=np.full(num, 0.9, np.float32),
        next_obs=random_obs(),
        weight=np.ones(num, np.float32),
        ids=np.arange(num),
    )


def same(first: dict[str, Array], second: dict[str, Array]) -> bool:
    """Whether all arrays are bit-equal."""
    return first.keys() == second.keys() and all(first[name].tobytes() == second[name].tobytes() for name in first)
