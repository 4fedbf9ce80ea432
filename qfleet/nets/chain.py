"""Plain fully connected networks differentiated by hand. Shapes: N items, A actions.

The numbers are autograd's own, bit by bit (a test holds them together). For networks this small its bookkeeping costs
as much as the arithmetic; so only what comes after the outputs, heads and losses, is left to it.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from qfleet.nets.gradients import gradients_of
from qfleet.nets.heads import Plain
from qfleet.nets.layers import Dense
from qfleet.nets.qnet import QNet
from qfleet.nets.torso import Mlp


class Chain:
    """A view of a network whose layers are linear with ReLU between them; its weights are the network's, live."""

    def __init__(self, net: QNet, layers: list[nn.Linear]) -> None:
        self.net, self.layers = net, layers
        self.inputs: list[Tensor] = []  # of each layer, in the last pass that wants gradients
        self.out: Tensor | None = None

    def __call__(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, A]
        """Outputs per action; with gradients on, they are where autograd stops."""
        learns = torch.is_grad_enabled()
        with torch.no_grad():
            inputs, out = self.run(self.net.shown(obs).flatten(1))
        if learns:
            self.inputs, self.out = inputs, out.requires_grad_()
        return out

    def run(self, values: Tensor) -> tuple[list[Tensor], Tensor]:
        """The input of every layer, and the output of the last."""
        inputs, last = [], len(self.layers) - 1
        for at, layer in enumerate(self.layers):
            inputs.append(values)
            values = torch.addmm(layer.bias, values, layer.weight.t())
            if at < last:
                values = values.relu_()
        return inputs, values

    @torch.no_grad()
    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Of the loss, by every weight and bias in order; once per pass."""
        if self.out is None:
            raise ValueError("no pass has been made that wants gradients")
        (slope,) = gradients_of(loss, [self.out])
        found: list[Tensor] = []
        for at in range(len(self.layers) - 1, -1, -1):
            values = self.inputs[at]
            found += (slope.sum(0), slope.t().mm(values))
            if at:
                slope = torch.ops.aten.threshold_backward(slope.mm(self.layers[at].weight), values, 0)
        self.inputs, self.out = [], None
        return found[::-1]


class Network(Protocol):
    """What a batch is shown to: a network without memory, or a view of one that gives the same outputs sooner."""

    def __call__(self, obs: Tensor) -> Tensor:
        """Outputs per action."""
        ...


def chain_of(net: QNet) -> Chain | None:
    """The network as a chain, if it is one: a plain MLP without memory, normalisation layers, noise or duelling."""
    if not (type(net.torso) is Mlp and net.memory is None and type(net.head) is Plain and len(net.head.shape) == 1):
        return None
    stream = net.head.actions
    hidden = [*net.torso.layers, *([] if stream.hidden is None else [stream.hidden])]
    if not all(isinstance(layer, Dense) and layer.norm is None and not layer.dropout for layer in hidden):
        return None
    layers = [*(layer.linear for layer in hidden), stream.out]
    # Layers whose weights are made from others, as by spectral norm, are of a class of their own.
    if not all(type(layer) is nn.Linear for layer in layers):
        return None
    return Chain(net, layers)
