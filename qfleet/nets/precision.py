"""Networks that compute in reduced precision. Shapes: N items."""

import torch
from torch import Tensor, nn


class Reduced:
    """A view of a network that multiplies in bfloat16; its weights, outputs and gradients stay float32."""

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        self.net = net
        self.device_type = device.type

    def __call__(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, *out]
        """Outputs per action."""
        with torch.autocast(self.device_type, torch.bfloat16):
            out: Tensor = self.net(obs)
        return out.float()
