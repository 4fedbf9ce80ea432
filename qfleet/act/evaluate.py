"""Evaluation: the greedy policy on worlds of its own, full episodes, raw rewards."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from qfleet.act.policy import Policy, carry
from qfleet.data import Array, World
from qfleet.envs import ProcessVectorEnv
from qfleet.errors import EnvError

MAX_LANES = 128
MAX_FAILURES = 100


@dataclass
class EvaluationResult:
    """What was seen of an evaluation: returns lane by lane, how many were cut at the limit, how many were lost."""

    returns: list[float] = field(default_factory=list)
    cut_episodes: int = 0  # of those counted: they had not ended after `max_steps`
    lost_episodes: int = 0  # not counted: their environment failed

    def row(self) -> dict[str, int]:
        """The counts as an evaluation row has them."""
        lost = {"lost_episodes": self.lost_episodes} if self.lost_episodes else {}
        return {"cut_episodes": self.cut_episodes, **lost}


def lanes_for(episodes: int) -> int:
    """How many worlds play side by side: each lane plays the same number, so short episodes are not favoured."""
    rounds = math.ceil(episodes / MAX_LANES)
    return math.ceil(episodes / rounds)


def require_working(world: World, failures: Array) -> Array:  # [B]
    """Refuse to wait for an environment that fails again and again, or is given up."""
    given_up = world.quarantined if isinstance(world, ProcessVectorEnv) else np.zeros(world.num, np.bool_)
    if (hopeless := given_up | (failures > MAX_FAILURES)).any():
        raise EnvError(
            f"environment {int(hopeless.argmax())} of an evaluation fails again and again",
            "Its episodes do not count, and there is no score without them.",
            "See the events and logs of the run for what it said.",
        )
    return failures


def play(
    policy: Policy,
    world: World,
    episodes: int,
    *,
    max_steps: int = 2**62,
    stop: Callable[[], bool] = lambda: False,
) -> EvaluationResult:
    """Play `episodes` full episodes (cut after `max_steps` each), lane by lane; fewer if `stop` says so."""
    quota = math.ceil(episodes / world.num)
    num_lost = 0
    returns: list[list[tuple[float, bool]]] = [[] for _ in range(world.num)]
    totals = np.zeros(world.num, np.float64)
    lengths = np.zeros(world.num, np.int64)
    last = np.zeros(world.num, np.bool_)
    failures = np.zeros(world.num, np.int64)
    now = world.reset()
    state = policy.blank(world.num)
    while min(len(done) for done in returns) < quota and not stop():
        action, state, _ = policy.act(now.obs, state, mask=now.mask)
        world.send(action)
        now = world.receive()
        lost = np.zeros(world.num, np.bool_) if now.lost is None else now.lost
        failures = require_working(world, failures + (lost & ~now.truncated))
        state = carry(state, now.reward, last | lost)
        totals += now.reward
        lengths += ~last
        totals[lost] = lengths[lost] = 0  # an environment failed: its episode does not count
        num_lost += int((lost & ~now.truncated).sum())
        endless = lengths >= max_steps
        if endless.any():
            world.abandon(endless)
        last = (now.terminated | now.truncated | endless) & ~(last | lost)
        for lane in np.flatnonzero(last):
            ended = bool(now.terminated[lane] | now.truncated[lane])
            returns[lane].append((float(totals[lane]), not ended))
        totals[last] = lengths[last] = 0
    found = [pair for rank in range(quota) for done in returns for pair in done[rank : rank + 1]][:episodes]
    return EvaluationResult([value for value, _ in found], sum(cut for _, cut in found), num_lost)
