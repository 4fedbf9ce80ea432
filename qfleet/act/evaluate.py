"""Evaluation: the greedy policy in separate environments, full episodes, raw rewards."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from qfleet.act.policy import Policy
from qfleet.act.policy_inputs import add_reward
from qfleet.data import Array, World
from qfleet.envs import ProcessVectorEnv
from qfleet.errors import EnvError

MAX_LANES = 128
MAX_FAILURES = 100


@dataclass
class EvaluationResult:
    """Returns, lengths and infos of an evaluation's episodes, and how many were cut at the limit or lost."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    info: list[list[float]] = field(default_factory=list)  # the numbers of `log.info`, as in `Episode`
    cut_episodes: int = 0  # of those counted: they had not ended after `max_steps`
    lost_episodes: int = 0  # not counted: their environment failed

    def row(self) -> dict[str, float | None]:
        """The counts for an evaluation row, and the mean length."""
        lost = {"lost_episodes": self.lost_episodes} if self.lost_episodes else {}
        length = sum(self.lengths) / len(self.lengths) if self.lengths else None
        return {"cut_episodes": self.cut_episodes, **lost, "length_mean": length}


def num_eval_lanes(episodes: int) -> int:
    """How many environments run side by side: each plays as many episodes, so that short ones are not favoured."""
    rounds = math.ceil(episodes / MAX_LANES)
    return math.ceil(episodes / rounds)


def require_working(world: World, failures: Array) -> Array:  # [B]
    """Raise if an environment failed too often or is quarantined; returns the failures."""
    quarantined = world.quarantined if isinstance(world, ProcessVectorEnv) else np.zeros(world.num, np.bool_)
    if (broken := quarantined | (failures > MAX_FAILURES)).any():
        raise EnvError(
            f"environment {int(broken.argmax())} of an evaluation fails again and again",
            "Its episodes do not count, and there is no score without them.",
            "See the events and logs of the run for its error messages.",
        )
    return failures


def evaluate_policy(
    policy: Policy, world: World, episodes: int, *, max_steps: int = 2**62, stop: Callable[[], bool] = lambda: False
) -> EvaluationResult:
    """Returns of `episodes` full episodes (cut after `max_steps` each); fewer if `stop` returns True."""
    quota = math.ceil(episodes / world.num)
    num_lost = 0
    finished: list[list[tuple[float, int, bool, list[float]]]] = [[] for _ in range(world.num)]
    returns_so_far = np.zeros(world.num, np.float64)
    lengths = np.zeros(world.num, np.int64)
    last = np.zeros(world.num, np.bool_)
    failures = np.zeros(world.num, np.int64)
    step = world.reset()
    state = policy.initial_state(world.num)
    while min(len(lane) for lane in finished) < quota and not stop():
        action, state, _ = policy.act(step.obs, state, mask=step.mask)
        world.send(action)
        step = world.receive()
        lost = np.zeros(world.num, np.bool_) if step.lost is None else step.lost
        failures = require_working(world, failures + (lost & ~step.truncated))
        state = add_reward(state, step.reward, last | lost)
        returns_so_far += step.reward
        lengths += ~last
        returns_so_far[lost] = lengths[lost] = 0  # an environment failed: its episode does not count
        num_lost += int((lost & ~step.truncated).sum())
        over_limit = lengths >= max_steps
        if over_limit.any():
            world.abandon(over_limit)
        last = (step.terminated | step.truncated | over_limit) & ~(last | lost)
        for lane in np.flatnonzero(last):
            ended = bool(step.terminated[lane] | step.truncated[lane])
            info = [] if step.info is None else step.info[lane].tolist()
            finished[lane].append((float(returns_so_far[lane]), int(lengths[lane]), not ended, info))
        returns_so_far[last] = lengths[last] = 0
    # First the first episode of every lane, then the second, and so on.
    played = [each for round_ in range(quota) for lane in finished for each in lane[round_ : round_ + 1]][:episodes]
    return EvaluationResult(
        [each[0] for each in played],
        [each[1] for each in played],
        [each[3] for each in played if each[3]],
        sum(each[2] for each in played),
        num_lost,
    )
