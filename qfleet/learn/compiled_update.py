"""The whole update as one piece: loss, gradient, clipping, Adam and an averaged target. Shapes: N items.

Written once as a function of tensors without a branch on their values. On a CPU it is traced and compiled to one
graph (torch's inductor, cached on disk): small networks spend most of an update between operations, and only a graph
that reaches from the batch to the new weights saves that. On an accelerator it is captured as a CUDA graph.
Numbers differ from the step-by-step update in their last digits; equal inputs give equal numbers again.
"""

import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qfleet.learn.optimizer import FusedAdam, FusedOptimizer
from qfleet.nets import draws
from qfleet.plan.schema import Adam as AdamPlan
from qfleet.plan.schema import AverageTarget, FreshReplay, NoMemory, OwnTorso, Plan, SequencesView, SteadyBatch
from qfleet.qlearn import Head, Rule, Tensors, View, td_loss
from qfleet.system.timers import COMPILERS

# From tensors to (loss, gradient norm, mean value) [3] and priorities [N].
Piece: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
# Makes it fast. Also told how many of the first tensors are others each time; the rest stay where they are.
Engine: TypeAlias = Callable[[Piece, Sequence[Tensor], int], Piece]
BETA1 = 0.9
BETA2 = 0.999


class CannotCompile(Exception):
    """No compiler, or one that does not take this update; nothing has been changed."""


class BoundUpdate:
    """A network with these tensors in place of its own."""

    def __init__(self, net: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.net = net
        self.tensors = tensors

    def __call__(self, obs: Tensor) -> Tensor:
        """Outputs per action."""
        out: Tensor = torch.func.functional_call(self.net, self.tensors, (obs,))
        return out


class CompiledUpdate:
    """One update in one call; weights, target and moments are changed in place, or not at all."""

    def __init__(
        self,
        net: nn.Module,
        target: nn.Module,
        optimizer: FusedAdam,
        *,
        head: Head,
        rule: Rule | None,
        view: View,
        clip_norm: float | None,
        tau: float | None,  # of an averaged target; None: the target is not moved here
        engine: Engine,
    ) -> None:
        self.net = net
        self.target = target
        self.optimizer = optimizer
        self.engine = engine
        self.head = head
        self.rule = rule
        self.view = view
        self.clip_norm = clip_norm
        self.tau = tau
        self.names = [name for name, _ in net.named_parameters()]
        self.held = dict(net.named_buffers())  # running normalisation; both networks have the same
        moments = optimizer.moments
        self.groups = [
            [parameter.detach() for parameter in net.parameters()],
            [parameter.detach() for parameter in target.parameters()],
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments["step"],
            list(self.held.values()),
        ]
        self.rate = torch.zeros((), dtype=torch.float64, device=self.groups[0][0].device)
        self.pieces: dict[tuple[Any, ...], Piece] = {}  # by the layout of a batch

    def __call__(self, batch: Tensors, rate: float) -> tuple[Tensor, Tensor]:
        """(loss, gradient norm, mean value) [3] and priorities [N]; if one of the three is not finite, no step."""
        given = {name: value for name in batch.__slots__ if (value := getattr(batch, name)) is not None}
        key = tuple((name, value.shape, value.stride()) for name, value in given.items())
        self.rate.fill_(rate)
        inputs = [self.rate, *given.values(), *(tensor for group in self.groups for tensor in group)]
        with torch.no_grad():
            if (piece := self.pieces.get(key)) is None:
                piece = self.pieces[key] = self.make(tuple(given), inputs)
            return piece(*inputs)

    def make(self, names: tuple[str, ...], inputs: list[Tensor]) -> Piece:
        """The piece for batches with these fields."""
        try:
            with COMPILERS:
                return self.engine(lambda *tensors: self.step(names, tensors), inputs, 1 + len(names))
        except Exception as error:  # a compiler can fail in any way: it is never worth a run
            raise CannotCompile(f"{type(error).__name__}: {first_line(error)}") from error

    def step(self, names: tuple[str, ...], tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The update as a function of all tensors it reads or writes."""
        rate = tensors[0]
        rest = list(tensors[1:])
        batch = Tensors(**{name: rest.pop(0) for name in names})
        weights, targets, means, squares, steps, held = (
            [rest.pop(0) for _ in range(len(group))] for group in self.groups
        )
        gradients, loss, priority, value = self.gradients(batch, weights, targets, held)
        norm = torch.sqrt(torch.stack([(gradient * gradient).sum() for gradient in gradients]).sum())
        marks = torch.stack((loss, norm, value))
        finite = torch.isfinite(marks).all()
        scale = 1.0 if self.clip_norm is None else torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
        paces = adam_paces(rate, torch.stack(steps) + 1)
        for at, gradient in enumerate(gradients):
            old = (weights[at], means[at], squares[at], steps[at])
            new = adam(*old, gradient * scale, rate, paces[at], self.optimizer.eps, self.optimizer.weight_decay)
            follow = () if self.tau is None else (targets[at] + self.tau * (new[0] - targets[at]),)
            for there, fresh in zip((*old, targets[at]), (*new, *follow), strict=False):
                there.copy_(torch.where(finite, fresh, there))
        return marks, priority

    def gradients(
        self, batch: Tensors, weights: list[Tensor], targets: list[Tensor], held: list[Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Gradients, loss [], priorities [N] and the mean value []."""
        leaves = [weight.detach().requires_grad_() for weight in weights]
        kept = dict(zip(self.held, held, strict=True))
        online = BoundUpdate(self.net, dict(zip(self.names, leaves, strict=True)) | kept)
        aim = BoundUpdate(self.target, dict(zip(self.names, targets, strict=True)) | kept)
        with torch.enable_grad():
            loss, priority, values = td_loss(self.head, self.rule, self.view, online, aim, batch)
            found = torch.autograd.grad(loss, leaves)
        return [gradient.detach() for gradient in found], loss.detach(), priority, values.mean()


def adam_paces(rate: Tensor, steps: Tensor) -> Tensor:
    """Adam's step size and what corrects its root of squares, per parameter after so many steps [parameters, 2].

    In double precision: early on, 1 - beta^t is a small difference of large numbers. As exponentials, because the
    compiler keeps those; a power it would work out again for every few weights, three quarters of Adam's time.
    """
    steps = steps.double()
    first, second = (1.0 - torch.exp(steps * math.log(beta)) for beta in (BETA1, BETA2))
    return torch.stack((rate / first, second.rsqrt()), dim=1)


def adam(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    gradient: Tensor,
    rate: Tensor,
    pace: Tensor,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Adam (Kingma and Ba 2015) with decoupled weight decay: new weight, mean, square and step."""
    mean = mean + (1.0 - BETA1) * (gradient - mean)
    square = BETA2 * square + (1.0 - BETA2) * gradient * gradient
    if decay:
        weight = weight * (1.0 - rate * decay).to(weight.dtype)
    size, whole = pace.to(weight.dtype)
    return weight - size * mean / (square.sqrt() * whole + eps), mean, square, step + 1


def inductor(piece: Piece, inputs: Sequence[Tensor], moving: int) -> Piece:
    """Trace the piece and compile it to one graph for this machine."""
    prepare_cache()
    with warnings.catch_warnings():
        # The compiler's own modules use what torch deprecates: no word of that is for the user.
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph = make_fx(piece, decomposition_table=small_convolutions(), tracing_mode="fake")(*inputs)
    # One thread: compiling must not leave processes behind. A shape environment: without one nothing is cached.
    # Shapes and strides are the piece's key, not asked for again at every call; and no Python between its kernels: each
    # of these takes a tenth of a small update.
    settings = config.patch(compile_threads=1, size_asserts=False, cpp_wrapper=True)
    with settings, tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        made: Piece = torch._inductor.compile(graph, list(inputs))
        return made


def small_convolutions() -> dict[Any, Callable[..., Any]]:
    """Convolutions of few inputs per output as patches times a matrix, which the compiler joins with their neighbours.

    A library call rearranges what goes in and what comes out; for so little arithmetic that takes longer than the sums.
    """

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Any:
        if not is_small(x, weight, how):
            return NotImplemented
        rows, (high, wide) = patches(x, weight, how[0])
        out = weight.reshape(len(weight), -1) @ rows
        out = out if bias is None else out + bias[:, None]
        return out.view(len(x), len(weight), high, wide)

    def backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *how: Any) -> Any:
        for_input, _, for_bias = how[-1]
        if for_input or not is_small(x, weight, how):
            return NotImplemented  # the first layer only: nobody asks for the gradient of an observation
        rows, _ = patches(x, weight, how[0])
        flat = grad.reshape(len(x), len(weight), -1)
        found = torch.bmm(rows, flat.transpose(1, 2)).sum(0).T.reshape(weight.shape)
        return None, found, flat.sum((0, 2)) if for_bias else None

    return {torch.ops.aten.convolution.default: forward, torch.ops.aten.convolution_backward.default: backward}


def is_small(x: Tensor, weight: Tensor, how: tuple[Any, ...]) -> bool:
    """Whether a convolution is plain, in two dimensions, and of at most 64 inputs per output."""
    _, padding, dilation, transposed, _, groups = how[:6]
    plain = not transposed and groups == 1 and set(padding) == {0} and set(dilation) == {1}
    return plain and x.dim() == 4 and weight[0].numel() <= 64


def patches(x: Tensor, weight: Tensor, stride: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
    """What each output looks at [N, inputs per output, high x wide], and (high, wide)."""
    cut = x.unfold(2, weight.shape[2], stride[0]).unfold(3, weight.shape[3], stride[-1])
    high, wide = cut.shape[2:4]
    return cut.permute(0, 1, 4, 5, 2, 3).reshape(len(x), -1, high * wide), (high, wide)


def captured(piece: Piece, inputs: Sequence[Tensor], moving: int) -> Piece:
    """Record the piece as a CUDA graph over static copies of what moves. Not run on hardware here."""
    static = [*(tensor.clone() for tensor in inputs[:moving]), *inputs[moving:]]
    kept = list(inputs[moving:])
    before = [tensor.clone() for tensor in kept]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries choose their algorithms and take their memory
            piece(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        marks, priority = piece(*static)
    for tensor, was in zip(kept, before, strict=True):
        tensor.copy_(was)  # the rehearsals were steps too

    def replay(*now: Tensor) -> tuple[Tensor, Tensor]:
        for there, here in zip(static[:moving], now, strict=False):
            there.copy_(here, non_blocking=True)
        graph.replay()
        return marks.clone(), priority.clone()

    return replay


def engine_for(device: torch.device) -> Engine:
    """Graphs of the device's own kind."""
    return captured if device.type == "cuda" else inductor


def not_whole(plan: Plan) -> str | None:
    """Why this plan's update cannot be one piece; None if it can."""
    net = plan.net
    reasons = (
        (isinstance(net.torso, OwnTorso), "net.torso.type=own may do anything"),
        (not isinstance(net.memory, NoMemory), "a memory is unrolled row by row"),
        (isinstance(plan.algo.view, SequencesView), "algo.view.type=sequences is unrolled row by row"),
        (draws(net), "its layers draw random numbers"),
        (net.spectral_norm, "net.spectral_norm has a state of its own"),
        (net.decoupled, "net.decoupled leaves out values by a mask"),
        (not isinstance(plan.optim, AdamPlan), f"optim.type={plan.optim.__struct_config__.tag} is not adam"),
        (isinstance(plan.replay, FreshReplay), "replay.type=fresh has minibatches of several sizes"),
        (not isinstance(plan.steer.batch, SteadyBatch), "steer.batch changes the batch size"),
        (plan.algo.accumulate > 1, "algo.accumulate is more than 1"),
        (plan.population.num > 1, "population.num is more than 1"),
        (plan.learners.num > 1, "learners.num is more than 1: the step is agreed on in between"),
        (plan.runtime.precision == "bfloat16", "runtime.precision=bfloat16 is computed step by step"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def make_whole(
    plan: Plan,
    net: nn.Module,
    target: nn.Module,
    optimizer: FusedOptimizer,
    *,
    head: Head,
    rule: Rule | None,
    view: View,
) -> CompiledUpdate | None:
    """The update as one piece, if the plan wants it and it can be."""
    if not plan.runtime.compile or not_whole(plan) is not None or not isinstance(optimizer, FusedAdam):
        return None
    tau = plan.algo.target.tau if isinstance(plan.algo.target, AverageTarget) else None
    engine = engine_for(next(net.parameters()).device)
    parts = {"head": head, "rule": rule, "view": view, "clip_norm": plan.optim.clip_norm, "tau": tau}
    return CompiledUpdate(net, target, optimizer, **parts, engine=engine)  # type: ignore[arg-type]


def prepare_cache() -> None:
    """Compiled code is kept in the user's cache, so that the next run starts with it."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))


def cache_folder() -> Path:
    """Where this user's measurements and compiled code are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qfleet"


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return next(iter(str(error).splitlines()), "").strip()
