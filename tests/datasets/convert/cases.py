"""Data sets with what other formats find hard."""

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.data import Spec
from qfleet.data.space_format import EnvSpaces
from qfleet.datasets.convert.actions import action_counts
from qfleet.datasets.format import (
    Dataset,
    Description,
    RecordedEpisode,
    open_dataset,
    space_columns,
    split_observation,
    write_dataset,
)
from qfleet.datasets.storage import open_place
from qfleet.envs.spaces import adapt_obs

DICT = spaces.Dict(
    {"place": spaces.Box(-1, np.inf, (2,), np.float64), "picture": spaces.Box(0, 255, (2, 3), np.uint8)},
    kind=spaces.Discrete(3, start=2),
    pair=spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3]))),
)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "dict": DICT,
    "vector": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "picture": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "grey": spaces.Box(0, 255, (84, 84), np.uint8),
    "number": spaces.Discrete(5),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3, start=-1),
    "several": spaces.MultiDiscrete([2, 3, 2]),
    "binary": spaces.MultiBinary(3),
}


def made_dataset(
    folder: Path, observation: spaces.Space[Any], action: spaces.Space[Any], lengths: list[int], seed: int, masked: bool
) -> Dataset:
    """A data set of random episodes in these spaces; ends and probabilities are random too."""
    kept = EnvSpaces(observation, action, masked)
    adapter = adapt_obs(observation, "Made-v0")
    spec = Spec(adapter.shape, adapter.dtype, action_counts(action), masked=masked)
    episodes = [made_episode(observation, spec, seed, number, length) for number, length in enumerate(lengths)]
    description = Description("Made-v0", spec, space_columns(observation), kept)
    write_dataset(open_place(folder), description, episodes, {"made_by": "test"})
    return open_dataset(str(folder))


def made_episode(space: spaces.Space[Any], spec: Spec, seed: int, number: int, length: int) -> RecordedEpisode:
    rng = np.random.default_rng([seed, number])
    space.seed(seed + number)
    parts = [split_observation(space, space.sample()) for _ in range(length + 1)]
    action = rng.integers(0, spec.num_actions, length)
    mask = rng.integers(0, 2, (length + 1, spec.num_actions)) > 0
    mask[np.arange(length), action] = True
    return RecordedEpisode(
        id=f"é-{seed}-{number}",
        observations={name: np.stack([part[name] for part in parts]) for name in parts[0]},
        action=action,
        reward=rng.normal(size=length),
        terminated=bool(rng.integers(2)),
        truncated=bool(rng.integers(2)),
        probability=rng.uniform(0.1, 1.0, length) if number % 2 else None,
        mask=mask if spec.masked else None,
        seed=int(rng.integers(100)) if rng.integers(2) else None,
        env_id="Made-v0",
        behaviour="chance",
    )


def episodes_of(dataset: Dataset) -> list[RecordedEpisode]:
    """All episodes."""
    return [episode for file in dataset.files() for episode in dataset.episodes(file)]


def require_same(one: Dataset, other: Dataset) -> None:
    """Equal bit for bit: what the data are, and every episode with what is known of it."""
    assert one.manifest.observations == other.manifest.observations
    assert one.manifest.spec == other.manifest.spec
    assert one.manifest.spaces == other.manifest.spaces
    left = episodes_of(one)
    right = episodes_of(other)
    assert len(left) == len(right)
    for mine, theirs in zip(left, right, strict=True):
        assert mine.content_hash() == theirs.content_hash()
        assert (mine.id, mine.seed, mine.behaviour, mine.env_id) == (
            theirs.id,
            theirs.seed,
            theirs.behaviour,
            theirs.env_id,
        )
