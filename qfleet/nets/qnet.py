"""The network: observations in, one output per action out. Shapes: N items, A actions, F features."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from qfleet.data import Spec
from qfleet.errors import UsageError
from qfleet.nets.normalize import Normalize
from qfleet.nets.torso import Mlp, Nature
from qfleet.plan.schema import MlpTorso, NatureTorso, Net


class Stream(nn.Module):
    """One hidden layer (if any) and a linear output."""

    def __init__(self, features: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden) if hidden else None
        self.out = nn.Linear(hidden or features, outputs)

    def forward(self, features: Tensor) -> Tensor:  # [N, F] -> [N, outputs]
        """Outputs; as in the MLP torso the functions under the layers are called."""
        if (hidden := self.hidden) is not None:
            features = functional.relu(functional.linear(features, hidden.weight, hidden.bias))
        return functional.linear(features, self.out.weight, self.out.bias)


class Plain(nn.Module):
    """Features straight to action outputs."""

    def __init__(self, features: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.actions = Stream(features, hidden, actions)

    def forward(self, features: Tensor) -> Tensor:  # [N, F] -> [N, A]
        """Outputs per action."""
        out: Tensor = self.actions(features)
        return out


class Dueling(nn.Module):
    """Q = V + A - mean(A), two streams of their own (Wang et al. 2016, eq. 9)."""

    def __init__(self, features: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.value = Stream(features, hidden, 1)
        self.advantage = Stream(features, hidden, actions)

    def forward(self, features: Tensor) -> Tensor:  # [N, F] -> [N, A]
        """Outputs per action."""
        if features.requires_grad:
            # Both streams send gradient into the trunk: scale it so that its size stays that of one.
            features.register_hook(lambda grad: grad / math.sqrt(2.0))  # type: ignore[no-untyped-call]
        advantage = self.advantage(features)
        out: Tensor = self.value(features) + advantage - advantage.mean(1, keepdim=True)
        return out


class QNet(nn.Module):
    """Scale pixels or normalise vectors, then torso, then head."""

    def __init__(
        self, torso: nn.Module, head: nn.Module, normalize: Normalize | None = None, rewards: Normalize | None = None
    ) -> None:
        super().__init__()
        self.torso, self.head = torso, head
        self.normalize, self.rewards = normalize, rewards

    def forward(self, obs: Tensor) -> Tensor:  # [N, *input_shape] -> [N, A]
        """Outputs per action."""
        if obs.dtype == torch.uint8:
            obs = obs.to(torch.float32) / 255.0
        elif self.normalize is not None:
            obs = self.normalize(obs)
        out: Tensor = self.head(self.torso(obs))
        return out


def make_torso(net: Net, spec: Spec) -> nn.Module:
    """The torso the plan names."""
    match net.torso:
        case NatureTorso(width=width):
            return Nature(spec.input_shape, width)
        case MlpTorso(sizes=sizes):
            return Mlp(spec.input_shape, sizes)
        case _:
            raise UsageError(
                "net.torso.type is `own`, but no torso was given",
                "A torso of your own is a Python object; a plan cannot hold it.",
                "Pass it from Python (torso=...), or choose net.torso.type=mlp or nature.",
            )


def make_net(net: Net, spec: Spec, *, normalize: str, seed: int, torso: nn.Module | None = None) -> QNet:
    """A fresh network; the seed decides its weights and no global generator is touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = torso if torso is not None else make_torso(net, spec)
        features = own_features(body, spec) if torso is not None else int(body.features)  # type: ignore[arg-type]
        hidden = int(getattr(body, "hidden", 0))
        head = (Dueling if net.dueling else Plain)(features, hidden, spec.num_actions)
    return QNet(
        body,
        head,
        Normalize(spec.input_shape) if normalize in ("obs", "both") else None,
        Normalize(()) if normalize in ("reward", "both") else None,
    )


def own_features(torso: nn.Module, spec: Spec) -> int:
    """How many features the user's torso makes: asked by showing it one observation."""
    with torch.no_grad():
        out = torso(torch.zeros(1, *spec.input_shape))
    if out.ndim != 2:
        raise UsageError(
            f"this torso returned shape {tuple(out.shape)} for one observation",
            "A torso returns features [N, F]: one row of numbers per observation.",
            "End it with nn.Flatten().",
        )
    return int(out.shape[1])
