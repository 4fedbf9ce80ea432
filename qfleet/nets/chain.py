"""Plain networks differentiated by hand. Shapes: N items, A actions, C channels.

The numbers are autograd's own, bit by bit (a test holds them together); of wide layers to the last bit or two, where
the library adds in another order. For small networks autograd's bookkeeping costs as much as the arithmetic; large ones
are spared passes over their maps, because ReLU works in place, and have wide layers multiplied the quicker way round.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from qfleet.nets.gradients import Ready
from qfleet.nets.heads import PlainHead
from qfleet.nets.layers import Dense, Relu
from qfleet.nets.qnet import QNet
from qfleet.nets.torso import Convolutions, Mlp

aten = torch.ops.aten
# A layer of so many weights is multiplied the other way round, if so many rows are shown to it (docs/decisions).
WIDE_WEIGHTS = 1 << 20
WIDE_ROWS = 8
Kept: TypeAlias = tuple[Tensor, Tensor, Tensor] | None  # of a normalisation: its input, the means, 1 / the spreads


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer normalisation: statistics over all that one item has, a scale and a shift per unit or channel."""

    weight: Tensor
    bias: Tensor
    eps: float

    def run(self, values: Tensor) -> tuple[Tensor, Kept]:
        """Normalised, and what its gradient is found from."""
        if values.ndim == 2:
            out, mean, inverse = aten.native_layer_norm(values, self.weight.shape, self.weight, self.bias, self.eps)
        else:
            out, mean, inverse = aten.native_group_norm(values, self.weight, self.bias, *sizes(values), 1, self.eps)
        return out, (values, mean, inverse)

    def back(self, slope: Tensor, kept: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Gradients by its input, scale and shift."""
        values, mean, inverse = kept
        wanted = [True, True, True]
        if values.ndim == 2:
            rows = (self.weight.shape, mean, inverse, self.weight, self.bias)
            return list(aten.native_layer_norm_backward(slope, values, *rows, wanted))
        slope = slope.contiguous(memory_format=torch.channels_last)  # the kernel takes it to lie as its input does
        maps = (mean, inverse, self.weight, *sizes(values), 1)
        return list(aten.native_group_norm_backward(slope, values, *maps, wanted))


@dataclass(frozen=True, slots=True)
class Linear:
    """A fully connected layer; `turned` is its weight once more, transposed."""

    weight: Tensor
    turned: Tensor
    bias: Tensor

    def run(self, values: Tensor) -> Tensor:  # [N, in] -> [N, out]
        """What it makes of its input."""
        if self.is_wide(values):
            return torch.addmm(self.bias.unsqueeze(1), self.weight, values.t()).t().contiguous()
        return torch.addmm(self.bias, values, self.turned)

    def back(self, slope: Tensor, values: Tensor, *, further: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by its input, if that leads further, weight and bias."""
        by_bias = slope.sum(0)
        by_weight = slope.t().mm(values)
        if further:
            wide = self.is_wide(values)
            slope = self.turned.mm(slope.t()).t().contiguous() if wide else slope.mm(self.weight)
        return slope, by_weight, by_bias

    def is_wide(self, values: Tensor) -> bool:
        """Is it quicker the other way round?"""
        return self.weight.numel() >= WIDE_WEIGHTS and len(values) >= WIDE_ROWS


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution without padding, dilation or groups."""

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]

    def run(self, values: Tensor) -> Tensor:  # [N, C, H, W]
        """What it makes of its input."""
        return torch.conv2d(values, self.weight, self.bias, self.stride)

    def back(self, slope: Tensor, values: Tensor, *, further: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by its input, if that leads further, weight and bias."""
        shape = ([len(self.weight)], self.stride, (0, 0), (1, 1), False, (0, 0), 1)
        found = aten.convolution_backward(slope, values, self.weight, *shape, (further, True, True))
        return cast("tuple[Tensor, Tensor, Tensor]", found)


Link: TypeAlias = tuple[Conv | Linear, Norm | None]


class Chain:
    """A view of a network whose layers are convolutions, then linear ones, perhaps normalised, with ReLU between them.

    Its weights are the network's own as long as those are written in place: make a new one when they are replaced.
    """

    def __init__(self, net: QNet, links: list[Link]) -> None:
        self.net = net
        self.links = links
        self.pictures = isinstance(links[0][0], Conv)
        self.maps: tuple[int, ...] = ()  # [C, H, W] of the last convolution's output
        # Of the last pass that wants gradients: every layer's input, and what its normalisation kept.
        self.inputs: list[Tensor] = []
        self.kept: list[Kept] = []

    def __call__(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, A]
        """Outputs per action, unknown to autograd; with gradients on, `gradients` will be asked for."""
        values = self.net.shown(obs)
        values = values.contiguous(memory_format=torch.channels_last) if self.pictures else values.flatten(1)
        inputs, kept, out = self.run(values)
        if torch.is_grad_enabled():
            self.inputs = inputs
            self.kept = kept
        return out

    def run(self, values: Tensor) -> tuple[list[Tensor], list[Kept], Tensor]:
        """The input of every layer, what every normalisation kept, and the output of the last layer."""
        inputs = list[Tensor]()
        kept = list[Kept]()
        for layer, norm in self.links:
            if values.ndim == 4 and type(layer) is Linear:
                self.maps = tuple(values.shape[1:])
                values = values.flatten(1)
            inputs.append(values)
            values = layer.run(values)
            own = None
            if norm is not None:
                values, own = norm.run(values)
            kept.append(own)
            if len(inputs) < len(self.links):
                values = values.relu_()
        return inputs, kept, values

    def gradients(self, slope: Tensor, ready: Ready | None = None) -> list[Tensor]:  # [N, A]
        """By every weight and bias in order, from those by the outputs of the last pass; once per pass.

        `ready` hears of each as soon as it is known.
        """
        if not self.inputs:
            raise ValueError("no pass has been made that wants gradients")
        found = Found(sum(2 if norm is None else 4 for _, norm in self.links), ready)
        for at in range(len(self.links) - 1, -1, -1):
            slope = self.back(at, slope, found)
        self.inputs = []
        self.kept = []
        return found.tensors[::-1]

    def back(self, at: int, slope: Tensor, found: "Found") -> Tensor:
        """From the gradient by a layer's output, before ReLU, to that by the output of the layer before."""
        (layer, norm) = self.links[at]
        values = self.inputs[at]
        kept = self.kept[at]
        if norm is not None and kept is not None:
            slope, by_scale, by_shift = norm.back(slope, kept)
            found.add(by_shift, by_scale)
        slope, by_weight, by_bias = layer.back(slope, values, further=at > 0)  # nobody asks for that by observations
        found.add(by_bias, by_weight)
        if not at:
            return slope
        slope = aten.threshold_backward.grad_input(slope, values, 0, grad_input=slope)
        if values.ndim == 2 and type(self.links[at - 1][0]) is Conv:
            slope = slope.view(-1, *self.maps).contiguous(memory_format=torch.channels_last)
        return slope


class Found:
    """Gradients as they are found, from the last parameter to the first of `num`."""

    def __init__(self, num: int, ready: Ready | None) -> None:
        self.num = num
        self.ready = ready
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
    """The network as a chain, if it is one: no memory, noise, dropout, spectral norm, duelling or residual blocks."""
    if net.memory is not None or not (type(net.head) is PlainHead and len(net.head.shape) == 1) or is_mixed(net):
        return None
    stream = net.head.actions
    dense = [*(net.torso.layers if type(net.torso) is Mlp else []), *([] if stream.hidden is None else [stream.hidden])]
    links = [conv_links(net.torso), *(dense_link(cast("Dense", layer)) for layer in dense), linear_link(stream.out)]
    if type(net.torso) not in (Convolutions, Mlp) or None in links:
        return None
    first, *rest = links
    return Chain(net, [*cast("list[Link]", first), *cast("list[Link]", rest)])


def conv_links(torso: nn.Module) -> list[Link] | None:
    """The convolutions of a torso that may have some, if there is nothing but normalisation and ReLU between them."""
    layers = list(torso.layers) if type(torso) is Convolutions else []
    if not all(type(layer) in (nn.Conv2d, nn.GroupNorm, nn.Identity, Relu) for layer in layers):
        return None
    convs = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in layers if isinstance(layer, nn.GroupNorm)]
    if any(norm.weight.device.type != "cpu" for norm in norms):
        return None  # elsewhere torch's kernel does not know maps that lie channels last
    found = [Conv(conv.weight.detach(), held(conv.bias), conv.stride) for conv in convs]
    return [(conv, norm_of(norms[at]) if norms else None) for at, conv in enumerate(found)]


def dense_link(dense: Dense) -> Link | None:
    """A hidden layer, if it is linear, perhaps normalised, and nothing is dropped."""
    link = linear_link(dense.linear)
    if link is None or dense.dropout:
        return None
    return link[0], None if dense.norm is None else norm_of(dense.norm)


def linear_link(layer: nn.Module) -> Link | None:
    """A linear layer; one whose weights are made from others, as by spectral norm, is of a class of its own."""
    if type(layer) is not nn.Linear:
        return None
    weight = layer.weight.detach()
    return Linear(weight, weight.t(), layer.bias.detach()), None


def norm_of(norm: nn.LayerNorm | nn.GroupNorm) -> Norm:
    """A normalisation."""
    return Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)


def sizes(maps: Tensor) -> tuple[int, int, int]:
    """N, C, H x W."""
    num, channels, height, width = maps.shape
    return num, channels, height * width


def held(bias: Tensor | None) -> Tensor | None:
    """A layer's own bias, if it has one."""
    return None if bias is None else bias.detach()
