"""The native Atari world equals gymnasium's wrappers, and is restored exactly."""

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from qfleet.envs import TEST, TRAIN, make_world
from qfleet.envs.atari import OPTIONS, Atari
from qfleet.envs.episodes import episode_seed
from qfleet.errors import UsageError
from qfleet.install import install_command
from qfleet.plan.schema import Env
from tests.envs.steps import assert_same, drive

pytest.importorskip("ale_py")
pytestmark = pytest.mark.atari

SHORT: dict[str, Any] = {
    "max_num_frames_per_episode": 200
}  # truncated after 50 steps, so that a test sees many episodes


def reference(game: str, sticky: float, seed: int, limit: int) -> Any:
    gym.register_envs(__import__("ale_py"))
    single = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=sticky, max_num_frames_per_episode=limit)
    # gymnasium derives ALE's seed from its own; the native environment passes its seed on unchanged.
    inner: Any = single.unwrapped
    inner.ale.setInt("random_seed", seed)
    inner.load_game()
    wrapped = gym.wrappers.AtariPreprocessing(single, noop_max=0)
    return gym.wrappers.FrameStackObservation(wrapped, 4, padding_type="zero")


@pytest.mark.parametrize(("game", "sticky", "limit"), [("Breakout", 0.25, 108_000), ("Pong", 0.0, 400)])
def test_frames_rewards_and_ends_equal_those_of_gymnasiums_wrappers(game: str, sticky: float, limit: int) -> None:
    pytest.importorskip("cv2")
    options: dict[str, Any] = {"noop_max": 0, "max_num_frames_per_episode": limit}
    world = Atari(game.lower(), 1, seed=3, stream=TRAIN, sticky=sticky, options=options)
    env = reference(game, sticky, episode_seed(3, TRAIN, 0, 0), limit)
    np.testing.assert_array_equal(world.reset().obs[0], env.reset()[0])
    rng = np.random.default_rng(0)
    for _ in range(400):
        action = int(rng.integers(world.spec.num_actions))
        world.send(np.array([action]))
        step, (obs, reward, terminated, truncated, _) = world.receive(), env.step(action)
        np.testing.assert_array_equal(step.obs[0], obs)
        assert (step.reward[0], step.terminated[0], step.truncated[0]) == (reward, terminated, truncated)
        if terminated or truncated:
            break
    assert truncated if limit == 400 else terminated
    world.close()


def test_reset_pads_with_zeros_and_shows_the_newest_frame_last() -> None:
    world = Atari("breakout", 2, seed=0, stream=TRAIN, sticky=0.25, options=SHORT)
    step = world.reset()
    assert step.obs.shape == (2, 4, 84, 84)
    assert step.obs.dtype == np.uint8
    assert not step.obs[:, :3].any()
    assert step.obs[:, 3].any()
    seen = drive(world, np.zeros((52, 2), np.int64))
    np.testing.assert_array_equal(seen[0].obs[:, 2], step.obs[:, 3])
    end = next(t for t, s in enumerate(seen) if s.truncated[0])
    assert not seen[end + 1].obs[0, :3].any()
    assert seen[end + 1].reward[0] == 0
    assert not seen[end + 1].truncated[0]
    world.close()


def test_received_steps_are_not_overwritten_by_later_ones() -> None:
    world = Atari("pong", 2, seed=0, stream=TRAIN, sticky=0.0)
    kept = [world.reset(), *drive(world, np.full((8, 2), 2))]
    copies = [step.obs.copy() for step in kept]
    drive(world, np.full((8, 2), 3))
    assert all(np.array_equal(step.obs, copy) for step, copy in zip(kept, copies, strict=True))
    world.close()


@pytest.mark.parametrize(
    ("sticky", "reseed_steps"), [pytest.param(0.0, 0, marks=pytest.mark.slow), (0.25, 0), (0.25, 120)]
)
def test_a_saved_state_is_restored_and_continues_identically(sticky: float, reseed_steps: int) -> None:
    rng = np.random.default_rng(1)
    script = rng.integers(0, 4, (220, 3))

    def fresh() -> Atari:
        world = Atari("breakout", 3, seed=7, stream=TRAIN, sticky=sticky, reseed_steps=reseed_steps, options=SHORT)
        world.reset()
        return world

    world = fresh()
    drive(world, script[:20])
    world.abandon(np.array([True, False, False]))  # so that lanes have records of different lengths
    saved = []
    reached = []
    for action in script[20:180]:
        world.send(action)
        reached.append(world.receive())
        saved.append(world.state_dict())
    rest = drive(world, script[180:])
    world.close()
    ended = [t for t, state in enumerate(saved) if state["ended"].any()]
    moments = {ended[0], ended[0] + 1, 75, len(saved) - 1}  # an end, a reset, a second episode, the last
    other = fresh()
    drive(other, script[::-1][:30])  # a history that must leave no trace
    for moment in sorted(moments):
        assert_same(other.load_state_dict(saved[moment]), reached[moment])
    for a, b in zip(rest, drive(other, script[180:]), strict=True):
        assert_same(a, b)
    other.close()


def test_every_episode_has_a_seed_of_its_own_in_evaluation() -> None:
    env = Env(id="ALE/Breakout-v5", num=2, options=SHORT)
    world: Any = make_world(env, seed=5, stream=TEST)
    world.reset()
    drive(world, np.zeros((130, 2), np.int64))
    state = world.state_dict()
    assert (state["number"] >= 2).all()
    expected = [episode_seed(5, TEST, lane, int(number)) for lane, number in enumerate(state["number"])]
    assert state["seed"].tolist() == expected
    world.close()


@pytest.mark.parametrize("steps", [30, 49, 50])  # in an episode, one step before its end, and at its end
def test_an_abandoned_lane_starts_a_new_episode_and_the_others_continue(steps: int) -> None:
    options = {**SHORT, "noop_max": 0}
    world, plain, new = (
        Atari("pong", 2, seed=0, stream=TRAIN, sticky=0.25, reseed_steps=1_000, options=options) for _ in range(3)
    )
    script = np.random.default_rng(3).integers(0, 6, (steps + 40, 2))
    for each in (world, plain):
        each.reset()
        shown = drive(each, script[:steps])[-1]
    was = shown.truncated.copy()
    world.abandon(np.array([False, True]))
    np.testing.assert_array_equal(shown.truncated, was)
    # A lane whose first episode has the seed of the second shows the expected frames.
    new._episodes.number[:] = 0
    new._episodes.rewind = lambda: None  # type: ignore[method-assign]
    expected = [new.reset(), *drive(new, script[steps + 1 :])]
    got = drive(world, script[steps:])
    others = drive(plain, script[steps:])
    assert not got[0].obs[1, :3].any()
    assert (got[0].reward[1], got[0].terminated[1], got[0].truncated[1]) == (0, False, False)
    for mine, other, fresh in zip(got, others, expected, strict=True):
        np.testing.assert_array_equal(mine.obs[0], other.obs[0])
        np.testing.assert_array_equal(mine.obs[1], fresh.obs[1])
        assert (mine.reward[1], mine.truncated[1]) == (fresh.reward[1], fresh.truncated[1])
    assert world.state_dict()["number"].tolist() == [0, 1]
    for each in (world, plain, new):
        each.close()


@pytest.mark.parametrize("steps", [20, 50])  # in an episode, and at its end
def test_abandoned_lanes_are_saved_and_restored(steps: int) -> None:
    world, other = (
        Atari("breakout", 2, seed=7, stream=TRAIN, sticky=0.25, reseed_steps=1_000, options=SHORT) for _ in range(2)
    )
    script = np.random.default_rng(1).integers(0, 4, (steps + 30, 2))
    world.reset()
    reached = drive(world, script[:steps])[-1]
    world.abandon(np.array([True, False]))
    again = other.load_state_dict(world.state_dict())
    np.testing.assert_array_equal(again.obs, reached.obs)
    assert (again.terminated | again.truncated)[0]
    rest = drive(world, script[steps:])
    assert world.state_dict()["number"].tolist() == [1, 0]
    for a, b in zip(rest, drive(other, script[steps:]), strict=True):
        assert_same(a, b)
    world.close()
    other.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("actions", np.array([0, 0, 0, 6, 0, 0])),
        ("actions", np.array([0, 0, 0, -1, 0, 0])),
        ("length", np.array([3, 2])),
        ("length", np.array([7, -1])),
        ("number", np.array([-1, 0])),
        ("seed", np.array([-5, 0])),
        ("abandoned", np.array([1, 0])),
        ("abandoned", np.zeros(3, bool)),
    ],
)
def test_damaged_recorded_actions_never_reach_the_emulator(
    field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Atari("pong", 2, seed=0, stream=TRAIN, sticky=0.0)
    world.reset()
    drive(world, np.zeros((3, 2), np.int64))
    state = {**world.state_dict(), field: value}
    for call in ("send", "recv", "reset"):
        monkeypatch.setattr(world._env, call, lambda *given, **more: pytest.fail("the emulator was called"))
    with pytest.raises(ValueError, match=field):
        world.load_state_dict(state)
    monkeypatch.undo()
    world.close()


def test_stickiness_follows_the_id_unless_the_plan_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("ale_py.vector_env.AtariVectorEnv.__init__", _recorder(made))
    for env in (
        Env(id="ALE/MsPacman-v5"),
        Env(id="MsPacmanNoFrameskip-v4"),
        Env(id="ALE/MsPacman-v5", sticky=0.1, frame_size=42),
    ):
        with pytest.raises(_Stop):
            make_world(env, seed=0, stream=TRAIN, threads=2)
    assert [call["repeat_action_probability"] for call in made] == [0.25, 0.0, 0.1]
    assert [call["img_height"] for call in made] == [84, 84, 42]
    assert all(call["game"] == "ms_pacman" and not call["reward_clipping"] for call in made)
    assert all(call["noop_max"] == 30 and not call["episodic_life"] and call["num_threads"] == 2 for call in made)


class _Stop(Exception):
    pass


def _recorder(made: list[dict[str, Any]]) -> Any:
    def record(self: Any, game: str, num: int, **settings: Any) -> None:
        made.append({"game": game, **settings})
        raise _Stop

    return record


def test_frame_size_is_the_side_of_the_frame() -> None:
    world = make_world(Env(id="ALE/Pong-v5", num=1, frame_size=42), seed=0, stream=TRAIN)
    assert world.spec.input_shape == (4, 42, 42)
    assert world.reset().obs.shape == (1, 4, 42, 42)
    world.close()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (Env(id="ALE/Pang-v5"), ["ALE/Pang-v5", "ALE/Pong-v5"]),
        (Env(id="ALE/Pong-v5", bins=3), ["env.bins=3", "no effect"]),
        (Env(id="ALE/Pong-v5", options={"stack_num": 2}), ["env.options.stack_num=2", *OPTIONS]),
        (Env(id="ALE/Pong-v5", options={"mode": 2}), ["env.options.mode=2"]),
        (Env(id="ALE/Pong-v5", options={"noop_max": "abc"}), ["env.options.noop_max=abc", "an integer from 0"]),
        (Env(id="ALE/Pong-v5", options={"noop_max": -1}), ["env.options.noop_max=-1"]),
        (Env(id="ALE/Pong-v5", options={"frameskip": 0}), ["env.options.frameskip=0", "an integer from 1"]),
        (Env(id="ALE/Pong-v5", options={"frameskip": 2.5}), ["env.options.frameskip=2.5"]),
        (Env(id="ALE/Pong-v5", options={"episodic_life": "abc"}), ["env.options.episodic_life=abc", "true or false"]),
        (Env(id="ALE/Pong-v5", options={"maxpool": 1}), ["env.options.maxpool=1"]),
        (
            Env(id="ALE/Pong-v5", options={"max_num_frames_per_episode": 0}),
            ["env.options.max_num_frames_per_episode=0"],
        ),
        (Env(id="ALE/Pong-v5", options={"max_num_frames_per_episode": 10**12}), ["was refused by the Atari emulator"]),
    ],
)
def test_invalid_settings_are_refused_with_their_names(env: Env, expected: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        make_world(env, seed=0, stream=TRAIN)
    assert all(text in str(caught.value) for text in expected), str(caught.value)
    assert caught.value.fix


def test_the_error_for_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ale_py", None)
    with pytest.raises(UsageError, match=re.escape(install_command("atari"))):
        make_world(Env(id="ALE/Pong-v5"), seed=0, stream=TRAIN)
