"""log.info: numbers from the info of an episode's last step, in every runtime; lengths of episodes."""

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from qfleet import Run, train
from qfleet.envs import TRAIN, make_world
from qfleet.envs.step_values import info_number
from qfleet.errors import UsageError
from qfleet.plan.schema import Env
from qfleet.training.log.info_numbers import InfoNumbers, info_means
from qfleet.training.train_state import TrainState
from tests.support.runs import JUDGED, LOCAL, Settings, events, resumed, rows, same, small, trained

NAMES = ("is_success", "deep.length", "a.dot")
PROCESSES: Settings = {"runtime.type": "processes", "actors.num": 2, **LOCAL}


class Informing(gym.Env[Any, Any]):
    """Episodes of 3 to 8 steps; the info of every step says how long the episode is."""

    def __init__(self, last: dict[str, Any] | None = None) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.last = last  # instead of the info of the last step

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.length = int(self.np_random.integers(3, 9))
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {"is_success": 77}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        ended = self.steps == self.length
        info: dict[str, Any] = {"is_success": 99.0}  # only the last step counts
        if ended:
            deep = {"length": np.array([self.length], np.int32)}
            info = {"is_success": self.length > 5, "deep": deep, "a.dot": np.float32(0.5)}
            info = info if self.last is None else self.last
        obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return obs, float(action), ended, False, info


def plan_of(changes: Settings | None = None) -> Any:
    return small({"log.info": NAMES, **JUDGED, **(changes or {})}, "Informing-v0")


def of_kind(run: Run, kind: str) -> list[dict[str, Any]]:
    return [row for row in run.metrics if row["kind"] == kind]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"env.workers": 2},
        PROCESSES,
        {**PROCESSES, "runtime.chunk_rows": 4, "runtime.compress": True},
        {**PROCESSES, "runtime.replay_process": True},
        {"learners.num": 2},
        {"learners.num": 2, "learners.bundles": True},
    ],
    ids=["inline", "workers", "processes", "compressed", "replay process", "learners", "actor-learners"],
)
def test_numbers_of_info_are_in_rows(tmp_path: Path, changes: Settings) -> None:
    run = trained(plan_of(changes), tmp_path, env=Informing)
    for row in [*of_kind(run, "progress"), *of_kind(run, "eval")]:
        assert 3 <= row["length_mean"] <= 8
        assert row["info.deep.length"] == row["length_mean"]
        assert 0.0 <= row["info.is_success"] <= 1.0
        assert row["info.a.dot"] == 0.5
    assert {row["split"] for row in of_kind(run, "eval")} == {"validation", "test"}
    assert run.status["score"]["info.a.dot"] == 0.5
    assert not [event for event in events(run.path, "warning") if "log.info" in event["text"]]
    header = (run.path / "card.md").read_text().split("## Score")[1].splitlines()[2]
    assert [cell.strip() for cell in header.split("|")][8:12] == ["length", *(f"info.{name}" for name in NAMES)]


def test_workers_and_one_thread_give_the_same_numbers(tmp_path: Path) -> None:
    inline, workers = (
        trained(plan_of({"env.workers": number}), tmp_path / str(number), env=Informing) for number in (0, 2)
    )
    assert rows(inline.path) == rows(workers.path)


def test_the_means_are_those_of_the_episodes(tmp_path: Path) -> None:
    plan = plan_of({"env.num": 1, "until.steps": 300, "log.every_steps": 100})
    run = trained(plan, tmp_path, env=Informing)
    world = make_world(plan.env, seed=plan.seed, stream=TRAIN, make=Informing, info=NAMES)
    world.reset()
    lengths: list[int] = []
    steps = length = 0
    while steps < run.status["env_steps"]:
        world.send(np.zeros(1, np.int64))
        step = world.receive()
        assert step.info is not None
        if not length and np.isnan(step.info[0]).all():
            continue  # a reset
        steps += 1
        length += 1
        if step.terminated[0]:
            assert step.info[0].tolist() == [length > 5, length, 0.5]
            lengths.append(length)
            length = 0
    last = of_kind(run, "progress")[-1]
    assert last["length_mean"] == pytest.approx(np.mean(lengths[-100:]))
    assert last["info.is_success"] == pytest.approx(np.mean([each > 5 for each in lengths[-100:]]))
    assert last["episodes"] == len(lengths)


@pytest.mark.usefixtures("every_save")
@pytest.mark.parametrize("changes", [{}, {"learners.num": 2, "learners.bundles": True}])
def test_a_resumed_run_shows_the_same_numbers(tmp_path: Path, changes: Settings) -> None:
    plan = plan_of(changes)
    whole = trained(plan, tmp_path / "whole", env=Informing)
    run = trained(plan, tmp_path / "parts", env=Informing, callbacks=[lambda row: row["env_steps"] > 140])
    assert run.status["state"] == "stopped"
    found = resumed(run, env=Informing)
    assert rows(found.path) == rows(whole.path)
    if not changes:
        assert same(found.path, whole.path)


def test_without_log_info_only_the_lengths_are_shown(tmp_path: Path) -> None:
    run = trained(plan_of({"log.info": None}), tmp_path, env=Informing)
    fields = {name for row in run.metrics for name in row}
    assert "length_mean" in fields
    assert not [name for name in fields if name.startswith("info.")]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_number_is_said_once(tmp_path: Path, workers: int) -> None:
    plan = plan_of({"log.info": ("x",), "env.workers": workers, "until.steps": 100})
    run = trained(plan, tmp_path, env=lambda: Informing({"x": "text"}))
    (text,) = [event["text"] for event in events(run.path, "warning")]
    assert text.startswith('log.info: info["x"] is not a finite number')
    assert {row["info.x"] for row in of_kind(run, "progress")} == {None}


def test_a_name_that_never_appears_is_said_once(tmp_path: Path) -> None:
    run = trained(plan_of({"log.info": ("is_success", "deep.nope", "deep.length.x")}), tmp_path, env=Informing)
    texts = [event["text"] for event in events(run.path, "warning")]
    assert texts == [
        'log.info: no episode so far had info["deep"]["nope"] in its last step\'s info',
        'log.info: no episode so far had info["deep"]["length"]["x"] in its last step\'s info',
    ]
    assert of_kind(run, "eval")[0]["info.deep.nope"] is None


def test_a_number_that_only_training_episodes_have_is_said(tmp_path: Path) -> None:
    run = trained(plan_of(), tmp_path, env=Informing, eval_env=lambda: Informing({"is_success": True}))
    texts = [event["text"] for event in events(run.path, "warning")]
    assert len(texts) == 2
    assert 'training episodes have info["deep"]["length"], evaluation episodes have not' in texts[0]


def test_cut_episodes_count_with_the_info_of_their_last_step(tmp_path: Path) -> None:
    run = trained(plan_of({"eval.max_steps": 2}), tmp_path, env=Informing)
    row = of_kind(run, "eval")[0]
    assert (row["cut_episodes"], row["length_mean"], row["info.is_success"]) == (3, 2.0, 99.0)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "ALE/Pong-v5"])
def test_native_environments_have_no_info(tmp_path: Path, env_id: str) -> None:
    with pytest.raises(UsageError, match=rf"log\.info=x,y has no effect on {env_id}"):
        make_world(Env(id=env_id), seed=0, stream=TRAIN, info=("x", "y"))
    if env_id == "CartPole-v1":
        with pytest.raises(UsageError, match="has no effect"):
            train(small({"log.info": ("x",)}), out=tmp_path)
        assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("every_save")
def test_names_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    stop = [lambda row: row["env_steps"] > 140]
    run = trained(plan_of({"log.info": ("is_success",)}), tmp_path, env=Informing, callbacks=stop)
    file = run.path / "run.toml"
    file.write_text(file.read_text().replace('"is_success"', '"deep.length"'))
    found = resumed(run, env=Informing)
    last = of_kind(found, "progress")[-1]
    assert last["info.deep.length"] > 0
    assert "info.is_success" not in last


def test_state_of_older_versions_is_loaded() -> None:
    state = TrainState().state_dict()
    old = {name: value for name, value in state.items() if name not in ("lengths", "info", "last_loss")}
    found = TrainState(info=InfoNumbers(["x"]))
    found.load_state_dict({**old, "recent": [1.0], "episodes": 1})
    assert (found.episodes, found.length_mean(), found.info.means()) == (1, None, {"info.x": None})


@pytest.mark.parametrize(
    "value", ["text", [1, 2], float("nan"), float("-inf"), object(), np.zeros(3), {"a": 1}, np.array("x"), 1j]
)
def test_other_values_are_no_numbers(value: Any) -> None:
    assert info_number({"x": value}, "x") == math.inf


@pytest.mark.parametrize(
    ("info", "name", "expected"),
    [
        ({"x": True}, "x", 1.0),
        ({"x": np.bool_(False)}, "x", 0.0),
        ({"x": 3}, "x", 3.0),
        ({"x": np.array(2.5)}, "x", 2.5),
        ({"x": np.array([[4]], np.uint8)}, "x", 4.0),
        ({"a.b": 1, "a": {"b": 2}}, "a.b", 1.0),
        ({"a": {"b": {"c": 2}}}, "a.b.c", 2.0),
    ],
)
def test_numbers_are_read_by_key_or_path(info: dict[str, Any], name: str, expected: float) -> None:
    assert info_number(info, name) == expected


@pytest.mark.parametrize("info", [{}, {"x": None}, {"y": 1}, {"a": 3}])
def test_a_value_that_is_not_there_is_nan(info: dict[str, Any]) -> None:
    assert math.isnan(info_number(info, "x"))
    assert math.isnan(info_number(info, "a.b"))


@pytest.mark.parametrize("info", [3, {"x": 3}, {"x": ["a"]}, [1.0]])
def test_malformed_state_is_refused(info: Any) -> None:
    with pytest.raises(ValueError, match="Expected"):
        TrainState(info=InfoNumbers(["x"])).load_state_dict({**TrainState().state_dict(), "info": info})


def test_means_are_over_the_newest_hundred() -> None:
    found = InfoNumbers(["x", "y"])
    for number in range(150):
        found.add([float(number), float("nan")])
    assert found.means() == {"info.x": sum(range(50, 150)) / 100, "info.y": None}
    assert len(found.state_dict()["x"]) == 100
    assert info_means(["x"], [[1.0], [float("nan")], [float("inf")], [3.0]]) == {"info.x": 2.0}
    assert info_means(["x"], []) == {"info.x": None}
