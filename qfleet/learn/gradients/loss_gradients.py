"""The loss of a batch and its gradients, in the fastest way that fits the networks. Shapes: N items, M rows."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from qfleet.learn.gradients.batch_halves import BatchHalves, LossAndGradients
from qfleet.nets import AheadNetwork, Chain, Network, QNet, Reduced, make_chain
from qfleet.nets.gradients import OnGradient, gradients_of
from qfleet.qlearn import CheckedRule, Head, Rule, Scalar, StepView, Tensors, View, td_loss, td_loss_and_gradient
from qfleet.system.parallel_tasks import TaskThread

# As `td_loss`: from head, rule, view, both networks and a batch to loss [], priorities [N] and values [M, A].
TdLoss: TypeAlias = Callable[[Head, Rule | None, View, Network, Network, Tensors], tuple[Tensor, Tensor, Tensor]]


@dataclass(eq=False)
class LossGradients:
    """Computes losses and the gradients of every trained weight of a network."""

    net: QNet
    target: QNet
    _: KW_ONLY
    head: Head
    rule: Rule | None
    view: View
    compute_loss: TdLoss
    device: torch.device
    reduced: bool  # bfloat16
    pixels: bool  # observations are bytes
    tasks: TaskThread | None  # another thread that takes a part of an update
    halves: bool  # whether batches that are large enough are computed in two halves
    draws_random_numbers: bool

    def __post_init__(self) -> None:
        self.parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.online_forward = self.fastest_forward(self.net)
        self.target_forward = self.fastest_forward(self.target)
        self.batch_halves = self.make_halves() if self.halves else None

    def fastest_forward(self, net: QNet) -> Network:
        """The network itself, or a faster view of it."""
        reduced = self.reduced and self.device.type == "cpu"
        single_steps = isinstance(self.view, StepView) and self.compute_loss is td_loss
        chain = make_chain(net, reduced=reduced, pixels=self.pixels, tasks=self.tasks) if single_steps else None
        if chain is not None and (chain.tail is not None or isinstance(self.head, Scalar)):
            return chain
        return Reduced(net, self.device) if self.reduced else net

    def make_halves(self) -> BatchHalves | None:
        """What computes batches in two halves, if everything is built in and nothing is drawn at random."""
        built_in = self.compute_loss is td_loss and not isinstance(self.rule, CheckedRule)
        if not built_in or not isinstance(self.view, StepView) or self.draws_random_numbers:
            return None
        networks = (self.online_forward, self.fastest_forward(self.net))
        return BatchHalves(networks, self.target_forward, self.compute_half, self.tasks)

    def prepare(self, obs: Tensor) -> Tensor:  # [N, *input_shape]
        """The input of the first layer, which both networks can share."""
        online = self.online_forward
        prepared: Tensor = online.prepare(obs) if isinstance(online, Chain) else self.net.preprocess(obs)
        return prepared

    def compute(self, batch: Tensors, on_gradient: OnGradient | None = None) -> LossAndGradients:
        """Loss [], priorities [N], values, and the gradient of every parameter.

        `on_gradient` is called with the index of a gradient and itself, as soon as it is known.
        """
        if self.batch_halves is not None and self.batch_halves.fits(batch):
            return self.batch_halves.loss_and_gradients(batch, on_gradient)
        online = self.online_forward
        if isinstance(online, Chain):
            online.refresh_copies(always=True)
        target, online_next = self.outputs_ahead(batch)
        return self.compute_with(online, online_next or online, target, batch, on_gradient)

    def compute_half(self, online: Network, batch: Tensors) -> LossAndGradients:
        """The same of half a batch, with one of two views of the online network."""
        return self.compute_with(online, online, self.target_forward, batch, None)

    def compute_with(
        self, online: Network, outputs: Network, target: Network, batch: Tensors, on_gradient: OnGradient | None
    ) -> LossAndGradients:
        """The same by these networks; `outputs` is the online one, or knows some of its outputs already."""
        head = self.head
        view = self.view
        whole = isinstance(online, Chain) and online.tail is None
        if isinstance(online, Chain) and whole and isinstance(head, Scalar) and isinstance(view, StepView):
            loss, priority, values, gradient = td_loss_and_gradient(head, self.rule, view, outputs, target, batch)
            return loss, priority, values, online.gradients(gradient, on_gradient)
        loss, priority, values = self.compute_loss(head, self.rule, view, outputs, target, batch)
        if isinstance(online, Chain):
            return loss, priority, values, online.loss_gradients(loss, on_gradient)
        return loss, priority, values, gradients_of(loss, self.parameters, on_gradient)

    def outputs_ahead(self, batch: Tensors) -> tuple[Network, Network | None]:
        """The target network, and the online one if it values the next observations too.

        The task thread computes their outputs for the next observations from now on.
        """
        online = self.online_forward
        target = self.target_forward
        next_obs = batch.next_obs
        if self.tasks is None or self.rule is None or next_obs is None or self.draws_random_numbers:
            return target, None
        if not isinstance(online, Chain) or not isinstance(target, Chain):
            return target, None
        ahead = AheadNetwork(target, self.tasks, next_obs)
        return ahead, AheadNetwork(online, self.tasks, next_obs) if self.rule.needs_online else None
