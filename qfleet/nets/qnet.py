"""The network: observations in, one output per action out. Shapes: T rows, N items, F features.

`*out` is the shape of a head's output for one item: (A,), (A, K), (A + 1, K) or (D, A); see `nets/heads.py`. H, C and S
are the sizes of a memory; see `nets/memory.py`.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from qfleet.data import Spec
from qfleet.errors import UsageError
from qfleet.nets.heads import make_output_head
from qfleet.nets.layers import Style
from qfleet.nets.memory import Memory
from qfleet.nets.normalize import Normalize
from qfleet.nets.torso import Convolutions, Impala, bytes_channels_last, make_torso
from qfleet.plan.schema import ImplicitHead, LstmMemory, Net, NoMemory, OwnTorso


class HeadLayers(Protocol):
    """Makes the layers of a user's own head."""

    def make_layers(self, features: int, hidden: int, actions: int) -> nn.Module:
        """Layers from features [N, features] to outputs [N, *out]."""


@runtime_checkable
class LossLayers(Protocol):
    """Makes the layers of a user's own loss."""

    def make_layers(self, features: int, actions: int) -> nn.Module:
        """Layers that the loss applies to features [N, features] as it likes."""


class QNet(nn.Module):
    """Scale pixels or normalise vectors, then torso, perhaps memory, then head."""

    def __init__(
        self,
        torso: nn.Module,
        head: nn.Module,
        normalize: Normalize | None = None,
        rewards: Normalize | None = None,
        memory: Memory | None = None,
        loss_layers: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.torso = torso
        self.memory = memory
        self.head = head
        self.loss_layers = loss_layers  # of a user's own loss, trained with the rest
        self.takes_images = isinstance(torso, Convolutions | Impala)
        self.normalize = normalize
        self.rewards = rewards

    def preprocess(self, obs: Tensor) -> Tensor:  # [N, *input_shape]
        """The torso's input: bytes scaled to [0, 1], numbers normalised if the plan says so."""
        if obs.dtype == torch.uint8:
            obs = bytes_channels_last(obs) if self.takes_images else obs
            return obs.to(torch.float32).div_(255.0)
        return obs if self.normalize is None else self.normalize.forward(obs)

    def features(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, F]
        """The torso's features."""
        features: Tensor = self.torso(self.preprocess(obs))
        return features

    def forward(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, *out]
        """Outputs per action, of a network without memory."""
        out: Tensor = self.head(self.features(obs))
        return out

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # [N, ...], [N, S] -> [N, *out], [N, C]
        """Outputs of a network with memory, and its cell's next state."""
        hidden, cell_state = require_memory(self).step(self.features(obs), state)
        return self.head(hidden), cell_state

    def unroll_memory(
        self, obs: Tensor, action: Tensor, reward: Tensor, last: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:  # [T, N, ...], [T, N], [T, N], [T, N], [N, S] -> [T, N, H], [N, S]
        """The memory's outputs over T rows in sequence, and the state after them."""
        features = self.features(obs.flatten(0, 1)).view(*obs.shape[:2], -1)
        return require_memory(self).unroll(features, action, reward, last, state)

    def unroll(
        self, obs: Tensor, action: Tensor, reward: Tensor, last: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:  # [T, N, ...], [T, N], [T, N], [T, N], [N, S] -> [T, N, *out], [N, S]
        """Outputs over T rows in sequence, and the state after them."""
        hidden, state = self.unroll_memory(obs, action, reward, last, state)
        out: Tensor = self.head(hidden.flatten(0, 1))
        return out.view(*obs.shape[:2], *out.shape[1:]), state


class Reduced:
    """A view of a network that multiplies in bfloat16; its weights, outputs and gradients stay float32."""

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        self.net = net
        self.device_type = device.type

    def __call__(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, *out]
        """Outputs per action."""
        with torch.autocast(self.device_type, torch.bfloat16):
            out: Tensor = self.net(obs)
        return out.float()


def require_memory(net: QNet) -> Memory:
    """The network's memory."""
    if net.memory is None:
        raise ValueError("this network has no memory")
    return net.memory


def draws_random_numbers(net: Net) -> bool:
    """Whether a network of this plan may draw random numbers while it learns; a user's own torso may."""
    own = isinstance(net.torso, OwnTorso)
    return net.noisy or net.dropout > 0.0 or isinstance(net.head, ImplicitHead) or own


def make_memory(net: Net, features: int, actions: int) -> Memory | None:
    """The plan's memory, if any."""
    if isinstance(net.memory, NoMemory):
        return None
    return Memory(features, net.memory.size, actions, "lstm" if isinstance(net.memory, LstmMemory) else "gru")


def make_net(
    net: Net,
    spec: Spec,
    *,
    normalize: str,
    seed: int,
    torso: nn.Module | None = None,
    head: HeadLayers | None = None,
    loss: object | None = None,
) -> QNet:
    """A network with new weights from the seed; no global generator is changed.

    `torso`, `head` and `loss` are the user's own: the torso is used as it is, the others make their layers.
    """
    style = Style(net.noisy, net.noisy_sigma, net.layer_norm, net.spectral_norm, net.dropout)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        body = torso if torso is not None else make_torso(net, spec, style)
        features = count_own_features(body, spec) if torso is not None else int(body.features)  # type: ignore[arg-type]
        memory = make_memory(net, features, spec.num_actions)
        hidden = int(getattr(body, "hidden", 0))
        read = features if memory is None else memory.size
        if head is None:
            outputs = make_output_head(net, spec, read, hidden, style)
        else:
            outputs = head.make_layers(read, hidden, spec.num_actions)
        loss_layers = loss.make_layers(read, spec.num_actions) if isinstance(loss, LossLayers) else None
    return QNet(
        body,
        outputs,
        Normalize(spec.input_shape) if normalize in ("obs", "both") else None,
        Normalize(()) if normalize in ("reward", "both") else None,
        memory,
        loss_layers,
    )


def count_own_features(torso: nn.Module, spec: Spec) -> int:
    """The number of features of a user's torso, found by running it on one observation."""
    if not isinstance(torso, nn.Module):
        raise UsageError(
            f"torso= was given {torso!r}, which is not a torch.nn.Module",
            "A torso is a module object, not its class or a function.",
            "Write torso=MyTorso(); a Keras model is one on its torch backend (KERAS_BACKEND=torch).",
        )
    with torch.no_grad():
        out = torso(torch.zeros(1, *spec.input_shape))
    if out.ndim != 2:
        raise UsageError(
            f"this torso returned shape {tuple(out.shape)} for one observation",
            "A torso returns features [N, F]: one row of numbers per observation.",
            "End it with nn.Flatten().",
        )
    return int(out.shape[1])
