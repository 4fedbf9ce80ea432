"""Forward and backward passes of plain networks without autograd. Shapes: N items, A actions, C channels.

Results equal autograd's bit for bit (a test compares them); in wide layers, where the library adds in another order, to
the last bit or two. In small networks autograd's overhead costs as much as the arithmetic; in large ones ReLU in place
saves passes over the feature maps, and wide layers are multiplied in the faster order.

With a task thread the gradients of weights are computed beside those of inputs. Every operation runs on one thread, so
the bits do not depend on the number of threads.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from qfleet.nets.chain_layers import (
    Conv,
    Layer,
    Linear,
    NormCache,
    make_conv,
    make_dense,
    make_linear,
    make_norm,
    reduced_layer,
)
from qfleet.nets.gradients import OnGradient, gradients_of
from qfleet.nets.heads import HeadStream, PlainHead
from qfleet.nets.layers import Dense, Relu
from qfleet.nets.qnet import QNet
from qfleet.nets.torso import Convolutions, Mlp, bytes_channels_last
from qfleet.system.parallel_tasks import Task, TaskThread

aten = torch.ops.aten
Network: TypeAlias = Callable[[Tensor], Tensor]  # a QNet without memory, or a faster view of one: outputs per action
Gradients: TypeAlias = tuple[Tensor, ...]
PIXEL_SCALE = 1.0 / 255.0


class Chain:
    """A view of a network of convolutions, then linear layers, each optionally normalised, with ReLU between them.

    If its head is not such a stream of layers, the head is `tail` and is differentiated by autograd. It shares the
    network's weights while those are written in place; make a new chain when they are replaced.

    With `reduced` the layers multiply bfloat16 copies of the weights, which are renewed when the weights have changed.
    The last linear layer, outputs and gradients are float32. `pixels`: observations are bytes.
    """

    def __init__(
        self,
        net: QNet,
        layers: list[Layer],
        tail: nn.Module | None = None,
        *,
        reduced: bool = False,
        pixels: bool = False,
        tasks: TaskThread | None = None,
    ) -> None:
        self.net = net
        self.tail = tail
        self.reduced = reduced
        self.tasks = tasks
        self.takes_images = isinstance(layers[0][0], Conv)
        self.full_layers = layers
        num_reduced = len(layers) - (tail is None) if reduced else 0
        self.num_copies = 2 * num_reduced  # weights and biases
        self.layers = [*map(reduced_layer, layers[:num_reduced]), *layers[num_reduced:]]
        self.weight_versions: list[int] = []  # of the weights that the bfloat16 copies were made from
        self.maps: tuple[int, ...] = ()  # [C, H, W] of the last convolution's output
        # Of the last forward pass with gradients enabled: every layer's input and normalisation cache.
        self.inputs: list[Tensor] = []
        self.caches: list[NormCache | None] = []
        self.features: Tensor | None = None  # the tail's input
        self.independent_rows: dict[torch.Size, bool] = {}  # by the shape of observations
        # Bytes are multiplied as they are, which is exact in bfloat16, by weights that are divided by 255.
        self.scales_pixels = reduced and pixels and self.takes_images

    def __call__(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, *out]
        """Outputs per action, outside autograd but for a tail; with gradients enabled, keep what they need."""
        values = self.prepare(obs)
        self.refresh_copies()
        inputs, caches, out = self.forward(values if self.takes_images else values.flatten(1))
        learns = torch.is_grad_enabled()
        if learns:
            self.inputs = inputs
            self.caches = caches
        return out if self.tail is None else self.call_tail(self.tail, out, learns=learns)

    def outputs(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, *out]
        """Outputs per action without gradient, by the present copies of the weights; several threads may call it."""
        with torch.no_grad():
            values = self.prepare(obs)
            out = self.forward(values if self.takes_images else values.flatten(1))[2]
            return out if self.tail is None else self.call_tail(self.tail, out, learns=False)

    def has_independent_rows(self, obs: Tensor) -> bool:
        """Whether two halves of these observations give the bits of the whole; tried once for every shape.

        The library chooses its kernels by shape, and in another kernel sums may have another order.
        """
        known = self.independent_rows.get(obs.shape)
        if known is None:
            halves = [self.outputs(part) for part in obs.chunk(2)]
            known = self.independent_rows[obs.shape] = torch.equal(torch.cat(halves), self.outputs(obs))
        return known

    def prepare(self, obs: Tensor) -> Tensor:  # [N, *input_shape]
        """The first layer's input. What is prepared already stays as it is, so two networks can share it."""
        if not self.reduced:
            values = self.net.preprocess(obs)
            return values.contiguous(memory_format=torch.channels_last) if self.takes_images else values
        if obs.dtype == torch.bfloat16:
            return obs
        if self.scales_pixels:
            return bytes_channels_last(obs).to(torch.bfloat16)
        values = self.net.preprocess(obs).to(torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last) if self.takes_images else values

    def refresh_copies(self, *, always: bool = False) -> None:
        """Renew the bfloat16 copies if the weights were written since; a tensor's version counts its writes."""
        if not self.reduced:
            return
        versions = [full.weight._version for full, _ in self.full_layers]
        if versions == self.weight_versions and not always:
            return
        self.weight_versions = versions
        copies = [tensor for layer, _ in self.layers for tensor in (layer.weight, layer.bias)]
        weights = [tensor for full, _ in self.full_layers for tensor in (full.weight, full.bias)]
        if self.scales_pixels:
            weights[0] = weights[0] * PIXEL_SCALE
        torch._foreach_copy_(copies[: self.num_copies], weights[: self.num_copies])

    def forward(self, values: Tensor) -> tuple[list[Tensor], list[NormCache | None], Tensor]:
        """The input and normalisation cache of every layer, and the output of the last."""
        inputs = list[Tensor]()
        caches = list[NormCache | None]()
        for layer, norm in self.layers:
            if values.ndim == 4 and type(layer) is Linear:
                self.maps = tuple(values.shape[1:])
                values = values.flatten(1)
            values = values.to(layer.weight.dtype)
            inputs.append(values)
            values = layer.forward(values)
            cache = None
            if norm is not None:
                values, cache = norm.forward(values)
            caches.append(cache)
            if len(inputs) < len(self.layers) or self.tail is not None:
                values = values.relu_()
        return inputs, caches, values

    def call_tail(self, tail: nn.Module, maps: Tensor, *, learns: bool) -> Tensor:  # [N, C, H, W] -> [N, *out]
        """The head's outputs; with gradients enabled its autograd graph begins at its input."""
        self.maps = tuple(maps.shape[1:])
        features = maps.flatten(1)
        if learns:
            self.features = features.requires_grad_()
        if not self.reduced:
            out: Tensor = tail(features)
            return out
        with torch.autocast(features.device.type, torch.bfloat16):
            out = tail(features)
        return out.float()

    def loss_gradients(self, loss: Tensor, on_gradient: OnGradient | None = None) -> list[Tensor]:
        """As `gradients`, given a loss of the last pass's outputs: the gradient of the tail is autograd's."""
        if self.features is None or self.tail is None:
            raise ValueError("no forward pass was made with gradients enabled")
        features = self.features
        self.features = None
        report = None if on_gradient is None else partial(report_of_tail, on_gradient, self.num_gradients - 1)
        grad, *own = gradients_of(loss, [features, *self.tail.parameters()], report)
        values = features.detach()
        grad = aten.threshold_backward(grad, values, 0)
        return [*self.gradients(self.to_maps(grad), on_gradient), *own]

    def gradients(self, grad: Tensor, on_gradient: OnGradient | None = None) -> list[Tensor]:  # [N, A]
        """Gradients of every weight and bias in order, given those of the last pass's outputs; once per pass.

        `on_gradient` is called with each as soon as it is known.
        """
        if not self.inputs:
            raise ValueError("no forward pass was made with gradients enabled")
        found: list[Tensor] = []
        tasks: list[Task[Gradients]] = []
        for index in range(len(self.layers) - 1, -1, -1):
            grad, own = self.backward(index, grad)
            if self.tasks is None:
                self.collect(own(), found, on_gradient)
            else:
                tasks.append(self.tasks.submit(own))
        for task in reversed(tasks):
            task.run()  # from the end, where the task thread is not yet
        for task in tasks:
            self.collect(task.result(), found, on_gradient)
        self.inputs = []
        self.caches = []
        return found[::-1]

    def collect(self, gradients: Gradients, found: list[Tensor], on_gradient: OnGradient | None) -> None:
        """Add a layer's gradients, last first, to those of the layers above."""
        for gradient in gradients:
            found.append(gradient)
            if on_gradient is not None:
                on_gradient(self.num_gradients - len(found), gradient)

    def backward(self, index: int, grad: Tensor) -> tuple[Tensor, Callable[[], Gradients]]:
        """From the gradient of a layer's output, before ReLU, to that of the layer before.

        Also returned: the call that computes the gradients of the layer's own weights, last first.
        """
        layer, norm = self.layers[index]
        values = self.inputs[index]
        cache = self.caches[index]
        of_norm: Gradients = ()
        if norm is not None and cache is not None:
            grad, scale_grad, shift_grad = norm.backward(grad, cache)
            of_norm = (shift_grad, scale_grad)
        own = partial(self.weight_gradients, index, grad, values, of_norm)
        if index == 0:
            return grad, own
        below = layer.input_gradient(grad, values)
        below = aten.threshold_backward.grad_input(below, values, 0, grad_input=below)
        if values.ndim == 2 and type(self.layers[index - 1][0]) is Conv:
            below = self.to_maps(below)
        return below.to(self.inputs[index - 1].dtype), own

    def weight_gradients(self, index: int, grad: Tensor, values: Tensor, of_norm: Gradients) -> Gradients:
        """A layer's gradients in float32, last first."""
        weight_grad, bias_grad = self.layers[index][0].weight_gradients(grad, values)
        weight_grad = weight_grad.float()
        if index == 0 and self.scales_pixels:
            weight_grad *= PIXEL_SCALE
        return *of_norm, bias_grad.float(), weight_grad

    def to_maps(self, grad: Tensor) -> Tensor:  # [N, F] -> [N, C, H, W]
        """The gradient of the last convolution's output."""
        return grad.view(-1, *self.maps).contiguous(memory_format=torch.channels_last)

    @property
    def num_gradients(self) -> int:
        """The number of weights, biases, scales and shifts, without those of a tail."""
        return sum(2 if norm is None else 4 for _, norm in self.layers)


def report_of_tail(on_gradient: OnGradient, before: int, at: int, gradient: Tensor) -> None:
    """Report a gradient of the tail; the first one is that of its input, `before` is one less than its own place."""
    if at:
        on_gradient(before + at, gradient)


def make_chain(
    net: QNet, *, reduced: bool = False, pixels: bool = False, tasks: TaskThread | None = None
) -> Chain | None:
    """The network as a chain, if it is one: no memory, spectral norm or residual blocks.

    A head with two streams, noise, dropout or several outputs per action is a tail behind convolutions.
    """
    partly_frozen = len({parameter.requires_grad for parameter in net.parameters()}) > 1
    if net.memory is not None or net.loss_layers is not None or partly_frozen:
        return None
    convs = conv_layers(net.torso) if type(net.torso) is Convolutions else []
    dense = [make_dense(cast("Dense", layer)) for layer in net.torso.layers] if type(net.torso) is Mlp else []
    if type(net.torso) not in (Convolutions, Mlp):
        return None
    stream = net.head.actions if type(net.head) is PlainHead and len(net.head.shape) == 1 else None
    head = None if stream is None else stream_layers(stream)
    layers = [*convs, *dense, *(head or [])]
    if not layers or None in layers or (head is None and not convs):
        return None
    known = [layer for layer in layers if layer is not None]
    return Chain(net, known, None if head is not None else net.head, reduced=reduced, pixels=pixels, tasks=tasks)


def conv_layers(torso: Convolutions) -> list[Layer | None]:
    """The convolutions of a torso; [None] if anything but normalisation and ReLU is between them."""
    layers = list(torso.layers)
    if not all(type(layer) in (nn.Conv2d, nn.GroupNorm, nn.Identity, Relu) for layer in layers):
        return [None]
    norms = [make_norm(layer) for layer in layers if isinstance(layer, nn.GroupNorm)]
    if any(norm.weight.device.type != "cpu" for norm in norms):
        return [None]  # elsewhere torch's kernel does not support channels-last maps
    convs = [make_conv(layer) for layer in layers if isinstance(layer, nn.Conv2d)]
    return [None if conv is None else (conv, norms[at] if norms else None) for at, conv in enumerate(convs)]


def stream_layers(stream: HeadStream) -> list[Layer] | None:
    """The layers of a head's stream; None if one of them is noisy or has dropout."""
    out = make_linear(stream.out)
    hidden = [] if stream.hidden is None else [make_dense(stream.hidden)]
    known = [layer for layer in hidden if layer is not None]
    return None if out is None or len(known) < len(hidden) else [*known, (out, None)]
