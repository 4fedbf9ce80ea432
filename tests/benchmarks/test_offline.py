"""The benchmark of offline learning: its verdicts, its tables, and what it keeps. Nothing is trained here."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import offline, offline_data
from benchmarks.offline import Result
from benchmarks.offline_data import BREAKOUT, CARTPOLE, RECIPES, Recipe
from qfleet.plan import compose


def described(env: str = CARTPOLE, data: str = "replay", mean: float = 200.0) -> dict[str, Any]:
    shared = {"what": "x", "version": "a" * 64, "episodes": 3, "steps": 30, "best": 500.0}
    return {"env": env, "data": data, "mean": mean, "low": mean - 1, "high": mean + 1, **shared}


def result(algorithm: str, seed: int, final: float, data: str = "replay", env: str = CARTPOLE) -> Result:
    words = offline.settings(env, algorithm)
    score = (final, final - 1, final + 1)
    best = (final + 7, final, final + 9)
    return Result(env, data, "a" * 64, algorithm, words, seed, score, best, 640, 10, 1.5)


def test_the_bars_are_about_the_final_policies_of_cql() -> None:
    scores = [result("CQL", 1, 450.0), result("CQL", 2, 340.0), result("DQN", 1, 500.0)]
    found = offline.judge(described(), scores)
    assert [(each["bar"], each["least"], each["met"]) for each in found] == [
        ("the behaviour's mean", 200.0, True),
        ("400", 400.0, False),
    ]
    assert found[0]["mean"] == pytest.approx(395.0)
    assert [each["bar"] for each in offline.judge(described(data="expert"), scores)] == ["the behaviour's mean"]
    assert offline.judge(described(mean=396.0), scores)[0]["met"] is False
    assert offline.judge(described(), [result("DQN", 1, 500.0)]) == []


def test_the_table_shows_the_last_and_the_best_checkpoint() -> None:
    text = offline.page([described()], [result("CQL", 1, 450.0), result("CQL", 2, 340.0)])
    assert "final | each seed | best checkpoint | each seed" in text
    assert "395.0 [340.0, 450.0] | 450.0, 340.0 | 402.0 [347.0, 457.0] | 457.0, 347.0" in text
    assert "CartPole-v1, replay: final CQL 395.0 (2 seeds) >= 400 (400.0): **missed**" in text


def test_results_of_other_data_or_settings_do_not_count() -> None:
    good = result("CQL", 1, 450.0)
    other = Result(**{**vars_of(good), "version": "b" * 64})
    older = Result(**{**vars_of(good), "settings": ("algo.offline.alpha=9",)})
    assert offline.select([other, good, older], described()) == [good]


def vars_of(each: Result) -> dict[str, Any]:
    return {name: getattr(each, name) for name in Result.__dataclass_fields__}


def test_results_that_are_there_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, int]] = []

    def measure(recipe: Recipe, version: str, algorithm: str, seed: int) -> Result:
        measured.append((algorithm, seed))
        return result(algorithm, seed, 450.0)

    monkeypatch.setattr(offline, "measure", measure)
    monkeypatch.setattr(offline, "make_dataset", lambda recipe: None)
    monkeypatch.setattr(offline, "describe", lambda recipe, dataset: described(recipe.env, recipe.name))
    words = ["--env", CARTPOLE, "--data", "replay", "--out", str(tmp_path), "--algorithm", "CQL"]
    assert offline.main([*words, "--seeds", "1"]) == 0
    assert offline.main([*words, "--seeds", "3"]) == 0
    assert measured == [("CQL", 1), ("CQL", 2), ("CQL", 3)]
    assert offline.main([*words, "--seeds", "1", "--again"]) == 0
    assert measured[3:] == [("CQL", 1)]
    sets, runs = offline.load(tmp_path / "offline.json")
    assert [each["data"] for each in sets] == ["replay"]
    assert sorted(each.seed for each in runs) == [1, 2, 3]


def test_data_sets_are_made_once_and_after_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def execute(words: list[str]) -> None:
        asked.append(words)
        if words[0] == "train":
            run = Path(words[words.index("--out") + 1]) / "run-0001"
            (run / "checkpoints" / "1").mkdir(parents=True)
            (run / "metrics.jsonl").write_text('{"kind": "progress"}\n')
        elif words[0] == "resume":
            (Path(words[1]) / "metrics.jsonl").write_text('{"kind": "end", "state": "done"}\n')

    monkeypatch.setattr(offline_data, "FOLDER", tmp_path)
    monkeypatch.setattr(offline_data, "execute", execute)
    monkeypatch.setattr(offline_data, "open_dataset", lambda url: url)
    expert = next(each for each in RECIPES if each.name == "expert")
    offline_data.make_dataset(expert)
    assert [words[0] for words in asked] == ["train", "data"]
    assert f"save.dataset={tmp_path}/data/CartPole-v1/replay" in asked[0]
    assert asked[1][2] == str(tmp_path / "runs" / "online" / "run-0001")
    offline_data.make_dataset(expert)  # the run was cut short: it is resumed
    assert [words[0] for words in asked[2:]] == ["resume", "data"]
    offline_data.make_dataset(expert)
    assert [words[0] for words in asked[4:]] == ["data"]
    expert.url.mkdir(parents=True)
    (expert.url / "manifest.json").touch()
    offline_data.make_dataset(expert)
    assert len(asked) == 5


@pytest.mark.parametrize("env", [CARTPOLE, BREAKOUT])
@pytest.mark.parametrize("algorithm", offline.ALGORITHMS)
def test_the_settings_are_a_plan(env: str, algorithm: str) -> None:
    words = [*offline.settings(env, algorithm), "replay.type=dataset", "replay.path=data"]
    preset = words[words.index("--preset") + 1] if "--preset" in words else None
    steps = words[words.index("--steps") + 1]
    pairs = [(*word.split("="), "test") for word in words if "=" in word]
    plan = compose(env, preset, overrides=[*pairs, ("until.steps", steps, "test")]).plan
    assert plan.until.steps == offline.STEPS[env]
    assert plan.until.steps % plan.eval.every_steps == 0, "the last checkpoint is not evaluated"
