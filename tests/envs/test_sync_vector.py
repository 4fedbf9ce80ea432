"""Worlds of single environments: rows, ends of episodes, restored states, faults."""

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from qfleet.envs import TEST, TRAIN, VALIDATION, make_world
from qfleet.envs.episodes import episode_seed
from qfleet.envs.minatar import MinAtar
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.errors import EnvError, UsageError
from qfleet.plan.schema import Env
from qfleet.system.child_process import StopRequested
from qfleet.testing import toys
from tests.envs.steps import assert_same, drive

LENGTHS = (3, 5, 1, 4)


@pytest.fixture(autouse=True)
def _first_copy_is_zero() -> None:
    toys.Counting.made = 0


def lanes(make: Any, num: int = 2, **settings: Any) -> SyncVectorEnv:
    return SyncVectorEnv(make, num, seed=11, stream=TRAIN, name="toy", **settings)


def expected_rows(lane: int) -> Any:
    """The expected rows of a lane of the counting world: (obs, reward, terminated, truncated)."""
    episode = 0
    while True:
        length = LENGTHS[episode % len(LENGTHS)]
        yield (lane, episode, 0), 0.0, False, False
        for step in range(1, length + 1):
            over = step == length
            yield (lane, episode, step), 100.0 * episode + step, over and episode % 2 == 0, over and episode % 2 == 1
        episode += 1


def test_every_row_of_the_counting_world_has_the_expected_values() -> None:
    world = lanes(lambda: toys.Counting(LENGTHS), num=3)
    script = np.random.default_rng(0).integers(0, 3, (60, 3))
    seen = [world.reset(), *drive(world, script)]
    for lane in range(3):
        for step, (obs, reward, terminated, truncated) in zip(seen, expected_rows(lane), strict=False):
            assert tuple(step.obs[lane]) == obs
            assert step.reward[lane] == reward
            assert (step.terminated[lane], step.truncated[lane]) == (terminated, truncated)


def test_the_action_after_an_end_is_ignored_and_all_others_are_taken() -> None:
    made: list[toys.Counting] = []

    def make() -> toys.Counting:
        made.append(toys.Counting((2,)))
        return made[-1]

    world = lanes(make, num=1)
    world.reset()
    drive(world, np.array([[0], [1], [2], [1], [0], [2]]))
    assert made[0].actions == [0, 1, 1, 0]


def test_each_episode_has_its_own_seed_and_no_two_streams_share_one() -> None:
    made: list[toys.Counting] = []

    def make() -> toys.Counting:
        made.append(toys.Counting((1,)))
        return made[-1]

    world = lanes(make)
    world.reset()
    drive(world, np.zeros((10, 2), np.int64))
    for lane, env in enumerate(made):
        assert env.seeds == [episode_seed(11, TRAIN, lane, episode) for episode in range(len(env.seeds))]
    seeds = {
        s: {episode_seed(0, s, lane, e) for lane in range(4) for e in range(200)} for s in (TRAIN, VALIDATION, TEST)
    }
    assert seeds[TRAIN].isdisjoint(seeds[VALIDATION] | seeds[TEST])
    assert seeds[VALIDATION].isdisjoint(seeds[TEST])
    assert min(map(len, seeds.values())) > 795
    assert all(0 <= seed < 2**31 and seed % 4 == s for s, group in seeds.items() for seed in group)


def test_reset_starts_over_from_the_first_episode() -> None:
    world = lanes(toys.Random)
    first = world.reset()
    drive(world, np.zeros((70, 2), np.int64))
    assert_same(world.reset(), first)


def test_received_steps_are_not_overwritten_and_sent_actions_are_copied() -> None:
    world = lanes(toys.Random)
    kept = [world.reset()]
    action = np.zeros(2, np.int64)
    for _ in range(5):
        world.send(action)
        action[:] = 99
        kept.append(world.receive())
        action[:] = 0
    copies = [step.obs.copy() for step in kept]
    drive(world, np.ones((80, 2), np.int64))
    assert all(np.array_equal(step.obs, copy) for step, copy in zip(kept, copies, strict=True))
    plain = lanes(toys.Random)
    plain.reset()
    for step, same in zip(kept[1:], drive(plain, np.zeros((5, 2), np.int64)), strict=True):
        assert_same(step, same)


@pytest.mark.parametrize("make", [toys.Random, toys.Masked, toys.DictObs])
def test_a_saved_state_is_restored_and_continues_identically(make: Any) -> None:
    script = np.random.default_rng(2).integers(0, 4, (400, 3))
    world = lanes(make, num=3)
    world.reset()
    saved = []
    reached = []
    for action in script[:350]:
        world.send(action)
        reached.append(world.receive())
        saved.append(world.state_dict())
    rest = drive(world, script[350:])
    ended = [t for t, state in enumerate(saved) if state["ended"].any()]
    other = lanes(make, num=3)
    for moment in (0, 17, ended[0], ended[0] + 1, ended[-1], 349):
        again = other.load_state_dict(saved[moment])
        np.testing.assert_array_equal(again.obs, reached[moment].obs)
        np.testing.assert_array_equal(again.terminated | again.truncated, saved[moment]["ended"])
    for a, b in zip(rest, drive(other, script[350:]), strict=True):
        assert_same(a, b)


def test_a_long_episode_is_recorded_whole() -> None:
    world = lanes(lambda: toys.Counting((2000,)), num=1)
    world.reset()
    script = np.random.default_rng(0).integers(0, 3, (1500, 1))
    drive(world, script)
    np.testing.assert_array_equal(world.state_dict()["actions"], script[:, 0])


def test_a_non_deterministic_lane_is_visible_after_restoring_and_can_be_abandoned() -> None:
    world = lanes(toys.Unrepeatable)
    world.reset()
    reached = drive(world, np.zeros((5, 2), np.int64))[-1]
    again = world.load_state_dict(world.state_dict())
    assert not np.array_equal(again.obs, reached.obs)
    world.abandon(np.ones(2, bool))
    step = drive(world, np.zeros((1, 2), np.int64))[0]
    assert not step.reward.any()
    assert world.state_dict()["number"].tolist() == [1, 1]
    assert world.state_dict()["length"].tolist() == [0, 0]


def test_an_abandoned_lane_starts_a_new_episode_and_the_others_continue() -> None:
    world = lanes(lambda: toys.Counting(LENGTHS))
    shown = world.reset()
    shown = drive(world, np.zeros((2, 2), np.int64))[-1]
    world.abandon(np.array([True, False]))
    assert not shown.truncated.any()  # what was handed out stays as it was
    first, second = drive(world, np.ones((2, 2), np.int64))
    assert first.obs.tolist() == [[0, 1, 0], [1, 0, 3]]
    assert first.reward.tolist() == [0, 3]
    assert (first.terminated.tolist(), first.truncated.tolist()) == ([False, True], [False, False])
    assert second.obs.tolist() == [[0, 1, 1], [1, 1, 0]]


def test_abandoning_an_ended_lane_changes_nothing() -> None:
    world = lanes(lambda: toys.Counting(LENGTHS))
    world.reset()
    drive(world, np.zeros((3, 2), np.int64))  # both have ended
    world.abandon(np.array([True, False]))
    assert drive(world, np.zeros((1, 2), np.int64))[0].obs.tolist() == [[0, 1, 0], [1, 1, 0]]


def test_abandoned_lanes_are_saved_and_restored() -> None:
    world = lanes(toys.Random)
    other = lanes(toys.Random)
    script = np.random.default_rng(0).integers(0, 4, (40, 2))
    world.reset()
    reached = drive(world, script[:5])[-1]
    world.abandon(np.array([False, True]))
    again = other.load_state_dict(world.state_dict())
    np.testing.assert_array_equal(again.obs, reached.obs)
    assert (again.terminated | again.truncated).tolist() == [False, True]
    for a, b in zip(drive(world, script[5:]), drive(other, script[5:]), strict=True):
        assert_same(a, b)
    assert world.state_dict()["number"][1] > world.state_dict()["number"][0]


def test_saving_or_abandoning_in_the_middle_of_a_step_is_refused() -> None:
    world = lanes(toys.Random)
    world.reset()
    world.send(np.zeros(2, np.int64))
    with pytest.raises(RuntimeError, match="receive"):
        world.state_dict()
    with pytest.raises(RuntimeError, match="receive"):
        world.abandon(np.ones(2, bool))
    world.receive()
    with pytest.raises(RuntimeError, match="send"):
        world.receive()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("actions", np.array([0, 1, 4, 0, 1, 2, 3, 0, 1, 2])),
        ("actions", np.array([0, 1, -1, 0, 1, 2, 3, 0, 1, 2])),
        ("actions", np.array([2**32, 0, 0, 0, 0, 0, 0, 0, 0, 0])),  # would be 0 in 32 bits
        ("actions", np.zeros(9, np.int32)),
        ("actions", np.zeros(11, np.int32)),
        ("actions", np.zeros((5, 2), np.int32)),
        ("actions", np.zeros(10)),
        ("length", np.array([11, -1])),
        ("length", np.array([2**62, 2**62 + 10])),
        ("length", np.array([5.0, 5.0])),
        ("number", np.array([0, -2])),
        ("number", np.array([2**60, 0])),
        ("seed", np.array([2**31, 0])),
        ("seed", np.array([0])),
        ("ended", np.array([0, 1])),
        ("ended", np.array([True])),
        ("ended", None),
        ("length", None),
    ],
)
def test_damaged_recorded_actions_are_refused_before_any_step(field: str, value: Any) -> None:
    moved: list[int] = []

    class Watched(toys.Random):
        def reset(self, **given: Any) -> Any:
            moved.append(1)
            return super().reset(**given)

    world = lanes(Watched)
    world.reset()
    drive(world, np.ones((5, 2), np.int64))
    state = {**world.state_dict(), field: value}
    moved.clear()
    with pytest.raises(ValueError, match=field if field != "actions" or np.ndim(value) != 1 else "actions|length"):
        world.load_state_dict(state)
    assert not moved
    del state[field]
    with pytest.raises(ValueError, match=f"{field} is missing"):
        world.load_state_dict(state)


def test_a_checkpoint_with_another_number_of_lanes_is_refused() -> None:
    world = lanes(toys.Random, num=3)
    world.reset()
    with pytest.raises(UsageError, match=r"env\.num=2.*3 environments"):
        lanes(toys.Random, num=2).load_state_dict(world.state_dict())


def test_every_step_has_a_mask() -> None:
    world = lanes(toys.Masked)
    assert world.spec.masked
    step = world.reset()
    assert step.mask is not None
    assert step.mask.dtype == np.bool_
    assert step.mask.tolist() == [[False, True, True, True]] * 2
    masks = [s.mask for s in drive(world, np.ones((2, 2), np.int64))]
    assert [m.tolist()[0] for m in masks if m is not None] == [[True, False, True, True], [True, True, False, True]]
    assert not lanes(toys.Random).spec.masked
    assert lanes(toys.Random).reset().mask is None


@pytest.mark.parametrize(
    ("make", "steps", "expected"),
    [
        (lambda: toys.NotFinite("obs"), 2, ["lane 0", "observation", "finite", "nan"]),
        (lambda: toys.NotFinite("reward"), 2, ["lane 0", "reward", "finite", "inf"]),
        (lambda: toys.Misshapen("shape"), 2, ["lane 0", "observation shape", "expected (2,)", "got (7,)"]),
        (lambda: toys.Misshapen("dtype"), 2, ["lane 0", "observation dtype", "expected float32", "got <U1"]),
        (lambda: toys.Masked(allow=False), 0, ["lane 0", "action_mask", "at least one allowed"]),
        (lambda: toys.Raising(3), 2, ["lane 0", "step() raised ZeroDivisionError: the toy broke"]),
    ],
)
def test_invalid_returned_values_raise_an_env_error(make: Any, steps: int, expected: list[str]) -> None:
    world = lanes(make)
    world.reset()
    drive(world, np.zeros((steps, 2), np.int64))
    with pytest.raises(EnvError) as caught:
        drive(world, np.zeros((1, 2), np.int64))
    assert all(text in caught.value.what for text in ["toy", *expected]), caught.value.what
    assert caught.value.fix


def test_the_error_names_the_failed_lane() -> None:
    makes = iter([toys.Random(), toys.NotFinite("obs", at=2)])
    world = lanes(lambda: next(makes))
    world.reset()
    with pytest.raises(EnvError, match="lane 1"):
        drive(world, np.zeros((2, 2), np.int64))


def test_the_environments_own_exception_is_the_cause() -> None:
    with pytest.raises(EnvError, match=r"reset\(\) raised") as caught:
        lanes(lambda: toys.Raising(0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_missing_mask_is_an_error_except_at_the_end() -> None:
    class Forgetful(toys.Masked):
        def _info(self) -> dict[str, Any]:
            return super()._info() if self._step < 2 else {}

    world = lanes(Forgetful)
    world.reset()
    with pytest.raises(EnvError, match="action_mask"):
        drive(world, np.ones((2, 2), np.int64))

    class Ending(Forgetful):
        def step(self, action: Any) -> Any:
            obs, reward, _, _, info = super().step(action)
            return obs, reward, self._step == 2, False, info

    world = lanes(Ending)
    world.reset()
    mask = drive(world, np.ones((2, 2), np.int64))[-1].mask
    assert mask is not None
    assert mask.all()


def test_environments_are_closed_if_making_one_fails() -> None:
    closed: list[int] = []

    class Closing(toys.Random):
        def close(self) -> None:
            closed.append(1)

    lanes(Closing, num=3).close()
    assert len(closed) == 3
    with pytest.raises(UsageError, match=r"env\.bins"):
        lanes(Closing, num=3, bins=4)
    assert len(closed) == 6


@pytest.mark.parametrize("name", ["LunarLander-v3", "MinAtar/Breakout-v1", "MinAtar/Seaquest-v0", "Acrobot-v1"])
def test_known_environments_are_restored_exactly(name: str) -> None:
    pytest.importorskip({"L": "Box2D", "M": "minatar", "A": "gymnasium"}[name[0]])
    env = Env(id=name, num=2)
    world: Any = make_world(env, seed=4, stream=TRAIN)
    script = np.random.default_rng(5).integers(0, world.spec.num_actions, (330, 2))
    world.reset()
    reached = drive(world, script[:300])[-1]
    state = world.state_dict()
    rest = drive(world, script[300:])
    other: Any = make_world(env, seed=4, stream=TRAIN)
    other.reset()
    drive(other, script[:40])
    assert_same(other.load_state_dict(state), reached)
    for a, b in zip(rest, drive(other, script[300:]), strict=True):
        assert_same(a, b)
    world.close()
    other.close()


def test_minatar_observations_are_channel_first_and_zero_or_one() -> None:
    minatar = pytest.importorskip("minatar")
    world: Any = make_world(Env(id="MinAtar/Breakout-v1", num=1), seed=0, stream=TRAIN)
    assert (world.spec.obs, world.spec.dtype, world.spec.actions) == ((4, 10, 10), "uint8", (3,))
    game = minatar.Environment("breakout")
    game.seed(episode_seed(0, TRAIN, 0, 0))
    game.reset()
    obs = world.reset().obs[0]
    np.testing.assert_array_equal(obs, 255 * np.moveaxis(game.state(), -1, 0))
    assert make_world(Env(id="MinAtar/Breakout-v0", num=1), seed=0, stream=TRAIN).spec.actions == (6,)


def test_minatars_sticky_action_is_cleared_by_reset() -> None:
    pytest.importorskip("minatar")

    def play(env: MinAtar, seed: int) -> list[bytes]:
        first = env.reset(seed=seed)[0]
        return [first.tobytes(), *(env.step(2)[0].tobytes() for _ in range(4))]

    used = MinAtar("breakout", minimal=True, sticky_action_prob=0.5)
    play(used, 99)
    for seed in range(10):
        assert play(used, seed) == play(MinAtar("breakout", minimal=True, sticky_action_prob=0.5), seed)


def test_rendering_shows_the_first_lane() -> None:
    world: Any = make_world(Env(id="MinAtar/Asterix-v1", num=1), seed=0, stream=TEST, render_mode="rgb_array")
    world.reset()
    frame = world.render()
    assert frame.shape == (320, 320, 3)
    assert frame.any()


def test_the_constant_world_truncates_after_ten_steps_and_never_terminates() -> None:
    world = lanes(toys.Constant, num=1)
    world.reset()
    seen = drive(world, np.zeros((22, 1), np.int64))
    assert [t for t, s in enumerate(seen) if s.truncated[0]] == [9, 20]
    assert not any(s.terminated[0] for s in seen)
    assert sum(s.reward[0] for s in seen) == 20


def test_gymnasium_environments_are_not_checked_twice() -> None:
    world: Any = make_world(Env(id="Acrobot-v1", num=1), seed=0, stream=TRAIN)
    assert not any("PassiveEnvChecker" in type(e).__name__ for e in _layers(world._envs[0]))


def _layers(env: gym.Env[Any, Any]) -> list[Any]:
    found: list[Any] = [env]
    while isinstance(found[-1], gym.Wrapper):
        found.append(found[-1].env)
    return found


class Leaving(toys.Random):
    """Calls sys.exit(0) in the given method."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.leave("constructor")

    def leave(self, where: str) -> None:
        if where == self.where:
            sys.exit(0)

    def reset(self, **given: Any) -> Any:
        self.leave("reset")
        return super().reset(**given)

    def step(self, action: Any) -> Any:
        self.leave("step")
        return super().step(action)


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_an_environment_that_calls_sys_exit_has_failed(where: str) -> None:
    def run() -> None:
        world: Any = make_world(Env(id="Leaving", num=2), seed=0, stream=TRAIN, make=lambda: Leaving(where))
        world.reset()
        drive(world, np.zeros((1, 2), np.int64))

    with pytest.raises(EnvError, match=r"SystemExit: 0 \(it called sys.exit\) at .*test_sync_vector.py:\d+ in leave"):
        run()


def test_a_stop_request_is_not_caught_inside_an_environment() -> None:
    class Asked(toys.Random):
        def step(self, action: Any) -> Any:
            raise StopRequested(0)

    world = lanes(Asked)
    world.reset()
    with pytest.raises(StopRequested):
        drive(world, np.zeros((1, 2), np.int64))


def test_a_failing_close_does_not_keep_others_from_being_closed() -> None:
    closed: list[int] = []

    class Stuck(toys.Random):
        def close(self) -> None:
            closed.append(1)
            sys.exit(0)

    world = lanes(Stuck, num=2)
    with pytest.warns(UserWarning, match=r"close\(\) raised SystemExit"):
        world.close()
    assert len(closed) == 2
