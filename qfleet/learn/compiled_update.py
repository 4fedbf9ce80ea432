"""The whole update as one compiled function: loss, gradient, clipping, Adam and an averaged target. Shapes: N items.

It is written once as a function of tensors without a branch on their values. On a CPU it is traced and compiled to one
graph (torch's inductor, cached on disk): small networks spend most of an update between operations, and only a graph
from the batch to the new weights avoids that. On an accelerator it is captured as a CUDA graph.
Results differ from the eager update in their last digits; equal inputs give equal results.
"""

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qfleet.learn.optimizer import BETA1, BETA2, FusedAdam, FusedOptimizer
from qfleet.learn.target_network import detached
from qfleet.nets import Network, draws_random_numbers
from qfleet.plan.schema import Adam as AdamPlan
from qfleet.plan.schema import AverageTarget, FreshReplay, NoMemory, OwnTorso, Plan, SequencesView, SteadyBatch
from qfleet.qlearn import Tensors
from qfleet.system.cache_folder import cache_folder
from qfleet.system.timers import COMPILE_TIMER

# From tensors to (loss, gradient norm, mean value) [3] and priorities [N].
UpdateFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
# Compiles an update for these inputs, of which the first `num_changing` are other tensors at each call.
Compiler: TypeAlias = Callable[[UpdateFunction, Sequence[Tensor], int], UpdateFunction]
AdamState: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # weight, mean, square and step of one parameter
# The loss [], priorities [N] and values of a batch, by the online and the target network.
Loss: TypeAlias = Callable[[Network, Network, Tensors], tuple[Tensor, Tensor, Tensor]]


CUSTOM_PARTS = ("head", "rule", "loss", "optimizer")


class CannotCompile(Exception):
    """There is no compiler, or it failed on this update; nothing was changed."""


def bind(net: nn.Module, tensors: dict[str, Tensor]) -> Network:
    """A network with these tensors in place of its own."""
    return lambda obs: torch.func.functional_call(net, tensors, (obs,))


@dataclass(eq=False)
class CompiledUpdate:
    """One update in one call; weights, target and moments are changed in place, or not at all."""

    net: nn.Module
    target: nn.Module
    optimizer: FusedAdam
    loss: Loss
    clip_norm: float | None
    tau: float | None  # of an averaged target; None: the target is not updated here
    compiler: Compiler

    def __post_init__(self) -> None:
        self.names = [name for name, _ in self.net.named_parameters()]
        self.buffers = dict(self.net.named_buffers())  # running normalisation, shared by both networks
        moments = self.optimizer.moments
        self.state = [
            detached(self.net.parameters()),
            detached(self.target.parameters()),
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments["step"],
            list(self.buffers.values()),
        ]
        self.rate = torch.zeros((), dtype=torch.float64, device=self.state[0][0].device)
        self.compiled: dict[tuple[Any, ...], UpdateFunction] = {}  # by shapes and strides of a batch

    def __call__(self, batch: Tensors, rate: float) -> tuple[Tensor, Tensor]:
        """(loss, gradient norm, mean value) [3] and priorities [N]; if one of the three is not finite, no step."""
        fields = {name: value for name in batch.__slots__ if (value := getattr(batch, name)) is not None}
        key = tuple((name, value.shape, value.stride()) for name, value in fields.items())
        self.rate.fill_(rate)
        inputs = [self.rate, *fields.values(), *(tensor for tensors in self.state for tensor in tensors)]
        with torch.no_grad():
            if (function := self.compiled.get(key)) is None:
                function = self.compiled[key] = self.compile(tuple(fields), inputs)
            return function(*inputs)

    def compile(self, names: tuple[str, ...], inputs: list[Tensor]) -> UpdateFunction:
        """The update compiled for batches with these fields."""
        try:
            with COMPILE_TIMER:
                return self.compiler(lambda *tensors: self.step(names, tensors), inputs, 1 + len(names))
        except Exception as error:  # a compiler may raise anything, and no failure of it may end a run
            first_line = next(iter(str(error).splitlines()), "").strip()
            raise CannotCompile(f"{type(error).__name__}: {first_line}") from error

    def step(self, names: tuple[str, ...], tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The update as a function of all tensors it reads or writes."""
        rate = tensors[0]
        rest = list(tensors[1:])
        batch = Tensors(**{name: rest.pop(0) for name in names})
        weights, targets, means, squares, steps, buffers = (
            [rest.pop(0) for _ in range(len(tensors))] for tensors in self.state
        )
        gradients, loss, priority, value = self.gradients(batch, weights, targets, buffers)
        norm = torch.sqrt(torch.stack([(gradient * gradient).sum() for gradient in gradients]).sum())
        metrics = torch.stack((loss, norm, value))
        finite = torch.isfinite(metrics).all()
        scale = 1.0 if self.clip_norm is None else torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
        corrections = adam_corrections(rate, torch.stack(steps) + 1)
        for at, gradient in enumerate(gradients):
            old = (weights[at], means[at], squares[at], steps[at])
            new = adam(old, gradient * scale, rate, corrections[at], self.optimizer.eps, self.optimizer.weight_decay)
            new_target = () if self.tau is None else (targets[at] + self.tau * (new[0] - targets[at]),)
            for destination, value in zip((*old, targets[at]), (*new, *new_target), strict=False):
                destination.copy_(torch.where(finite, value, destination))
        return metrics, priority

    def gradients(
        self, batch: Tensors, weights: list[Tensor], targets: list[Tensor], buffers: list[Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Gradients, loss [], priorities [N] and the mean value []."""
        leaves = [weight.detach().requires_grad_() for weight in weights]
        named_buffers = dict(zip(self.buffers, buffers, strict=True))
        online = bind(self.net, dict(zip(self.names, leaves, strict=True)) | named_buffers)
        target = bind(self.target, dict(zip(self.names, targets, strict=True)) | named_buffers)
        with torch.enable_grad():
            loss, priority, values = self.loss(online, target, batch)
            gradients = torch.autograd.grad(loss, leaves)
        return [gradient.detach() for gradient in gradients], loss.detach(), priority, values.mean()


def adam_corrections(rate: Tensor, steps: Tensor) -> Tensor:
    """Adam's bias-corrected step size, and 1 / sqrt of its second bias correction, per parameter [parameters, 2].

    In double precision: early on, 1 - beta^t is a small difference of large numbers. As exponentials, which the
    compiler evaluates once; it would evaluate a power again for every few weights, three quarters of Adam's time.
    """
    steps = steps.double()
    correction1, correction2 = (1.0 - torch.exp(steps * math.log(beta)) for beta in (BETA1, BETA2))
    return torch.stack((rate / correction1, correction2.rsqrt()), dim=1)


def adam(old: AdamState, gradient: Tensor, rate: Tensor, corrections: Tensor, eps: float, decay: float) -> AdamState:
    """Adam (Kingma and Ba 2015) with decoupled weight decay."""
    weight, mean, square, step = old
    mean = mean + (1.0 - BETA1) * (gradient - mean)
    square = BETA2 * square + (1.0 - BETA2) * gradient * gradient
    if decay:
        weight = weight * (1.0 - rate * decay).to(weight.dtype)
    step_size, correction = corrections.to(weight.dtype)
    return weight - step_size * mean / (square.sqrt() * correction + eps), mean, square, step + 1


def compile_with_inductor(function: UpdateFunction, inputs: Sequence[Tensor], num_changing: int) -> UpdateFunction:
    """Trace the update and compile it to one graph for this machine."""
    # Compiled code stays in the user's cache for the next run.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    with warnings.catch_warnings():
        # The compiler's modules use deprecated parts of torch, which is no concern of the user.
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph = make_fx(function, decomposition_table=small_convolutions(), tracing_mode="fake")(*inputs)
    # One thread: compiling must not leave processes behind. A shape environment: without one nothing is cached.
    # No size assertions, because shapes and strides are the key of `compiled`, and no Python between the kernels: each
    # saves a tenth of a small update.
    settings = config.patch(compile_threads=1, size_asserts=False, cpp_wrapper=True)
    with settings, tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        compiled: UpdateFunction = torch._inductor.compile(graph, list(inputs))
        return compiled


def small_convolutions() -> dict[Any, Callable[..., Any]]:
    """Convolutions of few inputs per output as patches times a matrix, which the compiler fuses with their neighbours.

    A library call reorders its input and output; for so little arithmetic that takes longer than the arithmetic.
    """

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Any:
        if not is_small(x, weight, settings):
            return NotImplemented
        rows, (height, width) = patches(x, weight, settings[0])
        out = weight.reshape(len(weight), -1) @ rows
        out = out if bias is None else out + bias[:, None]
        return out.view(len(x), len(weight), height, width)

    def backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *settings: Any) -> Any:
        for_input, _, for_bias = settings[-1]
        if for_input or not is_small(x, weight, settings):
            return NotImplemented  # for first layers only, which need no gradient of their input
        rows, _ = patches(x, weight, settings[0])
        flat = grad.reshape(len(x), len(weight), -1)
        weight_grad = torch.bmm(rows, flat.transpose(1, 2)).sum(0).T.reshape(weight.shape)
        return None, weight_grad, flat.sum((0, 2)) if for_bias else None

    return {torch.ops.aten.convolution.default: forward, torch.ops.aten.convolution_backward.default: backward}


def is_small(x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> bool:
    """Whether a convolution is plain, in two dimensions, and of at most 64 inputs per output."""
    _, padding, dilation, transposed, _, groups = settings[:6]
    plain = not transposed and groups == 1 and set(padding) == {0} and set(dilation) == {1}
    return plain and x.dim() == 4 and weight[0].numel() <= 64


def patches(x: Tensor, weight: Tensor, stride: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
    """The inputs of each output [N, inputs per output, height x width], and (height, width)."""
    unfolded = x.unfold(2, weight.shape[2], stride[0]).unfold(3, weight.shape[3], stride[-1])
    height, width = unfolded.shape[2:4]
    return unfolded.permute(0, 1, 4, 5, 2, 3).reshape(len(x), -1, height * width), (height, width)


def capture_cuda_graph(function: UpdateFunction, inputs: Sequence[Tensor], num_changing: int) -> UpdateFunction:
    """Capture the update as a CUDA graph over static copies of changing inputs. Not run on hardware here."""
    static = [*(tensor.clone() for tensor in inputs[:num_changing]), *inputs[num_changing:]]
    state = list(inputs[num_changing:])
    before = [tensor.clone() for tensor in state]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # warm-up: libraries choose their algorithms and allocate memory
            function(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metrics, priority = function(*static)
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)  # undo the updates of the warm-up

    def replay(*current: Tensor) -> tuple[Tensor, Tensor]:
        for destination, value in zip(static[:num_changing], current, strict=False):
            destination.copy_(value, non_blocking=True)
        graph.replay()
        return metrics.clone(), priority.clone()

    return replay


def why_not_compilable(plan: Plan) -> str | None:
    """Why this plan's update cannot be compiled; None if it can."""
    net = plan.net
    reasons = (
        (isinstance(net.torso, OwnTorso), "net.torso.type=own may do anything"),
        *((getattr(plan.custom, name) is not None, f"custom.{name} may do anything") for name in CUSTOM_PARTS),
        (not isinstance(net.memory, NoMemory), "a memory is unrolled row by row"),
        (isinstance(plan.algo.view, SequencesView), "algo.view.type=sequences is unrolled row by row"),
        (draws_random_numbers(net), "its layers draw random numbers"),
        (net.spectral_norm, "net.spectral_norm has a state of its own"),
        (net.decoupled, "net.decoupled selects values by a mask"),
        (not isinstance(plan.optim, AdamPlan), f"optim.type={plan.optim.__struct_config__.tag} is not adam"),
        (isinstance(plan.replay, FreshReplay), "replay.type=fresh has minibatches of several sizes"),
        (not isinstance(plan.steer.batch, SteadyBatch), "steer.batch changes the batch size"),
        (plan.algo.accumulate > 1, "algo.accumulate is more than 1"),
        (plan.population.num > 1, "population.num is more than 1"),
        (plan.learners.num > 1, "learners.num is more than 1: gradients are combined within the update"),
        (plan.runtime.precision == "bfloat16", "runtime.precision=bfloat16 is not compiled"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def make_compiled_update(
    plan: Plan, net: nn.Module, target: nn.Module, optimizer: FusedOptimizer, loss: Loss
) -> CompiledUpdate | None:
    """The compiled update, if it is possible."""
    if why_not_compilable(plan) is not None or not isinstance(optimizer, FusedAdam):
        return None
    tau = plan.algo.target.tau if isinstance(plan.algo.target, AverageTarget) else None
    compiler = capture_cuda_graph if next(net.parameters()).device.type == "cuda" else compile_with_inductor
    return CompiledUpdate(net, target, optimizer, loss, plan.optim.clip_norm, tau, compiler)
