"""The native vector CartPole equals gymnasium's, and its state is restored exactly."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from qfleet.data import Step
from qfleet.envs import TEST, TRAIN, VALIDATION, make_world
from qfleet.envs.cartpole import CartPole
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.errors import UsageError
from qfleet.plan.schema import Env
from tests.envs.steps import assert_same, drive


def test_steps_equal_those_of_single_environments() -> None:
    world = CartPole(1, seed=0, stream=TRAIN)
    first = world.reset()
    single: Any = gym.make("CartPole-v1").unwrapped
    single.reset(seed=0)
    single.state = world._env.state[:, 0].copy()
    assert first.obs.dtype == np.float32
    for _ in range(200):
        world.send(np.array([1]))
        step, (obs, reward, terminated, _, _) = world.receive(), single.step(1)
        np.testing.assert_allclose(step.obs[0], obs, rtol=1e-6)
        assert (step.reward[0], step.terminated[0]) == (reward, terminated)
        if terminated:
            break
    assert terminated
    after = drive(world, np.array([[1]]))[0]
    assert after.reward[0] == 0
    assert not after.terminated[0]
    assert np.abs(after.obs).max() <= 0.05


def balance(world: CartPole, steps: int) -> list[Step]:
    """Drive the world with a simple controller that never falls."""
    step = world.reset()
    seen = []
    for _ in range(steps):
        world.send((step.obs @ np.array([0.1, 0.5, 3.0, 1.0]) > 0).astype(np.int64))
        step = world.receive()
        seen.append(step)
    return seen


@pytest.mark.parametrize(("name", "limit"), [("CartPole-v0", 200), ("CartPole-v1", 500)])
def test_the_time_limit_truncates(name: str, limit: int) -> None:
    world: Any = make_world(Env(id=name, num=2), seed=0, stream=TRAIN)
    assert isinstance(world, CartPole)
    seen = balance(world, limit)
    assert seen[-1].truncated.all()
    assert not any(s.terminated.any() for s in seen)
    assert not any(s.truncated.any() for s in seen[:-1])


def test_a_saved_cartpole_state_is_restored_and_continues_identically() -> None:
    script = np.random.default_rng(0).integers(0, 2, (300, 4))
    world = CartPole(4, seed=3, stream=TRAIN)
    world.reset()
    reached = drive(world, script[:200])
    moment = next(t for t in range(150, 200) if (reached[t].terminated | reached[t].truncated).any())
    world.reset()
    last = drive(world, script[: moment + 1])[-1]
    state = world.state_dict()
    rest = drive(world, script[moment + 1 :])
    other = CartPole(4, seed=99, stream=TRAIN)
    assert_same(other.load_state_dict(state), last)
    for key, value in other.state_dict().items():
        np.testing.assert_array_equal(value, state[key], err_msg=key)
    for a, b in zip(rest, drive(other, script[moment + 1 :]), strict=True):
        assert_same(a, b)


def test_a_saved_state_is_a_copy_of_plain_arrays_and_small_integers() -> None:
    world = CartPole(2, seed=0, stream=TRAIN)
    world.reset()
    state = world.state_dict()
    before = {key: np.array(value) for key, value in state.items()}
    drive(world, np.ones((40, 2), np.int64))
    for key, value in state.items():
        np.testing.assert_array_equal(value, before[key])
        assert isinstance(value, np.ndarray) or 0 <= value < 2**63


def test_reset_starts_over_and_streams_differ() -> None:
    world = CartPole(3, seed=0, stream=TRAIN)
    first = world.reset()
    drive(world, np.ones((40, 3), np.int64))
    assert_same(world.reset(), first)
    others = [CartPole(3, seed=0, stream=stream).reset().obs for stream in (VALIDATION, TEST)]
    assert not any(np.array_equal(obs, first.obs) for obs in others)
    assert not np.array_equal(CartPole(3, seed=1, stream=TRAIN).reset().obs, first.obs)


def test_an_abandoned_lane_starts_a_new_episode_and_the_others_continue() -> None:
    world = CartPole(2, seed=0, stream=TRAIN)
    plain = CartPole(2, seed=0, stream=TRAIN)
    for each in (world, plain):
        each.reset()
        shown = drive(each, np.array([[1, 0], [0, 1], [1, 0]]))[-1]
    world.abandon(np.array([True, False]))
    assert not shown.truncated.any()
    (first, second), others = (drive(each, np.array([[1, 1], [1, 0]])) for each in (world, plain))
    assert (first.reward.tolist(), second.reward.tolist()) == ([0, 1], [1, 1])
    assert not (first.terminated | first.truncated).any()
    assert np.abs(first.obs[0]).max() <= 0.05
    np.testing.assert_array_equal(first.obs[1], others[0].obs[1])
    np.testing.assert_array_equal(second.obs[1], others[1].obs[1])
    assert world.state_dict()["steps"].tolist() == [1, 5]


def test_abandoned_lanes_are_saved_and_restored() -> None:
    world = CartPole(2, seed=0, stream=TRAIN)
    other = CartPole(2, seed=1, stream=TRAIN)
    world.reset()
    reached = drive(world, np.array([[1, 0], [0, 1], [1, 0]]))[-1]
    world.abandon(np.array([True, False]))
    again = other.load_state_dict(world.state_dict())
    np.testing.assert_array_equal(again.obs, reached.obs)
    assert again.truncated.tolist() == [True, False]
    script = np.random.default_rng(0).integers(0, 2, (60, 2))
    rest = drive(world, script)
    assert rest[0].reward.tolist() == [0, 1]
    for a, b in zip(rest, drive(other, script), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", np.array([3, -1], np.int32)),
        ("steps", np.array([3, 501], np.int32)),
        ("steps", np.array([3.0, 3.0])),
        ("state", np.zeros((4, 3))),
        ("state", np.full((4, 2), np.nan)),
        ("reward", np.zeros(3, np.float32)),
        ("terminated", np.zeros(2)),
        ("truncated", np.zeros((2, 1), bool)),
        ("counter", np.zeros(3, np.uint64)),
        ("key", np.zeros(2)),
        ("buffer", np.zeros(5, np.uint64)),
        ("buffer_pos", -1),
        ("buffer_pos", 5),
        ("buffer_pos", 2**70),
        ("buffer_pos", "1"),
        ("buffer_pos", None),
    ],
)
def test_a_damaged_state_is_refused(field: str, value: Any) -> None:
    world = CartPole(2, seed=0, stream=TRAIN)
    world.reset()
    drive(world, np.ones((3, 2), np.int64))
    state = world.state_dict()
    with pytest.raises(ValueError, match=field):
        world.load_state_dict({**state, field: value})
    with pytest.raises(ValueError, match=f"{field} is missing"):
        world.load_state_dict({key: kept for key, kept in state.items() if key != field})


def test_other_options_or_rendering_use_single_environments() -> None:
    assert isinstance(
        make_world(Env(id="CartPole-v1", num=1), seed=0, stream=TEST, render_mode="rgb_array"), SyncVectorEnv
    )
    short: Any = make_world(Env(id="CartPole-v1", options={"max_episode_steps": 7}), seed=0, stream=TRAIN)
    assert isinstance(short, CartPole)
    assert balance(short, 7)[-1].truncated.all()
    with pytest.raises(UsageError, match=r"env\.options"):
        make_world(Env(id="CartPole-v1", options={"gravity": 1.0}), seed=0, stream=TRAIN)


@pytest.mark.parametrize(("key", "value"), [("bins", 3), ("frame_size", 84), ("sticky", 0.1)])
def test_settings_without_effect_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"env\.{key}={value} has no effect on CartPole-v1"):
        make_world(Env(**{"id": "CartPole-v1", key: value}), seed=0, stream=TRAIN)


def test_a_checkpoint_with_another_number_of_lanes_is_refused() -> None:
    world = CartPole(3, seed=0, stream=TRAIN)
    world.reset()
    with pytest.raises(UsageError, match=r"env\.num=2"):
        CartPole(2, seed=0, stream=TRAIN).load_state_dict(world.state_dict())
