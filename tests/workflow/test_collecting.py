"""Collecting: what is recorded is what the environment gave, of every policy its share, in every runtime."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import train
from qfleet.cli.entry import main
from qfleet.cli.offline.progress import CountProgress
from qfleet.datasets.format import Dataset, open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.errors import EnvError, UsageError
from qfleet.plan import make_plan
from qfleet.workflow.behaviours import Behaviour, parse_mixture
from qfleet.workflow.collecting import collect
from qfleet.workflow.playing import make_playing_world
from tests.build.test_run_recorder import SETTINGS
from tests.support.traced import TRACED, episodes_of, require_traced

RANDOM = Behaviour("random", 1.0)


def collected(
    tmp_path: Path, env_id: str = TRACED, behaviour: Any = RANDOM, name: str = "data", **options: Any
) -> Dataset:
    settings = {"env.num": 4, **options.pop("settings", {})}
    collect(make_plan(env_id, overrides=settings), str(tmp_path / name), behaviour, **options)
    return open_dataset(str(tmp_path / name))


PROCESSES = {"runtime.type": "processes", "actors.num": 2}


@pytest.mark.parametrize("settings", [{}, PROCESSES], ids=["inline", "processes"])
def test_a_number_of_episodes_evenly_from_all_lanes(tmp_path: Path, settings: dict[str, Any]) -> None:
    dataset = collected(tmp_path, episodes=42, settings=settings)
    assert require_traced(dataset) == 0
    assert dataset.manifest.num_episodes == 42
    lanes = [row.id.split("-")[1] for row in dataset.index]
    assert sorted(lanes.count(lane) for lane in set(lanes)) == [10, 10, 11, 11]


@pytest.mark.parametrize("settings", [{}, PROCESSES], ids=["inline", "processes"])
def test_exactly_so_many_steps(tmp_path: Path, settings: dict[str, Any]) -> None:
    dataset = collected(tmp_path, steps=999, cut=True, settings=settings)
    assert dataset.manifest.num_steps == 999
    assert 0 < require_traced(dataset) <= 4


def test_whole_episodes_of_at_least_so_many_steps(tmp_path: Path) -> None:
    dataset = collected(tmp_path, steps=999)
    assert require_traced(dataset) == 0
    assert 999 <= dataset.manifest.num_steps < 999 + 4 * 9


def test_the_seed_decides_the_data_set(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [{}, {}, {"seed": 1}]
    versions = [
        collected(tmp_path, name=str(number), episodes=12, settings=each).version
        for number, each in enumerate([*settings, *(each | PROCESSES for each in settings[:2])])
    ]
    assert versions[0] == versions[1] != versions[2]
    assert versions[3] == versions[4]


def test_a_stack_is_stored_as_its_newest_frames(tmp_path: Path) -> None:
    """The same actions in the same world show the same frames again."""
    dataset = collected(tmp_path, "PongNoFrameskip-v4", steps=40, cut=True, settings={"env.num": 1})
    (episode,) = episodes_of(dataset)
    frames = episode.observations["obs"]
    assert dataset.manifest.spec.stack == 4
    assert frames.shape == (41, 84, 84)
    plan = make_plan("PongNoFrameskip-v4", overrides={"env.num": 1})
    with closing(make_playing_world(plan)) as world:
        step = world.reset()
        for frame, action in zip(frames, [*episode.action, 0], strict=True):
            np.testing.assert_array_equal(step.obs[0, -1], frame)
            world.send(np.array([action]))
            step = world.receive()


def test_multi_discrete_actions_and_masks(tmp_path: Path) -> None:
    dataset = collected(tmp_path, "toys/BoxAction-v0", episodes=6, settings={"env.bins": 3})
    episodes = episodes_of(dataset)
    assert dataset.manifest.spec.actions == (3, 3)
    assert {int(action) for episode in episodes for action in episode.action} <= set(range(9))
    assert all((episode.probability == pytest.approx(1 / 9)) for episode in episodes)
    masked = collected(tmp_path, "toys/Masked-v0", name="masked", episodes=6)
    for episode in episodes_of(masked):
        assert episode.mask is not None
        assert episode.mask[np.arange(episode.num_steps), episode.action].all()
        np.testing.assert_allclose(episode.probability, 1 / 3)
    assert validate_dataset(masked) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    return train(
        make_plan(TRACED, overrides={**SETTINGS, "until.steps": 200}), out=out, name="run", progress=False
    ).path


@pytest.mark.parametrize("settings", [{}, PROCESSES], ids=["inline", "processes"])
def test_mixtures_have_their_shares_of_episodes(tmp_path: Path, run: Path, settings: dict[str, Any]) -> None:
    mixture = parse_mixture(["random:1", "run,epsilon=0.2:3"], None, lambda name: run.parent / name)
    dataset = collected(tmp_path, behaviour=mixture, episodes=40, settings=settings)
    require_traced(dataset)
    names = [row.behaviour for row in dataset.index]
    assert {name: names.count(name) for name in set(names)} == {"random": 10, "run, epsilon=0.2": 30}
    for episode in episodes_of(dataset):
        low, high = (1 / 3, 1 / 3) if episode.behaviour == "random" else (0.2 / 3, 0.8 + 0.2 / 3)
        assert episode.probability is not None
        assert all(min(abs(each - low), abs(each - high)) < 1e-9 for each in episode.probability)


def test_mixtures_have_their_shares_of_steps(tmp_path: Path, run: Path) -> None:
    mixture = parse_mixture(["random:1", "run:1"], None, lambda name: run.parent / name)
    dataset = collected(tmp_path, behaviour=mixture, steps=2_000, cut=True)
    steps = sum(row.length for row in dataset.index if row.behaviour == "random")
    assert steps == pytest.approx(1_000, abs=60)
    assert dataset.manifest.settings["behaviour"] == "random:1 + run, greedy:1"


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (["random", "run:1"], "has no share"),
        (["random:1", "run:0"], "share of --policy is 0"),
        (["run,epsilon=2"], "is not valid"),
        (["random:1", "greedy:1"], "needs the policy of a run"),
    ],
)
def test_mixtures_that_are_refused(texts: list[str], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parse_mixture(texts, None, Path)


def test_what_is_refused(tmp_path: Path, run: Path) -> None:
    plan = make_plan("CartPole-v1")
    with pytest.raises(UsageError, match="does not fit"):
        collect(plan, str(tmp_path / "data"), Behaviour("run", 0.0, run), episodes=1)
    with pytest.raises(UsageError, match="--cut does not go with --episodes"):
        collect(plan, str(tmp_path / "data"), RANDOM, episodes=1, cut=True)
    with pytest.raises(UsageError, match="either --episodes or --steps"):
        collect(plan, str(tmp_path / "data"), RANDOM)
    ray = make_plan("CartPole-v1", overrides={"runtime.type": "ray"})
    with pytest.raises(UsageError, match="does not go with collecting"):
        collect(ray, str(tmp_path / "data"), RANDOM, episodes=1)
    assert not (tmp_path / "data").exists()


def test_a_value_that_is_not_finite_ends_the_collection(tmp_path: Path) -> None:
    with pytest.raises((UsageError, EnvError)):
        collected(tmp_path, "toys/NotFinite-v0", episodes=4)
    assert not (tmp_path / "data/manifest.json").exists()


def test_an_error_in_a_process_ends_the_collection(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="collecting process has failed"):
        collected(tmp_path, "qfleet.testing.toys:toys/Raising-v0", episodes=8, settings=PROCESSES)
    assert not (tmp_path / "data/manifest.json").exists()


@pytest.mark.parametrize("more", [[], ["runtime.type=processes", "actors.num=2"]], ids=["inline", "processes"])
def test_ctrl_c_leaves_no_data_set(
    tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Ctrl-C while it plays: it says that there is no data set, and ends with 130."""

    def interrupted(progress: CountProgress, done: int, num: int) -> None:
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr(CountProgress, "show", interrupted)
    url = str(tmp_path / "data")
    assert main(["data", "collect", "CartPole-v1", url, "--steps", "10_000_000", *more]) == 130
    assert "there is no data set" in capsys.readouterr().err
    assert not (tmp_path / "data/manifest.json").exists()
