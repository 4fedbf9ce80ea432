"""Environments of other packages in a fresh venv: `env check`, 2,000 steps of training, `Policy.load`, `predict`."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.worlds.fresh_venv import FreshVenv, NoPackageIndex, make_venv, shown
from tests.worlds.tested_worlds import ROOT, WORLDS, TestedWorld

PLAY = Path(__file__).with_name("play.py")
STEPS = 2_000
PLAYED_STEPS = 60
TINY = ("algo.learn_start_steps=500", "algo.batch_size=16", "eval.episodes=2", "eval.test_episodes=2")
SECONDS = 400  # for one command: a few worlds make 20 steps in a second

pytestmark = [pytest.mark.slow, pytest.mark.worlds, pytest.mark.timeout(900)]  # it may have to make the venv first


@pytest.fixture(scope="session")
def venv(request: pytest.FixtureRequest) -> FreshVenv:
    """Made once for all test processes of a session; kept in pytest's cache for the next one."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process {os.getpid()}")
    try:
        return make_venv(request.config.cache.mkdir("worlds"), session)
    except NoPackageIndex as error:
        pytest.skip(f"no package index can be reached: {error}")


def settings_of(world: TestedWorld, venv: FreshVenv) -> list[str]:
    return [setting.format(site=venv.site) for setting in world.env]


def options_of(settings: list[str]) -> dict[str, object]:
    """The options as keyword arguments: numbers and flags are JSON, everything else is text."""
    options = dict[str, object]()
    for setting in settings:
        name, _, text = setting.removeprefix("env.options.").partition("=")
        options[name] = json.loads(text) if re.fullmatch(r"-?\d+|true|false", text) else text
    return options


def id_of(world: TestedWorld) -> str:
    """The id; a file of this checkout with its whole path, because commands run elsewhere."""
    return str(ROOT / world.id) if world.id.startswith("examples/") else world.id


def require_packages(world: TestedWorld, venv: FreshVenv) -> None:
    for package in world.packages:
        if package in venv.missing:
            pytest.skip(f"{package} does not install here: {venv.missing[package]}")


def check(world: TestedWorld, venv: FreshVenv, folder: Path) -> None:
    command = ["qfleet", "env", "check", id_of(world), *settings_of(world, venv), "--json"]
    done = venv.run(*command, cwd=folder, seconds=SECONDS)
    failed = [each["check"] for each in json.loads(done.stdout) if not each["ok"]]
    expected = (0, []) if world.exact else (4, ["determinism"])
    assert (done.returncode, failed) == expected, shown(done, command)


def train(world: TestedWorld, venv: FreshVenv, folder: Path) -> Path:
    settings = [*settings_of(world, venv), *TINY, *world.train]
    command = ["qfleet", "train", id_of(world), "--steps", str(STEPS), "--name", "run", *settings]
    done = venv.run(*command, cwd=folder, seconds=SECONDS)
    assert done.returncode == 0, shown(done, command)
    status = json.loads((folder / "runs/run/status.json").read_text())
    assert status["state"] == "done", status
    assert status["env_steps"] >= STEPS, status
    assert status["updates"] > 0, status
    return folder / "runs/run"


def play(world: TestedWorld, venv: FreshVenv, folder: Path, run: Path) -> None:
    options = json.dumps(options_of(settings_of(world, venv)))
    command = ["python", str(PLAY), str(run), id_of(world), options, str(PLAYED_STEPS)]
    done = venv.run(*command, cwd=folder, seconds=SECONDS)
    assert done.returncode == 0, shown(done, command)
    played = json.loads(done.stdout.splitlines()[-1])
    assert played["steps"] == PLAYED_STEPS
    assert Path(played["qfleet"]).is_relative_to(venv.site)  # the installed copy, not this checkout


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_world_is_checked_trained_on_and_played(world: TestedWorld, venv: FreshVenv, tmp_path: Path) -> None:
    require_packages(world, venv)
    check(world, venv, tmp_path)
    run = train(world, venv, tmp_path)
    play(world, venv, tmp_path, run)
