"""Copying weights between networks of the same architecture, modules of other libraries included."""

import re
from collections.abc import Collection, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.data import Array

Value = TypeVar("Value")
# Where Keras keeps its variables on torch. It numbers layers and random generators as they are made in a process.
KERAS = "_torch_params."
NUMBER = re.compile(r"_(\d+)(?=/)")


def can_share_weights(net: nn.Module) -> bool:
    """Whether the tensors of this network may be replaced by others: no module may keep a second reference to them.

    Modules of qfleet and torch keep none. Other modules may: a Keras layer does, and so may a list or view of its
    weights in a user's module. Their weights have to be written in place.
    """
    return all(type(module).__module__.startswith(("qfleet.", "torch.nn.")) for module in net.modules())


@torch.no_grad()
def write_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write weights into a network in place: others may refer to its memory."""
    own = net.state_dict()
    for name, value in match_names(own.keys(), weights).items():
        if own[name].shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, not {tuple(own[name].shape)}")
        own[name].copy_(value)


def match_names(own: Collection[str], given: Mapping[str, Value]) -> dict[str, Value]:
    """The given values under the names in `own`; KeyError if the names do not match.

    Names of a Keras model may differ in the numbers of its layers, which depend on the layers made before in a process.
    """
    if set(own) == given.keys():
        return dict(given)
    own_names = sorted(own, key=without_keras_numbers)
    given_names = sorted(given, key=without_keras_numbers)
    if [without_keras_numbers(name)[0] for name in own_names] != [
        without_keras_numbers(name)[0] for name in given_names
    ]:
        raise KeyError(f"weights do not match: {sorted(set(own) ^ given.keys())}")
    return {name: given[other] for name, other in zip(own_names, given_names, strict=True)}


def without_keras_numbers(name: str) -> tuple[str, list[int]]:
    """A name without the layer numbers that Keras added, and those numbers."""
    if KERAS not in name:
        return name, []
    return NUMBER.sub("", name), [int(number) for number in NUMBER.findall(name)]


def state_arrays(net: nn.Module) -> dict[str, Array]:
    """Parameters and buffers by name, copied to contiguous arrays."""
    return {name: value.detach().cpu().contiguous().numpy().copy() for name, value in net.state_dict().items()}


def load_state_arrays(net: nn.Module, values: dict[str, Array]) -> None:
    """Write arrays into a network in place: others share its memory."""
    own = net.state_dict()
    for name, value in match_names(own.keys(), values).items():
        copy_array(name, own[name], value)


@torch.no_grad()
def copy_array(name: str, own: Tensor, value: Array) -> None:
    """Write an array into a tensor, in place, if shape and kind of numbers match and all are finite."""
    if own.shape != value.shape:
        raise ValueError(f"{name} has shape {value.shape}, not {tuple(own.shape)}")
    if own.is_floating_point() != (value.dtype.kind == "f") or value.dtype.kind == "c":
        raise ValueError(f"{name} has numbers of type {value.dtype}, not {str(own.dtype).removeprefix('torch.')}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ValueError(f"{name} has numbers that are not finite")
    own.copy_(torch.from_numpy(value))
