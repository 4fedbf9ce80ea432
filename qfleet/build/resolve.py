"""Fills in what the plan left open, from the spaces of the environment and the machine; run.toml holds the result."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from qfleet.build.threads import choose_parallel, choose_threads
from qfleet.data import Spec
from qfleet.data.joint_actions import MAX_OUTPUTS
from qfleet.errors import UsageError
from qfleet.nets import NATURE, Convolution
from qfleet.plan.schema import (
    ConvTorso,
    ImpalaTorso,
    MinatarTorso,
    MlpTorso,
    NatureTorso,
    OwnExplore,
    OwnTorso,
    Plan,
)


def smallest_picture(torso: object) -> int:
    """Height and width that a torso's convolutions need at least; 0: it has none."""
    match torso:
        case NatureTorso():
            return field_of_view(NATURE)
        case ConvTorso(channels=channels, kernels=kernels, strides=strides):
            return field_of_view(list(zip(channels, kernels, strides, strict=True)))
        case MinatarTorso():
            return 3
        case ImpalaTorso():
            return 8
        case _:
            return 0


def field_of_view(stack: Sequence[Convolution]) -> int:
    """The receptive field: how many pixels across one output depends on."""
    size = 1
    for _, kernel, stride in reversed(stack):
        size = (size - 1) * stride + kernel
    return size


def is_picture(spec: Spec, smallest: int) -> bool:
    """Is the observation a picture of at least this height and width?"""
    shape = spec.input_shape
    return len(shape) == 3 and min(shape[1:]) >= smallest


def choose_torso(plan: Plan, spec: Spec) -> Plan:
    """Convolutions for pictures, fully connected layers for the rest, unless the plan says otherwise."""
    torso = plan.net.torso
    if plan.custom.torso is not None:
        torso = OwnTorso()
    elif isinstance(torso, OwnTorso):
        raise UsageError(
            "net.torso.type is `own`, but no torso was given",
            "A torso of your own is a Python object; a plan cannot hold it.",
            "Pass it from Python, train(plan, torso=...), or choose net.torso.type=mlp or nature.",
        )
    elif torso is None:
        torso = NatureTorso() if is_picture(spec, smallest_picture(NatureTorso())) else MlpTorso()
    elif (smallest := smallest_picture(torso)) and not is_picture(spec, smallest):
        raise UsageError(
            f"net.torso.type={torso.__struct_config__.tag} does not fit observations of shape {spec.input_shape}",
            f"It wants pictures [channels, height, width] of at least {smallest}x{smallest}.",
            "Use net.torso.type=mlp, or leave net.torso out.",
        )
    return msgspec.structs.replace(plan, net=msgspec.structs.replace(plan.net, torso=torso))


def choose_device(plan: Plan) -> str:
    """The plan's device if this machine has it; otherwise the accelerator if there is one."""
    if plan.runtime.device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    require_device("runtime.device", plan.runtime.device)
    return plan.runtime.device


def require_device(path: str, device: str) -> None:
    """Refuse a device that this machine does not have."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"{path}={device} cannot be used",
            str(error).splitlines()[0].rstrip(".") + ".",
            f"Use {path}=cpu, or see `qfleet doctor` for what this machine has.",
        ) from error


def usable_device(plan: Plan) -> str:
    """The plan's device, or the CPU if this machine does not have it: a policy can be loaded anywhere."""
    try:
        return choose_device(plan)
    except UsageError:
        return "cpu"


def check_normalize(plan: Plan, spec: Spec) -> None:
    """Refuse to normalise pixels, which the network scales itself."""
    if plan.env.normalize in ("obs", "both") and spec.dtype == "uint8":
        raise UsageError(
            f"env.normalize={plan.env.normalize} has no effect on {plan.env.id}",
            "Its observations are bytes, which the network divides by 255 itself.",
            "Use env.normalize=reward or off.",
        )


def check_actions(plan: Plan, spec: Spec) -> None:
    """Refuse too many joint actions: each needs an output, unless the dimensions are decoupled."""
    if plan.net.decoupled and spec.masked:
        raise UsageError(
            f"net.decoupled does not go with the action masks of {plan.env.id}",
            "Masks are about joint actions, a decoupled network values each dimension by itself.",
            "Leave net.decoupled off.",
        )
    if plan.net.decoupled or spec.num_actions <= MAX_OUTPUTS:
        return
    counts = " x ".join(map(str, spec.actions))
    raise UsageError(
        f"{plan.env.id} has {spec.num_actions:,} joint actions (dimensions {counts})",
        f"The network would need an output for each of them; the limit is {MAX_OUTPUTS:,}.",
        "Set net.decoupled=true (preset decqn), which values each dimension by itself; fewer env.bins help a Box.",
    )


def resolve(plan: Plan, spec: Spec) -> Plan:
    """The plan with nothing left open."""
    check_normalize(plan, spec)
    check_actions(plan, spec)
    plan = choose_torso(plan, spec)
    if plan.custom.explore is not None:  # a function of the user's own replaces the exploration of the plan
        plan = msgspec.structs.replace(plan, algo=msgspec.structs.replace(plan.algo, explore=OwnExplore()))
    plan = with_runtime(plan, device=choose_device(plan))
    plan = with_runtime(plan, parallel=choose_parallel(plan))
    return with_runtime(plan, threads=choose_threads(plan))


def with_runtime(plan: Plan, **changes: Any) -> Plan:
    """The plan with other runtime settings."""
    return msgspec.structs.replace(plan, runtime=msgspec.structs.replace(plan.runtime, **changes))
