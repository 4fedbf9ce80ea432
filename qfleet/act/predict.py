"""Raw observations in, raw actions out: what a policy does in the user's own program. Shapes: B lanes, S state size."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qfleet.act.explore import (
    ChooseActions,
    EpsilonGreedyExplorer,
    Explorer,
    NonFiniteValues,
    greedy,
    ladder_epsilons,
    make_explorer,
)
from qfleet.act.raw_spaces import RawSpaces
from qfleet.data import Array
from qfleet.data.space_format import EnvSpaces
from qfleet.envs.step_values import shown
from qfleet.errors import UsageError
from qfleet.escape import escaped
from qfleet.plan.schema import Algo, LadderEpsilon, OwnExplore, Plan
from qfleet.qlearn.heads import NO_ACTION

if TYPE_CHECKING:
    from qfleet.act.policy import Policy

LATE_STEP = 2**62  # every schedule has ended


class Predictor:
    """Predicts with a policy. Several threads may call it: they take turns."""

    def __init__(self, spaces: RawSpaces, plan: Plan) -> None:
        self.spaces = spaces
        self.plan = plan
        self.explorer = final_explorer(plan.algo, spaces.spec.actions, plan.env.num)
        self.rng = np.random.default_rng()
        self._lock = threading.Lock()
        self._told_of_reward = False

    def predict(
        self,
        policy: "Policy",
        obs: Any,
        state: Any,
        mask: Any,
        deterministic: bool,
        reward: Any,
        episode_start: Any,
        epsilon: float | None,
    ) -> tuple[Any, Array | None]:
        """Raw actions, and the state after them."""
        rows, batched = self.spaces.encode(obs)
        memory = self._memory(policy, state, reward, episode_start, len(rows), batched)
        allowed = self._allowed(mask, len(rows), batched)
        explorer = self._explorer(deterministic, epsilon)
        with self._lock, self._noise(policy, explorer is not None), finite_values():
            choose = self._choose(explorer, allowed, policy.actions)
            action, after, _ = policy.select_actions(rows, memory, choose, noisy=explorer is not None)
        return self.spaces.decode(action, batched), after if after is None or batched else after[0]

    def values(self, policy: "Policy", obs: Any, state: Any, reward: Any, episode_start: Any) -> Array:
        """The values of all actions; -inf for actions that a dimension does not have."""
        rows, batched = self.spaces.encode(obs)
        memory = self._memory(policy, state, reward, episode_start, len(rows), batched)
        with self._lock, finite_values():
            policy.set_noisy(False)
            values, _ = policy.forward(rows, memory)
        if self.plan.net.decoupled:
            values = np.where(values <= NO_ACTION, -np.inf, values)
        return values if batched else values[0]

    def _explorer(self, deterministic: bool, epsilon: float | None) -> Explorer | None:
        """Chooses actions; None: the best ones."""
        if deterministic:
            if epsilon is not None:
                raise UsageError(
                    f"epsilon={epsilon} has no effect with deterministic=True",
                    "The best action is never replaced by a random one.",
                    "Pass deterministic=False as well, or leave epsilon out.",
                )
            return None
        if epsilon is None:
            return self._plans_explorer()
        if not 0.0 <= epsilon <= 1.0:
            raise UsageError(f"epsilon={epsilon} is no probability", "It is a share of actions.", "Use 0 to 1.")
        return EpsilonGreedyExplorer(lambda step: epsilon, self.spaces.spec.actions)

    def _plans_explorer(self) -> Explorer:
        if self.explorer is None:
            raise UsageError(
                "this run explored by a function of your own",
                "A run directory cannot hold it, so deterministic=False alone does not say how to explore.",
                "Pass epsilon=0.05 as well, or choose actions yourself by policy.values(obs).",
            )
        return self.explorer

    def _choose(self, explorer: Explorer | None, allowed: Array | None, counts: tuple[int, ...]) -> ChooseActions:
        if explorer is None:
            return partial(greedy, mask=allowed, counts=counts)
        return lambda values: explorer.choose(values, LATE_STEP, self.rng, allowed)

    @contextmanager
    def _noise(self, policy: "Policy", exploring: bool) -> Iterator[None]:
        """Noise of the network's layers, drawn by `rng`; torch's own generator stays as it was."""
        if not (exploring and self.plan.net.noisy):
            yield
            return
        seed = int(self.rng.integers(2**63))
        on_cuda = policy.device.type == "cuda"
        with torch.random.fork_rng(devices=[policy.device] if on_cuda else []):
            torch.default_generator.manual_seed(seed)
            if on_cuda:
                with torch.cuda.device(policy.device):
                    torch.cuda.manual_seed(seed)
            yield

    def _allowed(self, mask: Any, num: int, batched: bool) -> Array | None:  # [B, A]
        if mask is None:
            if not self.spaces.spec.masked:
                return None
            raise UsageError(
                escaped(f"mask= is missing: {self.plan.env.id} allows only some actions at each step"),
                "Without it the policy may choose an action that is not allowed.",
                f'Pass mask=info["action_mask"], or np.ones({self.spaces.spec.num_actions}) to allow all.',
            )
        if self.plan.net.decoupled:
            raise UsageError(
                "mask= does not go with net.decoupled",
                "A mask is about joint actions; this network values each dimension by itself.",
                "Leave mask out.",
            )
        return self.spaces.masks(mask, num, batched)

    def _memory(
        self, policy: "Policy", state: Any, reward: Any, episode_start: Any, num: int, batched: bool
    ) -> Array | None:  # [B, S]
        """The memory before this step, in an array of its own; None for a network without memory."""
        memory = policy.initial_state(num)
        if memory is None and state is not None:
            raise UsageError(
                f"state= was given {shown(state)}",
                "This policy has no memory: it needs the newest observation only.",
                "Leave state out, or pass the state that predict returned, which is None.",
            )
        if memory is None or state is None:
            return memory
        memory[:] = saved_memory(state, memory.shape if batched else memory.shape[1:])
        if reward is None and not self._told_of_reward:
            self._told_of_reward = True
            text = "This policy reads the reward of its last action, and reward= was not given: it is taken for 0."
            warnings.warn(text, stacklevel=4)
        memory[:, -1] = per_lane("reward", 0.0 if reward is None else reward, num, "biuf")
        memory[per_lane("episode_start", False if episode_start is None else episode_start, num, "b")] = 0.0
        return memory


@contextmanager
def finite_values() -> Iterator[None]:
    """Values that are not finite are the fault of the observation or of the weights."""
    try:
        yield
    except NonFiniteValues as error:
        raise UsageError(
            "the network's values for this observation are not finite",
            "Its numbers are too large, or the weights are those of a network that diverged.",
            "Look at the observation; `qfleet verify RUN` checks the weights.",
        ) from error


def saved_memory(state: Any, shape: tuple[int, ...]) -> Array:
    """A state that `predict` returned."""
    array = np.asarray(state)
    if array.shape != shape or array.dtype.kind != "f" or not np.isfinite(array).all():
        raise UsageError(
            f"state= was given {array.dtype} of shape {array.shape}",
            f"It takes finite numbers of shape {shape}, as predict returned them for as many observations.",
            "Pass the state of the last call, or None to begin new episodes.",
        )
    return array


def per_lane(name: str, value: Any, num: int, kinds: str) -> Array:  # [B]
    """One value for all lanes, or one for each."""
    array = np.asarray(value)
    if array.dtype.kind not in kinds or array.shape not in ((), (num,)) or not np.isfinite(array).all():
        wanted = "True or False" if kinds == "b" else "a finite number"
        raise UsageError(
            f"{name}= was given {shown(value)}",
            f"It takes {wanted}, or one for each of the observations ({num}).",
            f"Pass what belongs to the step before: {name}=...",
        )
    return np.broadcast_to(array, (num,))


def final_explorer(algo: Algo, counts: tuple[int, ...], lanes: int) -> Explorer | None:
    """The exploration with which the plan ends; of a ladder, its smallest epsilon. None: a function of the user's."""
    match algo.explore:
        case OwnExplore():
            return None
        case LadderEpsilon(base=base, power=power):
            smallest = float(ladder_epsilons(base, power, lanes).min())
            return EpsilonGreedyExplorer(lambda step: smallest, counts)
        case _:
            return make_explorer(algo, counts, lanes)


def make_predictor(plan: Plan, spaces: EnvSpaces) -> Predictor:
    """The predictor of a plan's policies in an environment with these spaces."""
    return Predictor(RawSpaces(spaces, plan.env), plan)
