"""Forward and backward passes of plain networks without autograd. Shapes: N items, A actions, C channels.

Results equal autograd's bit for bit (a test compares them); in wide layers, where the library adds in another order, to
the last bit or two. In small networks autograd's overhead costs as much as the arithmetic; in large ones ReLU in place
saves passes over the feature maps, and wide layers are multiplied in the faster order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from qfleet.nets.gradients import OnGradient
from qfleet.nets.heads import PlainHead
from qfleet.nets.layers import Dense, Relu
from qfleet.nets.qnet import QNet
from qfleet.nets.torso import Convolutions, Mlp

aten = torch.ops.aten
# Layers of at least this many weights are multiplied as weight x input^T for at least this many rows (docs/decisions).
WIDE_WEIGHTS = 1 << 20
WIDE_ROWS = 8
NormCache: TypeAlias = tuple[Tensor, Tensor, Tensor]  # a normalisation's input, means and 1 / standard deviations


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer normalisation: statistics over all features of an item, a scale and a shift per unit or channel."""

    weight: Tensor
    bias: Tensor
    eps: float

    def forward(self, values: Tensor) -> tuple[Tensor, NormCache]:
        """The normalised values, and the tensors that `backward` needs."""
        if values.ndim == 2:
            out, mean, inverse = aten.native_layer_norm(values, self.weight.shape, self.weight, self.bias, self.eps)
        else:
            out, mean, inverse = aten.native_group_norm(values, self.weight, self.bias, *sizes(values), 1, self.eps)
        return out, (values, mean, inverse)

    def backward(self, grad: Tensor, cache: NormCache) -> list[Tensor]:
        """Gradients of its input, scale and shift."""
        values, mean, inverse = cache
        output_mask = [True, True, True]
        if values.ndim == 2:
            rows = (self.weight.shape, mean, inverse, self.weight, self.bias)
            return list(aten.native_layer_norm_backward(grad, values, *rows, output_mask))
        grad = grad.contiguous(memory_format=torch.channels_last)  # the kernel assumes its input's memory format
        maps = (mean, inverse, self.weight, *sizes(values), 1)
        return list(aten.native_group_norm_backward(grad, values, *maps, output_mask))


@dataclass(frozen=True, slots=True)
class Linear:
    """A fully connected layer; `weight_t` is a transposed view of its weight."""

    weight: Tensor
    weight_t: Tensor
    bias: Tensor

    def forward(self, values: Tensor) -> Tensor:  # [N, in] -> [N, out]
        """The layer's output."""
        if self.is_wide(values):
            return torch.addmm(self.bias.unsqueeze(1), self.weight, values.t()).t().contiguous()
        return torch.addmm(self.bias, values, self.weight_t)

    def backward(self, grad: Tensor, values: Tensor, *, needs_input_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of its input (if needed), weight and bias."""
        bias_grad = grad.sum(0)
        weight_grad = grad.t().mm(values)
        if needs_input_grad:
            wide = self.is_wide(values)
            grad = self.weight_t.mm(grad.t()).t().contiguous() if wide else grad.mm(self.weight)
        return grad, weight_grad, bias_grad

    def is_wide(self, values: Tensor) -> bool:
        """Whether weight x input^T is faster."""
        return self.weight.numel() >= WIDE_WEIGHTS and len(values) >= WIDE_ROWS


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution without padding, dilation or groups."""

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]

    def forward(self, values: Tensor) -> Tensor:  # [N, C, H, W]
        """The layer's output."""
        return torch.conv2d(values, self.weight, self.bias, self.stride)

    def backward(self, grad: Tensor, values: Tensor, *, needs_input_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of its input (if needed), weight and bias."""
        shape = ([len(self.weight)], self.stride, (0, 0), (1, 1), False, (0, 0), 1)
        grads = aten.convolution_backward(grad, values, self.weight, *shape, (needs_input_grad, True, True))
        return cast("tuple[Tensor, Tensor, Tensor]", grads)


Layer: TypeAlias = tuple[Conv | Linear, Norm | None]
Network: TypeAlias = Callable[[Tensor], Tensor]  # a QNet without memory, or a faster view of one: outputs per action


class Chain:
    """A view of a network of convolutions, then linear layers, each optionally normalised, with ReLU between them.

    It shares the network's weights while those are written in place; make a new chain when they are replaced.
    """

    def __init__(self, net: QNet, layers: list[Layer]) -> None:
        self.net = net
        self.layers = layers
        self.takes_images = isinstance(layers[0][0], Conv)
        self.maps: tuple[int, ...] = ()  # [C, H, W] of the last convolution's output
        # Of the last forward pass with gradients enabled: every layer's input and normalisation cache.
        self.inputs: list[Tensor] = []
        self.caches: list[NormCache | None] = []

    def __call__(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, A]
        """Outputs per action, outside autograd; with gradients enabled, keep what `gradients` needs."""
        values = self.net.preprocess(obs)
        values = values.contiguous(memory_format=torch.channels_last) if self.takes_images else values.flatten(1)
        inputs, caches, out = self.forward(values)
        if torch.is_grad_enabled():
            self.inputs = inputs
            self.caches = caches
        return out

    def forward(self, values: Tensor) -> tuple[list[Tensor], list[NormCache | None], Tensor]:
        """The input and normalisation cache of every layer, and the output of the last."""
        inputs = list[Tensor]()
        caches = list[NormCache | None]()
        for layer, norm in self.layers:
            if values.ndim == 4 and type(layer) is Linear:
                self.maps = tuple(values.shape[1:])
                values = values.flatten(1)
            inputs.append(values)
            values = layer.forward(values)
            cache = None
            if norm is not None:
                values, cache = norm.forward(values)
            caches.append(cache)
            if len(inputs) < len(self.layers):
                values = values.relu_()
        return inputs, caches, values

    def gradients(self, grad: Tensor, on_gradient: OnGradient | None = None) -> list[Tensor]:  # [N, A]
        """Gradients of every weight and bias in order, given those of the last pass's outputs; once per pass.

        `on_gradient` is called with each as soon as it is computed.
        """
        if not self.inputs:
            raise ValueError("no forward pass was made with gradients enabled")
        at = sum(2 if norm is None else 4 for _, norm in self.layers)
        found: list[Tensor] = []
        for index in range(len(self.layers) - 1, -1, -1):
            grad, *own = self.backward(index, grad)
            for gradient in own:
                at -= 1
                found.append(gradient)
                if on_gradient is not None:
                    on_gradient(at, gradient)
        self.inputs = []
        self.caches = []
        return found[::-1]

    def backward(self, index: int, grad: Tensor) -> list[Tensor]:
        """From the gradient of a layer's output, before ReLU, to that of the layer before, and its own, last first."""
        layer, norm = self.layers[index]
        values = self.inputs[index]
        cache = self.caches[index]
        own: list[Tensor] = []
        if norm is not None and cache is not None:
            grad, scale_grad, shift_grad = norm.backward(grad, cache)
            own = [shift_grad, scale_grad]
        grad, weight_grad, bias_grad = layer.backward(grad, values, needs_input_grad=index > 0)
        own += [bias_grad, weight_grad]
        if index:
            grad = aten.threshold_backward.grad_input(grad, values, 0, grad_input=grad)
            if values.ndim == 2 and type(self.layers[index - 1][0]) is Conv:
                grad = grad.view(-1, *self.maps).contiguous(memory_format=torch.channels_last)
        return [grad, *own]


def make_chain(net: QNet) -> Chain | None:
    """The network as a chain, if it is one: no memory, noise, dropout, spectral norm, duelling or residual blocks."""
    partly_frozen = len({parameter.requires_grad for parameter in net.parameters()}) > 1
    if net.memory is not None or partly_frozen:
        return None
    if type(net.head) is not PlainHead or len(net.head.shape) > 1:
        return None
    stream = net.head.actions
    dense = [*(net.torso.layers if type(net.torso) is Mlp else []), *([] if stream.hidden is None else [stream.hidden])]
    layers = [conv_layers(net.torso), *(dense_layer(cast("Dense", layer)) for layer in dense), linear_layer(stream.out)]
    if type(net.torso) not in (Convolutions, Mlp) or None in layers:
        return None
    convs, *rest = layers
    return Chain(net, [*cast("list[Layer]", convs), *cast("list[Layer]", rest)])


def conv_layers(torso: nn.Module) -> list[Layer] | None:
    """The convolutions of a torso (none in an MLP); None if anything but normalisation and ReLU is between them."""
    layers = list(torso.layers) if type(torso) is Convolutions else []
    if not all(type(layer) in (nn.Conv2d, nn.GroupNorm, nn.Identity, Relu) for layer in layers):
        return None
    convs = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in layers if isinstance(layer, nn.GroupNorm)]
    if any(norm.weight.device.type != "cpu" for norm in norms):
        return None  # elsewhere torch's kernel does not support channels-last maps
    return [(make_conv(conv), make_norm(norms[at]) if norms else None) for at, conv in enumerate(convs)]


def make_conv(conv: nn.Conv2d) -> Conv:
    """A view of torch's convolution."""
    return Conv(conv.weight.detach(), None if conv.bias is None else conv.bias.detach(), conv.stride)


def dense_layer(dense: Dense) -> Layer | None:
    """A hidden layer, if it is linear, optionally normalised, without dropout."""
    linear = linear_layer(dense.linear)
    if linear is None or dense.dropout:
        return None
    return linear[0], None if dense.norm is None else make_norm(dense.norm)


def linear_layer(layer: nn.Module) -> Layer | None:
    """A linear layer; None for any other class, such as a linear layer with parametrised weights (spectral norm)."""
    if type(layer) is not nn.Linear:
        return None
    weight = layer.weight.detach()
    return Linear(weight, weight.t(), layer.bias.detach()), None


def make_norm(norm: nn.LayerNorm | nn.GroupNorm) -> Norm:
    """A view of torch's normalisation."""
    return Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)


def sizes(maps: Tensor) -> tuple[int, int, int]:
    """N, C, H x W."""
    num, channels, height, width = maps.shape
    return num, channels, height * width
