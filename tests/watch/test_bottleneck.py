"""Where the time went: the diagnosis from shares, the table, energy counters and profiled functions."""

from pathlib import Path
from typing import Any

import pytest

from qfleet.cli.profile import FunctionProfiler, profile_lines
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.system.timers import STAGES
from qfleet.training.log.energy import EnergyMeter
from qfleet.watch.bottleneck import diagnose, profile_of, shares_of, times_between, with_other
from qfleet.watch.text import time_line

PROCESSES = {"runtime.type": "processes", "actors.num": 2}
BUSY = {"env": 0.7, "infer": 0.2, "sync": 0.1, "wait": 0.0}
LAZY = {"env": 0.1, "infer": 0.1, "sync": 0.0, "wait": 0.8}


def plan(env_id: str = "Acrobot-v1", **settings: Any) -> Plan:
    return make_plan(env_id, overrides={name.replace("__", "."): value for name, value in settings.items()})


def processes(actors: int = 2) -> Plan:
    return make_plan("Acrobot-v1", overrides={**PROCESSES, "actors.num": actors})


def test_the_learner_is_the_bottleneck() -> None:
    found = diagnose({"update": 0.85, "sync": 0.02, "env": 0.1, "infer": 0.03}, plan(), {})
    assert found.bottleneck == "learner"
    assert found.share == pytest.approx(0.87)
    assert found.ceiling == pytest.approx(1 / 0.87)
    assert found.text.startswith(
        "learner-bound: updates take 87% of the time; at most 1.15x as fast if everything else were free; "
        "more actors will not help; "
    )


@pytest.mark.parametrize(
    ("shares", "made", "actors", "cores", "cause", "ceiling", "texts"),
    [
        ({"env": 0.71, "update": 0.2}, plan(), {}, 2, "world", 3.45, ["71%", "env.workers=2 or ", "actors.num=2"]),
        ({"env": 0.71}, plan(env__num=6), {}, 4, "world", 3.45, ["env.workers=4", "processes actors.num=3"]),
        ({"env": 0.71}, plan(env__workers=2), {}, 2, "world", 3.45, [": try runtime.type=processes"]),
        ({"env": 0.9}, plan(env__num=1), {}, 2, "world", 10, ["env.num=2"]),
        ({"env": 0.9}, plan("CartPole-v1"), {}, 2, "world", 10, [": try runtime.type=processes actors.num=2"]),
        ({"env": 0.9}, plan("ALE/Pong-v5"), {}, 2, "world", 10, [": try runtime.type=processes"]),
        ({"infer": 0.6}, plan(), {}, 2, "policy", 2.5, ["choosing actions takes 60%", "env.num=16"]),
        ({"insert": 0.3, "sample": 0.3, "update": 0.4}, plan(), {}, 2, "replay", 2.5, ["60%", "algo.batch_size"]),
        ({"idle": 0.6, "update": 0.4}, processes(), BUSY, 4, "actor", 2.5, ["waited 60%", "up to about 2.5x", "70%"]),
        ({"idle": 0.6, "update": 0.4}, processes(), BUSY, 2, "actor", 2.5, ["2 on 2 cores already"]),
        ({"idle": 0.1, "update": 0.8}, processes(), LAZY, 4, "learner", 1.25, ["will not help", "waited 80%"]),
        ({"compile": 0.7, "insert": 0.1}, plan(), {}, 4, "compile", 3.33, ["70%", "cached for later runs"]),
        ({"save": 0.7, "update": 0.3}, plan(), {}, 2, "save", 3.33, ["saving takes 70%", "save.every_steps="]),
        ({"eval": 0.5, "update": 0.4}, plan(), {}, 2, "eval", 2.0, ["evaluation takes 50%", "eval.test_episodes"]),
        ({"other": 0.9}, plan(), {}, 2, "overhead", 10, ["longer run"]),
    ],
)
def test_bottlenecks(
    shares: dict[str, float],
    made: Plan,
    actors: dict[str, float],
    cores: int,
    cause: str,
    ceiling: float,
    texts: list[str],
) -> None:
    found = diagnose(shares, made, actors, cores)
    assert found.bottleneck == cause
    assert found.ceiling == pytest.approx(ceiling, abs=0.01)
    for text in texts:
        assert text in found.text, found.text


def test_native_environments_and_those_with_workers_get_no_advice_for_workers() -> None:
    for made in (plan("CartPole-v1"), plan("ALE/Pong-v5"), plan(env__workers=2)):
        assert "env.workers" not in diagnose({"env": 0.9}, made, {}).advice


def test_settings_that_are_advised_make_a_plan() -> None:
    for envs, cores in ((6, 4), (8, 2), (9, 8), (2, 16)):
        advice = diagnose({"env": 0.9}, plan(env__num=envs), {}, cores).advice
        for texts in advice.partition("try ")[2].split(" or "):
            settings = dict(text.split("=") for text in texts.split())
            make_plan("Acrobot-v1", overrides={"env.num": envs, **{key: _typed(v) for key, v in settings.items()}})


def _typed(value: str) -> int | str:
    return int(value) if value.isdigit() else value


def test_prioritized_replay_has_a_cheaper_sampler_and_fresh_experience_has_none() -> None:
    shares = {"sample": 0.9}
    prioritized = plan(replay__sampler__type="prioritized")
    assert "replay.sampler.type=uniform" in diagnose(shares, prioritized, {}).advice
    assert "uniform" not in diagnose(shares, plan(), {}).advice
    fresh = make_plan("Acrobot-v1", "pqn-small")
    assert "replay.epochs" in diagnose({"update": 0.9}, fresh, {}).advice
    assert "samples_per_insert" not in diagnose({"update": 0.9}, fresh, {}).advice


# The profile


def times(**seconds: float) -> dict[str, int]:
    return {stage: round(seconds.get(stage, 0.0) * 1e9) for stage in (*STAGES, "wall")}


def made(**more: Any) -> dict[str, Any]:
    spent = times(update=6.0, env=2.0, infer=1.0, wall=10.0)
    return profile_of(spent, {}, plan(), env_steps=1_000, updates=500, cores=2, **more)


def test_a_profile_covers_the_whole_time() -> None:
    profile = made()
    assert profile["seconds"]["other"] == 1.0
    assert sum(profile["shares"].values()) == pytest.approx(1.0)
    assert (profile["shares"]["update"], profile["learner_busy"]) == (0.6, 0.6)
    assert profile["bottleneck"] == "learner"
    assert profile["ceiling"] == pytest.approx(1.667)
    assert "joules" not in profile
    assert "actors" not in profile


def test_the_table_shows_the_cost_of_a_step_and_an_update() -> None:
    lines = profile_lines(made())
    assert lines[0].split() == ["stage", "seconds", "share", "per", "step", "per", "update"]
    table = {line.split()[0]: line.split()[1:] for line in lines[1:13]}
    assert table["update"] == ["6.00", "60.0%", "6.00", "ms", "12.00", "ms"]
    assert table["env"][2:] == ["2.00", "ms", "4.00", "ms"]
    assert table["wall"][:2] == ["10.00", "100.0%"]
    assert "no energy counters" in lines
    assert lines[-1].startswith("learner-bound: updates take 60%")
    assert "-" in profile_lines({**made(), "updates": 0})[1].split()


def test_energy_is_shown_per_million_steps() -> None:
    profile = made(joules=50.0)
    assert profile["joules_per_million_steps"] == 50_000
    assert "energy 50.0 J, 50,000 J per million steps, the whole machine's" in profile_lines(profile)
    assert "50,000 J per million steps" in time_line(profile)


ACTORS = {"env": 6 * 10**9, "infer": 2 * 10**9, "sync": 2 * 10**9, "wait": 10 * 10**9}  # two of them, 10 s each


def beside(num: int = 2, **seconds: float) -> dict[str, Any]:
    return profile_of(times(**seconds, wall=10.0), ACTORS, processes(num), env_steps=1, updates=1, cores=2)


def test_actors_elsewhere_have_shares() -> None:
    profile = beside(update=6.0, idle=3.0)
    assert profile["actor_shares"] == {"env": 0.3, "infer": 0.1, "sync": 0.1, "wait": 0.5}
    assert (profile["actors"], profile["actors_busy"]) == (2, 0.5)
    assert "learner busy 60%, 2 actors 50%" in time_line(profile)


def test_speed_up_is_work_per_wall_time_and_efficiency_is_per_process() -> None:
    # The learner's 6 s of updates, 1 s of saving and 1 s of evaluation, and the actors' 10 s: 18 s of work in 10 s.
    profile = beside(update=6.0, save=1.0, eval=1.0, idle=2.0)
    assert (profile["work_seconds"], profile["speed_up"], profile["processes"]) == (18.0, 1.8, 3)
    assert profile["parallel_efficiency"] == 0.6
    output = "speed-up 1.80x: 18.00 s of sequential work in 10.00 s; parallel efficiency 60%, with 3 processes"
    assert output in profile_lines(profile)
    assert "2 actors 50% · speed-up 1.80x, parallel efficiency 60% · " in time_line(profile)


def test_waiting_and_other_time_are_not_work() -> None:
    assert beside(update=2.0, idle=8.0)["speed_up"] == beside(update=2.0, idle=1.0)["speed_up"] == 1.2
    assert beside(num=4, update=2.0)["parallel_efficiency"] == pytest.approx(1.2 / 5)


def test_one_process_has_no_speed_up() -> None:
    assert "speed_up" not in made()
    assert "speed-up" not in time_line(made()) + " ".join(profile_lines(made()))


def test_a_profile_of_an_earlier_version_is_still_shown() -> None:
    older = {name: value for name, value in beside(update=6.0).items() if name != "speed_up"}
    assert "2 actors 50% · learner-bound" in time_line(older)


def test_the_time_line_omits_small_stages() -> None:
    spent = times(update=6.0, save=0.05, env=3.0, wall=10.0)
    line = time_line(profile_of(spent, {}, plan(), env_steps=1, updates=1, cores=2))
    assert line.startswith("update 6.0 s, env 3.0 s, other 0.9 s · learner busy 60% · learner-bound: ")


def test_shares_between_two_readings() -> None:
    before, now = times(env=1.0, wall=2.0), times(env=2.0, update=2.0, wall=6.0)
    shares = shares_of(with_other(times_between(now, before)))
    assert (shares["env"], shares["update"], shares["other"]) == (0.25, 0.5, 0.25)
    assert set(shares_of(times()).values()) == {0.0}  # no time at all


# Energy counters


def zone(folder: Path, name: str, says: str, energy: int, range_uj: int = 1_000_000) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "name").write_text(f"{says}\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return path


def test_whole_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    packages = [zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", 100) for number in (0, 1)]
    others = [zone(tmp_path, "intel-rapl:0:0", "core", 0), zone(tmp_path, "intel-rapl:2", "psys", 0)]
    others.append(zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0))
    meter = EnergyMeter(tmp_path)
    for path in (*packages, *others):
        (path / "energy_uj").write_text("500100")
    assert meter.joules() == pytest.approx(1.0)
    assert meter.joules() == pytest.approx(1.0)


def test_a_counter_wraps_around(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    meter = EnergyMeter(tmp_path)
    for energy in (100_000, 600_000, 50_000):  # 200,000 and 500,000 and 450,000 microjoules later
        (path / "energy_uj").write_text(str(energy))
        found = meter.joules()
    assert found == pytest.approx(1.15)


def test_missing_or_unreadable_energy_counters(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path / "nothing").joules() is None
    path = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    (path / "energy_uj").unlink()
    assert EnergyMeter(tmp_path).joules() is None


def test_a_counter_that_disappears_keeps_its_count(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = EnergyMeter(tmp_path)
    (path / "energy_uj").write_text("250000")
    assert meter.joules() == 0.25
    (path / "energy_uj").unlink()
    assert meter.joules() == 0.25


# Functions


def busy_function() -> int:
    return sum(index * index for index in range(20_000))


def row(updates: int, kind: str = "progress") -> dict[str, Any]:
    return {"kind": kind, "updates": updates}


def test_functions_are_profiled_after_learning_began() -> None:
    trace, running = FunctionProfiler(window=100), list[bool]()
    for updates in (0, 20, 90, 150, 500):  # one window is enough
        trace(row(updates))
        running.append(trace.running)
        busy_function()
    assert running == [False, True, True, False, False]
    text = trace.text()
    assert "in updates 20 to 150" in text
    assert "busy_function" in text


def test_a_run_that_ends_early_ends_the_window() -> None:
    trace = FunctionProfiler(window=100)
    trace(row(20))
    busy_function()
    trace(row(30, "end"))
    assert not trace.running
    assert "in updates 20 to 30" in trace.text()


def test_too_few_updates_are_reported() -> None:
    assert "too few updates" in FunctionProfiler().text()
    trace = FunctionProfiler()
    trace(row(20))
    trace.close()
    assert "too few updates" in trace.text()
