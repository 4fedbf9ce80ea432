"""A loss of your own: log-cosh, which is smooth everywhere, quadratic for small errors and linear for large ones.

python examples/custom_loss.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import qfleet
from qfleet.custom import LossInputs


@dataclass(frozen=True)
class LogCosh:
    """scale^2 log cosh(error / scale), for heads with one value per action."""

    scale: float = 1.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Loss [M] and priority [M] of every row."""
        error = (inputs.predicted - inputs.target) / self.scale
        # log cosh(x) = x + log(1 + exp(-2 x)) - log 2, without an overflow.
        loss = error + functional.softplus(-2.0 * error) - torch.log(error.new_tensor(2.0))
        return self.scale**2 * loss, (self.scale * error).abs()


if __name__ == "__main__":
    run = qfleet.train("CartPole-v1", loss=LogCosh(), overrides={"until.steps": 6_000})
    print(run, run.result())
