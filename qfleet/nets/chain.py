"""Plain fully connected networks differentiated by hand. Shapes: N items, A actions.

The numbers are autograd's own, bit by bit (a test holds them together). For networks this small its bookkeeping costs
as much as the arithmetic.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from qfleet.nets.heads import Plain
from qfleet.nets.layers import Dense
from qfleet.nets.qnet import QNet
from qfleet.nets.torso import Mlp


class Chain:
    """A view of a network whose layers are linear with ReLU between them.

    Its weights are the network's own as long as those are written in place: make a new one when they are replaced.
    """

    def __init__(self, net: QNet, layers: list[nn.Linear]) -> None:
        self.net = net
        # A module's attributes are looked up at the price of an operation: here once and for all.
        self.layers = [(layer.weight.detach(), layer.weight.detach().t(), layer.bias.detach()) for layer in layers]
        self.inputs: list[Tensor] = []  # of each layer, in the last pass that wants gradients

    def __call__(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, A]
        """Outputs per action, unknown to autograd; with gradients on, `gradients` will be asked for."""
        inputs, out = self.run(self.net.shown(obs).flatten(1))
        if torch.is_grad_enabled():
            self.inputs = inputs
        return out

    def run(self, values: Tensor) -> tuple[list[Tensor], Tensor]:
        """The input of every layer, and the output of the last."""
        inputs, last = [], len(self.layers) - 1
        for at, (_, turned, bias) in enumerate(self.layers):
            inputs.append(values)
            values = torch.addmm(bias, values, turned)
            if at < last:
                values = values.relu_()
        return inputs, values

    def gradients(self, slope: Tensor) -> list[Tensor]:  # [N, A]
        """By every weight and bias in order, from those by the outputs of the last pass; once per pass."""
        if not self.inputs:
            raise ValueError("no pass has been made that wants gradients")
        found: list[Tensor] = []
        for at in range(len(self.layers) - 1, -1, -1):
            values = self.inputs[at]
            found += (slope.sum(0), slope.t().mm(values))
            if at:
                slope = torch.ops.aten.threshold_backward(slope.mm(self.layers[at][0]), values, 0)
        self.inputs = []
        return found[::-1]


class Network(Protocol):
    """What a batch is shown to: a network without memory, or a view of one that gives the same outputs sooner."""

    def __call__(self, obs: Tensor) -> Tensor:
        """Outputs per action."""
        ...


def is_mixed(net: nn.Module) -> bool:
    """Are some parameters learned and some not?"""
    return len({parameter.requires_grad for parameter in net.parameters()}) > 1


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
    if not all(type(layer) is nn.Linear for layer in layers) or is_mixed(net):
        return None
    return Chain(net, layers)
