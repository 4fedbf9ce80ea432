"""Plain networks differentiated by hand. Shapes: N items, A actions, C channels.

The numbers are autograd's own, bit by bit (a test holds them together). For networks this small its bookkeeping costs
as much as the arithmetic.
"""

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from qfleet.nets.gradients import Ready
from qfleet.nets.heads import Plain
from qfleet.nets.layers import Dense, Relu
from qfleet.nets.qnet import QNet
from qfleet.nets.torso import Convolutions, Mlp


class Chain:
    """A view of a network whose layers are convolutions, then linear ones, with ReLU between them.

    Its weights are the network's own as long as those are written in place: make a new one when they are replaced.
    """

    def __init__(self, net: QNet, convolutions: list[nn.Conv2d], layers: list[nn.Linear]) -> None:
        self.net = net
        # A module's attributes are looked up at the price of an operation: here once and for all.
        self.convolutions = [(conv.weight.detach(), held(conv.bias), conv.stride) for conv in convolutions]
        self.layers = [(layer.weight.detach(), layer.weight.detach().t(), layer.bias.detach()) for layer in layers]
        # Of the last pass that wants gradients: the input of every convolution and the last maps; of every layer.
        self.maps: list[Tensor] = []
        self.inputs: list[Tensor] = []

    def __call__(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, A]
        """Outputs per action, unknown to autograd; with gradients on, `gradients` will be asked for."""
        maps = self.look(self.net.shown(obs))
        inputs, out = self.run(maps[-1].flatten(1))
        if torch.is_grad_enabled():
            self.maps, self.inputs = maps, inputs
        return out

    def look(self, values: Tensor) -> list[Tensor]:
        """The input of every convolution, and the output of the last."""
        if not self.convolutions:
            return [values]
        maps = [values.contiguous(memory_format=torch.channels_last)]
        for weight, bias, stride in self.convolutions:
            maps.append(torch.conv2d(maps[-1], weight, bias, stride).relu_())
        return maps

    def run(self, values: Tensor) -> tuple[list[Tensor], Tensor]:
        """The input of every layer, and the output of the last."""
        inputs, last = [], len(self.layers) - 1
        for at, (_, turned, bias) in enumerate(self.layers):
            inputs.append(values)
            values = torch.addmm(bias, values, turned)
            if at < last:
                values = values.relu_()
        return inputs, values

    def gradients(self, slope: Tensor, ready: Ready | None = None) -> list[Tensor]:  # [N, A]
        """By every weight and bias in order, from those by the outputs of the last pass; once per pass.

        `ready` hears of each as soon as it is known.
        """
        if not self.inputs:
            raise ValueError("no pass has been made that wants gradients")
        found = Found(2 * (len(self.layers) + len(self.convolutions)), ready)
        for at in range(len(self.layers) - 1, -1, -1):
            values = self.inputs[at]
            found.add(slope.sum(0), slope.t().mm(values))
            if at or self.convolutions:
                slope = torch.ops.aten.threshold_backward(slope.mm(self.layers[at][0]), values, 0)
        if self.convolutions:
            self.back(torch.empty_like(self.maps[-1]).copy_(slope.view(self.maps[-1].shape)), found)
        self.maps, self.inputs = [], []
        return found.tensors[::-1]

    def back(self, slope: Tensor, found: "Found") -> None:  # [N, C, H, W]
        """Gradients by the convolutions' biases and weights, last ones first, from those by the last one's output."""
        for at in range(len(self.convolutions) - 1, -1, -1):
            weight, _, stride = self.convolutions[at]
            shape = ([len(weight)], stride, (0, 0), (1, 1), False, (0, 0), 1)  # no padding, dilation or groups
            wanted = (at > 0, True, True)  # nobody asks for the gradient by the observations
            slope, by_weight, by_bias = torch.ops.aten.convolution_backward(
                slope, self.maps[at], weight, *shape, wanted
            )
            if at:
                slope = torch.ops.aten.threshold_backward(slope, self.maps[at], 0)
            found.add(by_bias, by_weight)


class Found:
    """Gradients as they are found, from the last parameter to the first of `num`."""

    def __init__(self, num: int, ready: Ready | None) -> None:
        self.num, self.ready = num, ready
        self.tensors: list[Tensor] = []

    def add(self, *gradients: Tensor) -> None:
        """Some more."""
        for gradient in gradients:
            self.tensors.append(gradient)
            if self.ready is not None:
                self.ready(self.num - len(self.tensors), gradient)


class Network(Protocol):
    """What a batch is shown to: a network without memory, or a view of one that gives the same outputs sooner."""

    def __call__(self, obs: Tensor) -> Tensor:
        """Outputs per action."""
        ...


def is_mixed(net: nn.Module) -> bool:
    """Are some parameters learned and some not?"""
    return len({parameter.requires_grad for parameter in net.parameters()}) > 1


def chain_of(net: QNet) -> Chain | None:
    """The network as a chain, if it is one: no memory, normalisation layers, noise, duelling or residual blocks."""
    if net.memory is not None or not (type(net.head) is Plain and len(net.head.shape) == 1) or is_mixed(net):
        return None
    convolutions = plain_convolutions(net.torso) if type(net.torso) is Convolutions else []
    dense = list(net.torso.layers) if type(net.torso) is Mlp else []
    if convolutions is None or not (convolutions or type(net.torso) is Mlp):
        return None
    stream = net.head.actions
    hidden = [*dense, *([] if stream.hidden is None else [stream.hidden])]
    if not all(isinstance(layer, Dense) and layer.norm is None and not layer.dropout for layer in hidden):
        return None
    layers = [*(layer.linear for layer in hidden), stream.out]
    # Layers whose weights are made from others, as by spectral norm, are of a class of their own.
    if not all(type(layer) is nn.Linear for layer in layers):
        return None
    return Chain(net, convolutions, cast("list[nn.Linear]", layers))


def plain_convolutions(torso: Convolutions) -> list[nn.Conv2d] | None:
    """The torso's convolutions, if there is nothing but ReLU between them."""
    if not all(type(layer) in (nn.Conv2d, nn.Identity, Relu) for layer in torso.layers):
        return None
    return [layer for layer in torso.layers if isinstance(layer, nn.Conv2d)]


def held(bias: Tensor | None) -> Tensor | None:
    """A layer's own bias, if it has one."""
    return None if bias is None else bias.detach()
