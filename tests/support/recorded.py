"""Made-up episodes and data sets for tests."""

from pathlib import Path

import numpy as np

from qfleet.data import Spec
from qfleet.datasets.format import Dataset, Description, RecordedEpisode, open_dataset, spec_columns, write_dataset
from qfleet.datasets.storage import open_place

SPEC = Spec((3,), "float32", (2,))


def make_episode(number: int, length: int = 5, *, terminated: bool = True, spec: Spec = SPEC) -> RecordedEpisode:
    """An episode whose observations and rewards say where they are: number * 100 + t."""
    rng = np.random.default_rng(number)
    places = number * 100 + np.arange(length + 1)
    obs = np.broadcast_to(places.reshape(-1, *[1] * len(spec.obs)), (length + 1, *spec.obs)).astype(spec.dtype)
    return RecordedEpisode(
        id=f"e{number}",
        observations={"obs": obs},
        action=rng.integers(0, spec.num_actions, length),
        reward=places[1:].astype(np.float64),
        terminated=terminated,
        truncated=not terminated,
        mask=np.ones((length + 1, spec.num_actions), np.bool_) if spec.masked else None,
    )


def make_dataset(
    folder: Path, lengths: list[int], *, env_id: str = "Logs-v0", spec: Spec = SPEC, file_bytes: int = 1 << 20
) -> Dataset:
    """A data set of episodes with these lengths; every second one is truncated."""
    episodes = [make_episode(at, length, terminated=at % 2 == 0, spec=spec) for at, length in enumerate(lengths)]
    description = Description(env_id, spec, spec_columns(spec))
    write_dataset(open_place(str(folder)), description, episodes, {"made_by": "test"}, file_bytes)
    return open_dataset(str(folder))
