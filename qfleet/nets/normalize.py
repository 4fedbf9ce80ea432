"""Running normalisation, saved with the weights so that a policy normalises as it was trained."""

import torch
from torch import Tensor, nn

LIMIT = 10.0  # normalised observations and rewards are clipped to +-LIMIT, as in Stable-Baselines3's VecNormalize
EPS = 1e-8


class Normalize(nn.Module):
    """Keeps running count, mean and variance (Chan et al. 1979) and standardises with them."""

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:  # [N, *shape]
        """Update the running statistics with a batch."""
        if len(values) == 0:
            return
        values = values.to(self.mean)
        mean = values.mean(0)
        var = values.var(0, unbiased=False)
        total = self.count + len(values)
        delta = mean - self.mean
        squares = self.var * self.count + var * len(values) + delta**2 * self.count * len(values) / total
        self.mean += delta * len(values) / total
        self.var.copy_(squares / total)
        self.count.copy_(total)

    def forward(self, values: Tensor) -> Tensor:
        """Standardise and clip."""
        scaled = (values - self.mean) / torch.sqrt(self.var + EPS)
        return scaled.clamp(-LIMIT, LIMIT).to(torch.float32)

    def scale(self) -> float:
        """1 / standard deviation: rewards are scaled but never shifted."""
        return float(1.0 / torch.sqrt(self.var + EPS).mean())
