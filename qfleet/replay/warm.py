"""Compile the replay's loops once, so that nobody's first run waits for it: `python -m qfleet.replay.warm`."""

import numpy as np

from qfleet.data import Rollout, Spec
from qfleet.replay.replay import Replay
from qfleet.replay.samplers import Prioritized


def warm(spec: Spec) -> None:
    """Add, draw and update once with observations of this kind."""
    replay = Replay(spec, 1, 8, Prioritized(8), np.random.default_rng(0))
    for row in range(3):
        zero, last = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.bool_)
        obs = np.zeros((1, 1, *spec.obs), spec.dtype)
        replay.add(Rollout(obs, np.zeros((1, 1), np.int64), zero, zero + 1, last, (0, 0, row), 0))
    batch = replay.sample(2)
    if batch is not None:
        replay.update(batch.ids, batch.reward)
        replay.sampler.load_state_dict(replay.sampler.state_dict())


if __name__ == "__main__":
    warm(Spec((4,), "float32", (2,)))
    warm(Spec((84, 84), "uint8", (4,), stack=4))
