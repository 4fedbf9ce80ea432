from pathlib import Path

import numpy as np
import pytest

from qfleet.datasets.format import RecordedEpisode, open_dataset
from qfleet.errors import UsageError
from qfleet.plan import make_plan
from qfleet.workflow.collecting import Behaviour, collect, parse_behaviour


def recorded(folder: Path, env_id: str, num: int, **overrides: object) -> list[RecordedEpisode]:
    plan = make_plan(env_id, overrides={"env.num": 3, **overrides})
    collect(plan, str(folder / "data"), Behaviour("random", 1.0), episodes=num)
    dataset = open_dataset(str(folder / "data"))
    return [episode for file in dataset.files() for episode in dataset.episodes(file)]


def test_episodes_are_those_of_the_environment(tmp_path: Path) -> None:
    """Cart and pole move as the recorded actions say, and the reward is 1 per step."""
    for episode in recorded(tmp_path, "CartPole-v1", 7):
        obs = episode.observations["obs"]
        assert len(obs) == episode.num_steps + 1
        assert episode.terminated
        assert not episode.truncated
        assert abs(obs[-1, 0]) > 2.4 or abs(obs[-1, 2]) > 0.2095
        assert (abs(obs[:-1, 2]) <= 0.2095).all()
        assert (episode.reward == 1.0).all()
        np.testing.assert_allclose(obs[1:, 0], obs[:-1, 0] + 0.02 * obs[:-1, 1], atol=1e-6)
        assert ((np.diff(obs[:, 1]) > 0) == (episode.action == 1)).all()
        np.testing.assert_array_equal(episode.probability, 0.5)


def test_every_lane_plays_as_many_episodes(tmp_path: Path) -> None:
    ids = [episode.id for episode in recorded(tmp_path, "CartPole-v1", 7)]
    lanes = [id.split("-")[1] for id in ids]
    assert sorted(lanes.count(lane) for lane in set(lanes)) == [2, 2, 3]
    assert len(set(ids)) == 7


def test_truncated_episodes_are_told_from_terminated_ones(tmp_path: Path) -> None:
    episodes = recorded(tmp_path, "CartPole-v1", 6, **{"env.options.max_episode_steps": 8})
    cut = [episode for episode in episodes if episode.num_steps == 8]
    assert cut
    assert all(episode.truncated or episode.terminated for episode in cut)
    assert any(episode.truncated and not episode.terminated for episode in cut)


def test_a_policy_needs_a_run() -> None:
    with pytest.raises(UsageError, match="needs the policy of a run"):
        parse_behaviour("epsilon=0.1", None, Path)
    assert parse_behaviour("epsilon=0.1", Path("runs/a"), Path).epsilon == 0.1
    assert parse_behaviour(None, Path("runs/a"), Path) == Behaviour("a, greedy", 0.0, Path("runs/a"))
    assert parse_behaviour(None, None, Path) == Behaviour("random", 1.0)
