"""Compile the replay's loops ahead of the first run, which then need not wait: `python -m qfleet.replay.warm`."""

from dataclasses import replace

import numpy as np

from qfleet.data import Rollout, Spec
from qfleet.replay.cuts import Cut, NStepReturn, SequenceCut, StepCut
from qfleet.replay.duplicates import DuplicateFilter
from qfleet.replay.intake import write_column
from qfleet.replay.replay import Replay
from qfleet.replay.samplers import Prioritized
from qfleet.replay.store import as_uints


def warm(spec: Spec) -> None:
    """Add, sample and update once with such observations, as steps and as sequences."""
    for cut in (StepCut(1), SequenceCut(1, 0, 1, 1)):
        warm_cut(replace(spec, masked=True), cut)
    frame = as_uints(np.zeros((1, 1, *spec.obs), spec.dtype))
    write_column(frame, frame, 0, 1, np.zeros(1, np.int64), 0)  # how frames that will be compressed are written


def warm_cut(spec: Spec, cut: Cut) -> None:
    """Call every compiled loop that this cut needs."""
    rng = np.random.default_rng(0)
    n_step = NStepReturn(1, 0.99)
    filter = DuplicateFilter(copies=8)  # the rows are all alike
    replay = Replay(spec, 1, 8, Prioritized(8), rng, cut=cut, n_step=n_step, actor_priority=True, filter=filter)
    for row in range(3):
        zero = np.zeros((1, 1), np.float32)
        last = np.zeros((1, 1), np.bool_)
        obs = np.zeros((1, 1, *spec.obs), spec.dtype)
        value = np.zeros((1, 1, 2), np.float32)
        action = np.zeros((1, 1), np.int64)
        mask = np.ones((1, 1, spec.num_actions), np.bool_)
        replay.add(Rollout(obs, action, zero, zero + 1, last, (0, 0, row), 0, value=value, mask=mask))
    replay.seal()
    batch = replay.sample(2)
    if batch is not None:
        replay.update(batch.ids, batch.weight)
        replay.sampler.load_state_dict(replay.sampler.state_dict())
    if isinstance(cut, StepCut):
        replay.mirrored = True
        replay.sample(2)


if __name__ == "__main__":
    warm(Spec((4,), "float32", (2,)))
    warm(Spec((84, 84), "uint8", (4,), stack=4))
