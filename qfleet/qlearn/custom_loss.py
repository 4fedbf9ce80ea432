"""The TD loss with a loss of the user's own."""

from dataclasses import dataclass

from torch import Tensor, nn

from qfleet.nets import Network, QNet
from qfleet.qlearn.heads import Head
from qfleet.qlearn.losses import Loss, LossInputs, require_losses
from qfleet.qlearn.rules import Rule
from qfleet.qlearn.td import existing_values, outputs_and_targets
from qfleet.qlearn.views import Tensors, View


@dataclass(frozen=True)
class CustomTdLoss:
    """As `td_loss`, with a loss of the user's own; `nets` are the modules behind the online and the target network."""

    loss: Loss
    nets: tuple[QNet, QNet]

    def __call__(
        self, head: Head, rule: Rule | None, view: View, online: Network, target: Network, batch: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Importance-weighted mean loss [], priorities [N] and the online network's values [M, A]."""
        read_by_head = list[Tensor]()
        net, target_net = self.nets
        hook = net.head.register_forward_pre_hook(lambda _, inputs: read_by_head.append(inputs[0]))
        try:
            out, targets = outputs_and_targets(head, rule, view, online, target, batch)
        finally:
            hook.remove()
        layers = net.loss_layers if net.loss_layers is not None else nn.Identity()
        # First came the rows learned from; in bfloat16 if the network multiplies so.
        features = read_by_head[0][: len(out)].float()
        inputs = LossInputs(out, view.actions(batch), targets, features, batch, head, net, target_net, layers)
        loss, priority = require_losses(self.loss(inputs), len(out))
        loss, priority = view.reduce(loss, priority.detach(), batch)
        return loss, priority, existing_values(head, out.detach())
