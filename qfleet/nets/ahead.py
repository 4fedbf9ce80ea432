"""Outputs of a network that another thread computes while this one does something else."""

from functools import partial

import torch
from torch import Tensor

from qfleet.nets.chain import Chain
from qfleet.system.parallel_tasks import TaskThread

MIN_ROWS = 16  # of a part: in smaller ones more time goes into reading weights than into arithmetic


class AheadNetwork:
    """Computes a network's outputs for `obs`, without gradient, beside the caller; others are computed when asked for.

    The network must not draw random numbers: the order of two threads is not fixed.
    """

    def __init__(self, net: Chain, tasks: TaskThread, obs: Tensor) -> None:
        self.net = net
        self.obs = obs
        net.refresh_copies()  # not in two threads
        num = max(1, min(2, len(obs) // MIN_ROWS)) if net.has_independent_rows(obs) else 1
        self.parts = [tasks.submit(partial(net.outputs, part)) for part in obs.chunk(num)]

    def __call__(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, *out]
        """Outputs per action; parts that nobody has begun are computed here, the last ones first."""
        if obs is not self.obs:
            return self.net(obs)
        for part in reversed(self.parts):
            part.run()
        return torch.cat([part.result() for part in self.parts])
