"""Weights from one network into another of the same kind, whatever their modules do with them."""

import re
from collections.abc import Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")
# Where Keras keeps its variables on torch. It numbers layers and random generators as they are made in a process.
KERAS = "_torch_params."
NUMBER = re.compile(r"_(\d+)(?=/)")


def may_share(net: nn.Module) -> bool:
    """May the tensors of this network be replaced by others? Only if no module keeps a second reference to them.

    Ours and torch's own do not. Of other modules nobody knows: a Keras layer does, and so may a list or a view that
    a user's module made of its weights. Their weights have to be written in place.
    """
    return all(type(module).__module__.startswith(("qfleet.", "torch.nn.")) for module in net.modules())


@torch.no_grad()
def write_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write weights into a network without moving its memory: others may refer to it."""
    own = net.state_dict()
    for name, value in under_own_names(own.keys(), weights).items():
        if own[name].shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, not {tuple(own[name].shape)}")
        own[name].copy_(value)


def under_own_names(own: Collection[str], given: Mapping[str, Value]) -> dict[str, Value]:
    """What was given, by the names in `own`; KeyError if they do not fit.

    Names of a Keras model may differ in the numbers of its layers, which depend on what the process made before it.
    """
    if set(own) == given.keys():
        return dict(given)
    mine = sorted(own, key=numbered)
    theirs = sorted(given, key=numbered)
    if [numbered(name)[0] for name in mine] != [numbered(name)[0] for name in theirs]:
        raise KeyError(f"weights do not fit: {sorted(set(own) ^ given.keys())}")
    return {name: given[other] for name, other in zip(mine, theirs, strict=True)}


def numbered(name: str) -> tuple[str, list[int]]:
    """A name without the numbers that Keras gave to layers, and those numbers."""
    if KERAS not in name:
        return name, []
    return NUMBER.sub("", name), [int(number) for number in NUMBER.findall(name)]
