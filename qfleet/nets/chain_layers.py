"""The layers of a chain: forward and backward passes without autograd. Shapes: N items, C channels.

The gradients of a layer's input and of its weights are separate calls, which two threads can make side by side.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qfleet.nets.layers import Dense

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

    def backward(self, grad: Tensor, cache: NormCache) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of its input, scale and shift."""
        values, mean, inverse = cache
        output_mask = [True, True, True]
        if values.ndim == 2:
            rows = (self.weight.shape, mean, inverse, self.weight, self.bias)
            grads = aten.native_layer_norm_backward(grad, values, *rows, output_mask)
        else:
            grad = grad.contiguous(memory_format=torch.channels_last)  # the kernel assumes its input's memory format
            maps = (mean, inverse, self.weight, *sizes(values), 1)
            grads = aten.native_group_norm_backward(grad, values, *maps, output_mask)
        below, scale_grad, shift_grad = grads
        return below, scale_grad, shift_grad


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

    def input_gradient(self, grad: Tensor, values: Tensor) -> Tensor:
        """The gradient of its input."""
        if self.is_wide(values):
            return self.weight_t.mm(grad.t()).t().contiguous()
        return grad.mm(self.weight)

    def weight_gradients(self, grad: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of weight and bias."""
        return grad.t().mm(values), grad.sum(0)

    def is_wide(self, values: Tensor) -> bool:
        """Whether weight x input^T is faster."""
        return self.weight.numel() >= WIDE_WEIGHTS and len(values) >= WIDE_ROWS


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution without padding, dilation or groups."""

    weight: Tensor
    bias: Tensor
    stride: tuple[int, ...]

    def forward(self, values: Tensor) -> Tensor:  # [N, C, H, W]
        """The layer's output."""
        return torch.conv2d(values, self.weight, self.bias, self.stride)

    def input_gradient(self, grad: Tensor, values: Tensor) -> Tensor:
        """The gradient of its input."""
        below: Tensor = self.backward(grad, values, (True, False, False))[0]
        return below

    def weight_gradients(self, grad: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of weight and bias."""
        _, weight_grad, bias_grad = self.backward(grad, values, (False, True, True))
        return weight_grad, bias_grad

    def backward(self, grad: Tensor, values: Tensor, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
        """The wanted gradients of input, weight and bias."""
        shape = ([len(self.weight)], self.stride, (0, 0), (1, 1), False, (0, 0), 1)
        grads: tuple[Tensor, Tensor, Tensor] = aten.convolution_backward(grad, values, self.weight, *shape, wanted)
        return grads


Layer: TypeAlias = tuple[Conv | Linear, Norm | None]


def reduced_layer(layer: Layer) -> Layer:
    """A layer whose weights are bfloat16 copies; a normalisation computes in float32 and keeps its weights."""
    multiply, norm = layer
    weight = multiply.weight.to(torch.bfloat16)
    bias = multiply.bias.to(torch.bfloat16)
    if isinstance(multiply, Conv):
        return Conv(weight, bias, multiply.stride), norm
    return Linear(weight, weight.t(), bias), norm


def make_conv(conv: nn.Conv2d) -> Conv | None:
    """A view of torch's convolution."""
    return None if conv.bias is None else Conv(conv.weight.detach(), conv.bias.detach(), conv.stride)


def make_linear(layer: nn.Module) -> Linear | None:
    """A view of a linear layer; None for any other class, such as one with parametrised weights (spectral norm)."""
    if type(layer) is not nn.Linear:
        return None
    weight = layer.weight.detach()
    return Linear(weight, weight.t(), layer.bias.detach())


def make_dense(dense: Dense) -> Layer | None:
    """A hidden layer, if it is linear, optionally normalised, without dropout."""
    linear = make_linear(dense.linear)
    if linear is None or dense.dropout:
        return None
    return linear, None if dense.norm is None else make_norm(dense.norm)


def make_norm(norm: nn.LayerNorm | nn.GroupNorm) -> Norm:
    """A view of torch's normalisation."""
    return Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)


def sizes(maps: Tensor) -> tuple[int, int, int]:
    """N, C, H x W."""
    num, channels, height, width = maps.shape
    return num, channels, height * width
