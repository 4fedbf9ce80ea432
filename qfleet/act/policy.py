"""The policy: observations in, actions out; shared by actors, evaluation and serving.

Shapes: B lanes, A actions, D action dimensions, S state size. Values are [B, A], or [B, D, A] when decoupled.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qfleet.act.explore import Choose, epsilon_greedy, greedy
from qfleet.data import Array, Spec
from qfleet.errors import UsageError
from qfleet.nets import QNet, chain_of, may_share, require_memory, set_noise, write_weights
from qfleet.qlearn import Head


class NonFiniteValues(Exception):
    """The network's weights have diverged: no action is chosen from them."""


class Policy:
    """Greedy in the network's values, random with probability epsilon; `actions` are the counts per dimension."""

    def __init__(
        self,
        net: QNet,
        head: Head,
        actions: tuple[int, ...],
        device: torch.device | None = None,
        spec: Spec | None = None,
    ) -> None:
        self.net = net
        self.head = head
        self.actions = actions
        self.spec = spec
        self.online = chain_of(net) or net
        self.device = device or torch.device("cpu")
        self.version = 0
        self.source: Mapping[str, Tensor] | None = None  # whose weights these are
        self.shares = may_share(net)
        self.stamps = list[int]()
        self.noisy = False
        set_noise(net, active=False)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Take newer weights and follow what is written there later: shared if possible, else copied in place."""
        if weights is not self.source:
            self.source = weights
            self.stamps = []
            if self.shares:
                self.net.load_state_dict(dict(weights), assign=True)
                self.online = chain_of(self.net) or self.net
        self.follow()
        self.version = version

    def follow(self) -> None:
        """Copy the weights again if they have changed; tensors count how often they were written."""
        if self.shares or self.source is None:
            return
        stamps = [tensor._version for tensor in self.source.values()]
        if stamps != self.stamps:
            write_weights(self.net, self.source)
            self.stamps = stamps

    def blank(self, lanes: int) -> Array | None:  # [B, S]
        """The state at the beginning of episodes; None without memory."""
        return None if self.net.memory is None else np.zeros((lanes, self.net.memory.state_size), np.float32)

    def look(self, obs: Array, state: Array | None = None) -> tuple[Array, Array | None]:
        """The value of every action, and what a memory's cell holds afterwards [B, held]."""
        self.follow()
        with torch.inference_mode():
            shown = torch.from_numpy(obs) if self.device.type == "cpu" else torch.from_numpy(obs).to(self.device)
            if state is None:
                out = self.online(shown)
                held = None
            else:
                out, held = self.net.step(shown, torch.from_numpy(state).to(self.device))
            values: Array = self.head.values(out).cpu().numpy()
        if not np.isfinite(values).all():
            raise NonFiniteValues("the network's values are not finite")
        return values, None if held is None else held.cpu().numpy()

    def act(
        self,
        obs: Array,  # [B, *input_shape]
        state: Array | None = None,  # [B, S]
        epsilon: float | Array = 0.0,  # one, or one per lane
        rng: np.random.Generator | None = None,
        mask: Array | None = None,  # [B, A] bool
    ) -> tuple[Array, Array | None, Array]:
        """Actions [B], the next recurrent state, and the values they were chosen by; greedy without an `rng`."""
        if self.spec is not None:
            require_batch(obs, self.spec)
        if rng is None:
            return self.decide(obs, state, lambda values: greedy(values, mask, self.actions), noisy=False)
        return self.decide(
            obs, state, lambda values: epsilon_greedy(values, epsilon, rng, mask, self.actions), noisy=True
        )

    def decide(
        self, obs: Array, state: Array | None, choose: Choose, *, noisy: bool
    ) -> tuple[Array, Array | None, Array]:
        """As `act`, by a choice of the caller's own; noise is for exploring only."""
        self.make_noisy(noisy)
        if state is None:
            state = self.blank(len(obs))
        values, held = self.look(obs, state)
        action = choose(values)
        return action, None if held is None else self.remember(held, action), values

    def make_noisy(self, noisy: bool) -> None:
        """Switch the noise on or off."""
        if self.noisy != noisy:
            self.noisy = noisy
            set_noise(self.net, noisy)

    def remember(self, held: Array, action: Array) -> Array:  # [B, held], [B] -> [B, S]
        """The state after an action; its reward is still to come (`carry`)."""
        memory = require_memory(self.net)
        state = np.zeros((len(held), memory.state_size), np.float32)
        state[:, : memory.held] = held
        state[np.arange(len(held)), memory.held + action] = 1.0
        return state


def require_batch(obs: Any, spec: Spec) -> None:
    """Refuse what is not a batch of observations as the network is shown them."""
    wanted = f"[B, {', '.join(map(str, spec.input_shape))}] of {spec.dtype}"
    if not isinstance(obs, np.ndarray):
        given = f"a {type(obs).__name__}"
        fix = f"Write np.asarray(obs, np.{spec.dtype}) with one row per observation."
    elif obs.shape == spec.input_shape:
        given = "one observation without a batch around it"
        fix = "Write policy.act(obs[None])."
    elif obs.shape[1:] != spec.input_shape:
        given = f"an array of shape {obs.shape}"
        fix = "Show it what the environment it learned in shows."
    elif obs.dtype != spec.dtype:
        given = f"numbers of type {obs.dtype}"
        fix = f"Write obs.astype(np.{spec.dtype})."
    else:
        return
    raise UsageError(f"policy.act was given {given}", f"It takes a batch of observations, an array {wanted}.", fix)


def carry(state: Array | None, reward: Array, blank: Array) -> Array | None:
    """Add the reward that an action brought; lanes that begin a new episode (`blank`) remember nothing."""
    if state is None:
        return None
    state[:, -1] = reward
    state[blank] = 0.0
    return state
