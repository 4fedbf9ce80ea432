"""Random streams of a run: one generator per purpose, so that none disturbs another."""

import numpy as np
import torch

from qfleet.data import Array

# Purposes of random numbers.
WEIGHTS = 101
EXPLORE = 102
SAMPLE = 103
LAYERS = 104
NOVELTY = 105
WORLDS = 106
SYNC = 107
ACTOR_LEARNERS = 109
CALLBACKS = 110
RECORDED = 111


def stream(seed: int, purpose: int, *more: int) -> np.random.Generator:
    """A generator that depends on nothing but the seed and its purpose."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, purpose, *more])))


def device_rng(device: str | None) -> Array | None:
    """The state of CUDA's generator, which random layers draw from; None on the CPU, which uses torch's own."""
    if device is None or torch.device(device).type != "cuda":
        return None
    state: Array = torch.cuda.get_rng_state(device).cpu().numpy().copy()
    return state


def set_device_rng(device: str | None, state: Array | None) -> None:
    """Restore it, if there is one: a run may have moved to another kind of device."""
    if state is not None and device is not None and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(state.copy()), device)
