"""Checks data sets recorded in `toys/Traced-v0`, whose observations say which step of which episode they are of."""

from collections.abc import Iterable

import numpy as np

from qfleet.datasets.format import Dataset, RecordedEpisode
from qfleet.datasets.inspect import validate_dataset
from qfleet.testing.toys import Traced

TRACED = "qfleet.testing.toys:toys/Traced-v0"


def episodes_of(dataset: Dataset) -> list[RecordedEpisode]:
    """All episodes."""
    return [episode for file in dataset.files() for episode in dataset.episodes(file)]


def seed_of(episode: RecordedEpisode) -> int:
    """The seed that its first observation shows."""
    high, low, step = episode.observations["obs"][0].tolist()
    assert step == 0
    return int(high) << 16 | int(low)


def require_traced(dataset: Dataset) -> int:
    """Every step as the environment made it, none twice; returns how many episodes were cut off."""
    assert validate_dataset(dataset) == []
    episodes = episodes_of(dataset)
    for episode in episodes:
        seed = seed_of(episode)
        length = Traced.length(seed)
        shown = [Traced.shown(seed, step) for step in range(episode.num_steps + 1)]
        np.testing.assert_array_equal(episode.observations["obs"], np.array(shown, np.float32))
        np.testing.assert_array_equal(episode.reward, np.arange(1, episode.num_steps + 1))
        ends = (episode.terminated, episode.truncated)
        assert ends == ((length % 2 == 1, length % 2 == 0) if episode.num_steps == length else (False, False))
    seeds = [seed_of(episode) for episode in episodes]
    assert len(set(seeds)) == len(seeds)
    return len(cut_off(episodes))


def cut_off(episodes: Iterable[RecordedEpisode]) -> list[RecordedEpisode]:
    """Those that the recording stopped in."""
    return [episode for episode in episodes if not episode.terminated and not episode.truncated]
