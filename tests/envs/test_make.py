"""Resolving environment ids, and checking environments."""

import re
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from qfleet.envs import TRAIN, absolute_id, check_env, make_world, module_file
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.errors import EnvError, UsageError
from qfleet.install import install_command
from qfleet.plan import make_plan
from qfleet.plan.schema import Env
from qfleet.testing import toys

OWN = """
import gymnasium as gym
import numpy as np

class Walk(gym.Env):
    def __init__(self, size=3, render_mode=None):
        self.observation_space = gym.spaces.Box(0, 1, (size,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(self.observation_space.shape, np.float32), {}

    def step(self, action):
        return np.zeros(self.observation_space.shape, np.float32), 1.0, True, False, {}

def walk():
    return Walk(5)

number = 3
"""


def world(name: str, **settings: Any) -> Any:
    return make_world(Env(id=name, num=2, **settings), seed=0, stream=TRAIN)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_env.py"
    path.write_text(OWN)
    return path


def test_an_id_names_a_class_or_function_in_a_file(own: Path) -> None:
    assert world(f"{own}:Walk").reset().obs.shape == (2, 3)
    assert world(f"{own}:Walk", options={"size": 4}).reset().obs.shape == (2, 4)
    assert world(f"{own}:walk").reset().obs.shape == (2, 5)


@pytest.fixture
def import_path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Restore sys.path after the test."""
    kept = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]
    monkeypatch.setattr(sys, "path", kept)
    return kept


def test_a_file_can_import_its_neighbours_eagerly_and_lazily(tmp_path: Path, import_path: list[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "walk_sizes.py").write_text("SIZE = 7\n")
    (folder / "walk_sizes_later.py").write_text("SIZE = 8\n")
    (folder / "walk_env.py").write_text(
        OWN.replace("class Walk", "import walk_sizes\n\nclass Walk")
        + "\ndef now():\n    return Walk(walk_sizes.SIZE)\n"
        + "\ndef later():\n    import walk_sizes_later\n    return Walk(walk_sizes_later.SIZE)\n"
    )
    first = import_path[0]
    assert world(f"{folder / 'walk_env.py'}:now").reset().obs.shape == (2, 7)
    assert world(f"{folder / 'walk_env.py'}:later").reset().obs.shape == (2, 8)
    assert import_path[0] == first  # its neighbours do not take the place of installed packages for ever
    assert import_path.count(str(folder)) == 1


def test_a_neighbour_takes_precedence_over_installed_modules_during_loading(
    tmp_path: Path, import_path: list[str]
) -> None:
    for name, size in (("elsewhere", 3), ("here", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "walk_width.py").write_text(f"SIZE = {size}\n")
    import_path.insert(0, str(tmp_path / "elsewhere"))
    (tmp_path / "here" / "wide.py").write_text("import walk_width\n" + OWN.replace("size=3", "size=walk_width.SIZE"))
    assert world(f"{tmp_path / 'here' / 'wide.py'}:Walk").reset().obs.shape == (2, 9)


def test_a_module_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, import_path: list[str]
) -> None:
    (tmp_path / "walks_here.py").write_text(OWN + "\ngym.register('WalkHere-v0', entry_point='walks_later:Walk')\n")
    (tmp_path / "walks_later.py").write_text(OWN.replace("size=3", "size=6"))
    with pytest.raises(UsageError, match="could not be imported"):
        world("walks_here:WalkHere-v0")
    monkeypatch.chdir(tmp_path)
    assert world("walks_here:WalkHere-v0").reset().obs.shape == (2, 6)
    assert import_path[-1] == str(tmp_path)


def test_an_absolute_id_means_the_same_in_every_folder(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    assert absolute_id("own_env.py:Walk") == f"{own.resolve()}:Walk"
    assert absolute_id("../x/own_env.py:Walk") == f"{own.parent.parent.resolve()}/x/own_env.py:Walk"
    assert absolute_id(f"{own.resolve()}:Walk") == f"{own.resolve()}:Walk"
    for same in ("CartPole-v1", "ALE/Pong-v5", "a.module:Thing-v0", "strange.py"):
        assert absolute_id(same) == same


def test_a_constructor_without_render_mode_is_refused_for_recording(tmp_path: Path) -> None:
    path = tmp_path / "blind.py"
    path.write_text(OWN.replace(", render_mode=None", ""))
    with pytest.raises(UsageError) as caught:
        make_world(Env(id=f"{path}:Walk", options={"size": 4}), seed=0, stream=TRAIN, render_mode="rgb_array")
    assert "takes no render_mode" in caught.value.what
    assert "render_mode=None" in caught.value.fix


def test_an_id_can_name_the_module_that_registers_it() -> None:
    made = world("qfleet.testing.toys:toys/Masked-v0")
    assert isinstance(made, SyncVectorEnv)
    assert made.spec.masked


def test_the_users_own_function_is_used_instead_of_the_id() -> None:
    made = make_world(Env(id="CartPole-v1", num=3), seed=0, stream=TRAIN, make=toys.DictObs)
    assert made.reset().obs.shape == (3, 4)
    with pytest.raises(UsageError, match=r"env\.options"):
        make_world(Env(id="mine", options={"a": 1}), seed=0, stream=TRAIN, make=toys.DictObs)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("given", "kind", "fix"),
    [
        (lambda: gym.make("CartPole-v1"), "an environment (TimeLimit)", "env=lambda: gym.make('CartPole-v1')"),
        (lambda: gym.make_vec("CartPole-v1", 2), "a vector environment", "env=lambda: gym.make('CartPole-v1')"),
        (toys.Constant, "an environment (Constant)", "env=lambda: Constant(...)"),
        (lambda: "CartPole-v1", "an object (str)", "env=lambda: gym.make('CartPole-v1')"),
    ],
    ids=["made", "vector", "class", "id"],
)
def test_an_environment_instead_of_its_maker_is_refused(given: Any, kind: str, fix: str, workers: int) -> None:
    with pytest.raises(UsageError) as caught:
        make_world(Env(id="mine", num=1, workers=workers), seed=0, stream=TRAIN, make=given())
    assert kind in caught.value.what
    assert fix in caught.value.fix


def test_a_function_that_makes_a_vector_environment_is_refused() -> None:
    with pytest.raises(UsageError, match="3 environments as one") as caught:
        make_world(Env(id="mine"), seed=0, stream=TRAIN, make=lambda: gym.make_vec("CartPole-v1", 3))  # type: ignore[arg-type, return-value]
    assert "env.num=3" in caught.value.fix


def test_num_overrides_the_plans() -> None:
    assert make_world(Env(id="Acrobot-v1", num=5), seed=0, stream=TRAIN, num=1).num == 1
    assert make_world(Env(id="Acrobot-v1", num=5), seed=0, stream=TRAIN).num == 5


def test_box_actions_reach_the_environment() -> None:
    env = toys.BoxAction()
    made = make_world(Env(id="box", num=1, bins=3), seed=0, stream=TRAIN, make=lambda: env)
    assert made.spec.actions == (3, 3)
    made.reset()
    made.send(np.array([5]))
    made.receive()
    assert env.last.tolist() == [0.0, 4.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("CartPol-v1", ["env.id='CartPol-v1'", "CartPole-v1"]),
        ("CartPole", ["CartPole-v1"]),
        ("LunarLander-v2", ["LunarLander-v3", install_command("box2d")]),
        ("MinAtar/Pong-v1", ["MinAtar/Pong-v1", "MinAtar/"]),
        ("Pong", ["ALE/Pong-v5"]),
        ("zzzz-v0", ["zzzz-v0", "file.py:ClassName"]),
        ("no_such_module:Thing-v0", ["'no_such_module'", "could not be imported"]),
        ("no/such/file.py:Thing", ["no/such/file.py", "there is no file"]),
    ],
)
def test_the_error_for_an_unknown_id_suggests_the_nearest(name: str, expected: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        world(name)
    assert all(text in str(caught.value) for text in expected), str(caught.value)
    assert caught.value.why
    assert caught.value.fix


def test_an_atari_id_without_preprocessing_is_refused() -> None:
    pytest.importorskip("ale_py")
    world("ALE/Pong-v5").close()  # which makes the other ids known too
    with pytest.raises(UsageError, match="ALE/X-v5"):
        world("Pong-v4")


def test_a_file_without_the_class_lists_what_it_has(own: Path) -> None:
    for missing in ("Wolk", "number"):
        with pytest.raises(UsageError, match=r"(?s)no class or function.*Walk"):
            world(f"{own}:{missing}")


def test_a_file_that_fails_keeps_its_own_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(EnvError, match="ZeroDivisionError") as caught:
        world(f"{path}:Thing")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_module_that_fails_keeps_its_own_error(
    tmp_path: Path, import_path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvError, match="importing broken_module raised ZeroDivisionError"):
        world("broken_module:Thing-v0")
    with pytest.raises(UsageError, match="could not be imported"):
        world(".broken_module:Thing-v0")
    assert import_path[-1] == str(tmp_path)


def test_the_file_of_a_module_is_found_without_running_it(
    tmp_path: Path, import_path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here.py", "package/__init__.py", "package/inner.py", "plain/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1 / 0\n")
    assert module_file("here:Thing-v0") is None
    monkeypatch.chdir(tmp_path)
    before = list(import_path)
    assert module_file("here:Thing-v0") == str(tmp_path / "here.py")
    assert module_file("package:Thing-v0") == str(tmp_path / "package/__init__.py")
    assert module_file("package.inner:Thing-v0") == str(tmp_path / "package/inner.py")
    assert module_file("plain.inner:Thing-v0") == str(tmp_path / "plain/inner.py")
    for other in ("CartPole-v1", "here.py:Thing", "package.gone:Thing-v0", "sys:Thing-v0", ":Thing-v0", ".:Thing-v0"):
        assert module_file(other) is None
    assert module_file(f"{__name__}:Thing-v0") == __file__  # what is loaded is what an import gives
    assert import_path == before


def test_a_path_may_hold_spaces(tmp_path: Path) -> None:
    (tmp_path / "my own").mkdir()
    (tmp_path / "my own" / "a walk.py").write_text(OWN)
    plan = make_plan(f"{tmp_path}/my own/a walk.py:Walk", overrides={"env.num": 2})
    assert make_world(plan.env, seed=0, stream=TRAIN).reset().obs.shape == (2, 3)
    for wrong in (
        "Cart Pole-v1",
        "my own:Walk-v0",
        "walk.py:My Walk",
        "my own/walk.py:",
        "walk.py: Walk",
        "a\nb.py:Walk",
    ):
        with pytest.raises(UsageError, match="is not an environment id"):
            make_plan(wrong)


@pytest.mark.parametrize("value", ["abc", 0, -1, 2.5, True, 10**30])
def test_an_invalid_episode_length_is_refused_in_cartpole(value: Any) -> None:
    for mode in (None, "rgb_array"):
        env = Env(id="CartPole-v1", options={"max_episode_steps": value})
        with pytest.raises(UsageError, match=r"env\.options\.max_episode_steps=.* is not valid"):
            make_world(env, seed=0, stream=TRAIN, render_mode=mode)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("CartPole-v1", "sutton_barto_reward", "abc"),
        ("CartPole-v1", "sutton_barto_reward", 1),
        ("CartPole-v1", "gravity", 3.0),
        ("Acrobot-v1", "max_episode_steps", "abc"),
        ("Acrobot-v1", "max_episode_steps", 0),
        ("Acrobot-v1", "disable_env_checker", True),
        ("MinAtar/Breakout-v1", "sticky_action_prob", "abc"),
        ("MinAtar/Breakout-v1", "sticky_action_prob", 2),
        ("MinAtar/Breakout-v1", "difficulty_ramping", "abc"),
        ("MinAtar/Breakout-v1", "minimal", True),
        ("MinAtar/Breakout-v1", "frob", 1),
    ],
)
def test_invalid_options_raise_usage_errors(name: str, option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"env\.options.*{option}") as caught:
        world(name, options={option: value})
    assert caught.value.why
    assert caught.value.fix


def test_valid_options_are_used() -> None:
    world("CartPole-v0", options={"max_episode_steps": 9, "sutton_barto_reward": True}).close()
    world("CartPole-v1", options={"max_episode_steps": 9.0}).close()
    world("MinAtar/Breakout-v1", options={"sticky_action_prob": 0, "difficulty_ramping": False}).close()


def test_a_constructor_that_fails_or_refuses_its_options(own: Path) -> None:
    with pytest.raises(UsageError, match=r"env\.options=\{'colour': 1\}"):
        world(f"{own}:Walk", options={"colour": 1})

    def broken() -> Any:
        raise OSError("no device")

    with pytest.raises(EnvError, match="no device"):
        make_world(Env(id="mine"), seed=0, stream=TRAIN, make=broken)
    with pytest.raises(UsageError, match="not a Gymnasium environment"):
        make_world(Env(id="mine"), seed=0, stream=TRAIN, make=lambda: 3)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("package", "name", "extra"), [("minatar", "MinAtar/Breakout-v1", "minatar"), ("Box2D", "LunarLander-v3", "box2d")]
)
def test_the_error_for_a_missing_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, package: str, name: str, extra: str
) -> None:
    modules = __import__("sys").modules
    for loaded in [m for m in modules if m.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(modules, loaded)
    monkeypatch.setitem(modules, package, None)
    with pytest.raises(UsageError, match=re.escape(install_command(extra))):
        world(name)


def verdicts(name: str) -> dict[str, bool]:
    return {check.name: check.ok for check in check_env(Env(id=name))}


def test_a_sound_environment_passes_every_check() -> None:
    checks = check_env(Env(id="qfleet.testing.toys:toys/Masked-v0"))
    assert all(check.ok for check in checks)
    details = {check.name: check.detail for check in checks}
    assert details["spaces"] == "observation (2,) float32, 4 actions"
    assert "75%" in details["masks"]
    assert "steps per second" in details["speed"]


def test_an_unsound_environment_fails_the_right_checks() -> None:
    wrong = verdicts("qfleet.testing.toys:toys/Unrepeatable-v0")
    assert [name for name, ok in wrong.items() if not ok] == ["determinism", "re-drive"]
    assert not verdicts("qfleet.testing.toys:toys/NotFinite-v0")["contract"]
    raising = check_env(Env(id="mine"), make=lambda: toys.Raising(0))
    assert [(check.name, check.ok) for check in raising] == [("made", False)]
    assert "the toy broke" in raising[0].detail


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, import_path: list[str]) -> str:
    """An importable module with `Walk`, a class that needs an argument, and nothing registered."""
    needy = "\nclass Needy(Walk):\n    def __init__(self, net_file, route_file):\n        super().__init__()\n"
    (tmp_path / "other_package_of_tests.py").write_text(OWN + needy)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_package_of_tests", raising=False)
    return "other_package_of_tests"


def test_an_id_names_a_class_or_function_in_a_module(other_package: str) -> None:
    assert world(f"{other_package}:Walk", options={"size": 4}).reset().obs.shape == (2, 4)
    assert world(f"{other_package}:walk").reset().obs.shape == (2, 5)
    with pytest.raises(UsageError, match="not a known environment"):
        world(f"{other_package}:number")  # not callable


def test_options_that_a_constructor_needs_are_named(other_package: str) -> None:
    with pytest.raises(UsageError, match="needs options that were not given: net_file, route_file") as caught:
        world(f"{other_package}:Needy")
    assert "env.options.net_file=... env.options.route_file=..." in str(caught.value.fix)
    assert world(f"{other_package}:Needy", options={"net_file": "a", "route_file": "b"}).reset().obs.shape == (2, 3)


@pytest.mark.parametrize("line", ["raise ImportError('Please declare SUMO_HOME')", "import no_such_package_at_all"])
def test_a_module_that_is_there_is_not_called_missing(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, import_path: list[str]
) -> None:
    (tmp_path / "asks_for_more_of_tests.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="could not be imported") as caught:
        world("asks_for_more_of_tests:X-v0")
    assert "do what the error asks for" in str(caught.value.fix)


def test_a_module_that_is_not_there_is_to_be_installed() -> None:
    for name in ("no_such_package_at_all", "no_such_package_at_all.part"):
        with pytest.raises(UsageError, match="could not be imported") as caught:
            world(f"{name}:X-v0")
        assert "Install the package" in str(caught.value.fix)
