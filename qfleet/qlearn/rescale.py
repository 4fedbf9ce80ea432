"""Value rescaling: networks predict h(Q), whose size grows like the root of Q (Pohlen et al. 2018, prop. A.2)."""

import torch
from torch import Tensor

EPS = 1e-3


def squeeze(x: Tensor) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x."""
    return torch.sign(x) * (torch.sqrt(x.abs() + 1.0) - 1.0) + EPS * x


def unsqueeze(x: Tensor) -> Tensor:
    """The inverse of `squeeze`, exactly."""
    root = (torch.sqrt(1.0 + 4.0 * EPS * (x.abs() + 1.0 + EPS)) - 1.0) / (2.0 * EPS)
    return torch.sign(x) * (root * root - 1.0)


def bootstrap(values: Tensor, reward: Tensor, discount: Tensor, rescale: bool) -> Tensor:
    """R + discount * values, or h(R + discount * h^-1(values)) for values that are rescaled."""
    if not rescale:
        return reward + discount * values
    return squeeze(reward + discount * unsqueeze(values))
