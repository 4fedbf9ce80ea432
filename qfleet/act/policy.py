"""The policy: observations in, actions out; used by actors, evaluation and serving.

Shapes: B lanes, A actions, D action dimensions; C and S, a memory's sizes (`nets/memory.py`). Values are [B, A], or
[B, D, A] when decoupled.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.act.explore import ChooseActions, epsilon_greedy, greedy
from qfleet.act.explore import NonFiniteValues as NonFiniteValues
from qfleet.act.policy_inputs import require_batch
from qfleet.act.predict import Predictor
from qfleet.data import Array, Spec
from qfleet.errors import UsageError
from qfleet.nets import QNet, can_share_weights, make_chain, require_memory, set_noise, write_weights
from qfleet.qlearn import CustomHead, Head

CPU = torch.device("cpu")


class PolicyLoader(Protocol):
    """Loads the policy of a run; `training/checkpoints/saved_policy.py` has it, for it knows run directories."""

    def __call__(
        self,
        path: str | Path,
        *,
        which: str = "best",
        out: str | Path = "runs",
        torso: nn.Module | None = None,
        head: CustomHead | None = None,
        device: str | None = None,
    ) -> "Policy":
        """The policy of the run at `path`."""


@dataclass(eq=False, repr=False)
class Policy:
    """Greedy in the network's values, random with probability epsilon.

    `predict` and `values` take raw observations of the environment; `act` is for qfleet's own worlds.
    """

    load: ClassVar[PolicyLoader]
    save: ClassVar[Callable[["Policy", str | Path], Path]]
    net: QNet
    head: Head
    actions: tuple[int, ...]  # the counts per dimension
    device: torch.device = CPU
    spec: Spec | None = None
    version: int = 0
    source: Mapping[str, Tensor] | None = None  # the published weights that these follow
    tensor_versions: list[int] = field(default_factory=list)
    noisy: bool = False
    predictor: Predictor | None = None  # knows the original spaces of the environment

    def __post_init__(self) -> None:
        self.fast_net = make_chain(self.net) or self.net
        self.shares_weights = can_share_weights(self.net)
        set_noise(self.net, active=False)

    def load_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Use these weights and what is later written to them: shared if possible, else copied in place."""
        if weights is not self.source:
            self.source = weights
            self.tensor_versions = []
            if self.shares_weights:
                self.net.load_state_dict(dict(weights), assign=True)
                self.fast_net = make_chain(self.net) or self.net
        self.refresh_weights()
        self.version = version

    def refresh_weights(self) -> None:
        """Copy the weights again if they have changed; a tensor's version counts how often it was written."""
        if self.shares_weights or self.source is None:
            return
        versions = [tensor._version for tensor in self.source.values()]
        if versions != self.tensor_versions:
            write_weights(self.net, self.source)
            self.tensor_versions = versions

    def __repr__(self) -> str:
        """Its environment and actions."""
        name = "" if self.predictor is None else f"{self.predictor.plan.env.id!r}, "
        return f"Policy({name}actions={self.actions}, device={str(self.device)!r})"

    def predict(
        self,
        obs: Any,
        state: Any = None,
        mask: Any = None,
        deterministic: bool = True,
        *,
        reward: Any = None,
        episode_start: Any = None,
        epsilon: float | None = None,
    ) -> tuple[Any, Array | None]:
        """The action for a raw observation of the environment, or the actions for a batch, and the state after it.

        Args:
            obs: an observation of the environment's own space, or a batch of them.
            state: of a recurrent policy, what its last call returned; None begins new episodes.
            mask: `info["action_mask"]`, if the environment has masks.
            deterministic: False explores as the plan does at its end.
            reward: of a recurrent policy, the reward of the last action.
            episode_start: of a recurrent policy, which lanes begin a new episode.
            epsilon: with deterministic=False, the share of random actions.
        """
        predictor = self.require_predictor()
        return predictor.predict(self, obs, state, mask, deterministic, reward, episode_start, epsilon)

    def values(self, obs: Any, state: Any = None, *, reward: Any = None, episode_start: Any = None) -> Array:
        """The Q-values [A] of all actions for a raw observation, [B, A] for a batch; decoupled [D, A] and [B, D, A].

        Args:
            obs: as for `predict`.
            state: as for `predict`.
            reward: as for `predict`.
            episode_start: as for `predict`.
        """
        return self.require_predictor().values(self, obs, state, reward, episode_start)

    def raw_action(self, index: int) -> Any:
        """The action of the environment whose value is at this index of `values`.

        Args:
            index: of a joint action, its number.
        """
        num = math.prod(self.actions)
        if not 0 <= index < num:
            raise UsageError(f"there is no action {index}", f"There are {num}.", f"Give an index from 0 to {num - 1}.")
        return self.require_predictor().spaces.decode_one(index)

    def seed(self, seed: int) -> None:
        """Seed the random numbers of `predict(..., deterministic=False)`.

        Args:
            seed: any number.
        """
        self.require_predictor().rng = np.random.default_rng(seed)

    def require_predictor(self) -> Predictor:
        """The predictor, if the spaces of the environment are known."""
        if self.predictor is None:
            raise UsageError(
                "this policy does not know the spaces of its environment",
                "It was not made by train, resume, load or Policy.load, or these spaces cannot be written as text.",
                "Use policy.act with arrays as the network reads them.",
            )
        return self.predictor

    def initial_state(self, lanes: int) -> Array | None:  # [B, S]
        """The state at the beginning of episodes; None without memory."""
        return None if self.net.memory is None else np.zeros((lanes, self.net.memory.state_size), np.float32)

    def forward(self, obs: Array, state: Array | None = None) -> tuple[Array, Array | None]:
        """The value of every action, and a memory's next cell state [B, C]."""
        self.refresh_weights()
        with torch.inference_mode():
            inputs = torch.from_numpy(obs) if self.device.type == "cpu" else torch.from_numpy(obs).to(self.device)
            if state is None:
                out = self.fast_net(inputs)
                cell_state = None
            else:
                out, cell_state = self.net.step(inputs, torch.from_numpy(state).to(self.device))
            values: Array = self.head.values(out).cpu().numpy()
        if not np.isfinite(values).all():
            raise NonFiniteValues("the network's values are not finite")
        return values, None if cell_state is None else cell_state.cpu().numpy()

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
            choose = partial(greedy, mask=mask, counts=self.actions)
            return self.select_actions(obs, state, choose, noisy=False)
        choose = partial(epsilon_greedy, epsilon=epsilon, rng=rng, mask=mask, counts=self.actions)
        return self.select_actions(obs, state, choose, noisy=True)

    def select_actions(
        self, obs: Array, state: Array | None, choose: ChooseActions, *, noisy: bool
    ) -> tuple[Array, Array | None, Array]:
        """As `act`, with actions chosen by `choose`; `noisy` is for exploration only."""
        self.set_noisy(noisy)
        if state is None:
            state = self.initial_state(len(obs))
        values, cell_state = self.forward(obs, state)
        action = choose(values)
        return action, None if cell_state is None else self.next_state(cell_state, action), values

    def set_noisy(self, noisy: bool) -> None:
        """Switch the network's noise on or off."""
        if self.noisy != noisy:
            self.noisy = noisy
            set_noise(self.net, noisy)

    def next_state(self, cell_state: Array, action: Array) -> Array:  # [B, C], [B] -> [B, S]
        """The state after an action, still without its reward (`add_reward`)."""
        memory = require_memory(self.net)
        state = np.zeros((len(cell_state), memory.state_size), np.float32)
        state[:, : memory.cell_state_size] = cell_state
        state[np.arange(len(cell_state)), memory.cell_state_size + action] = 1.0
        return state
