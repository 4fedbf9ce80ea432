"""The actor's rows and the evaluation's episodes, in worlds that say where they are."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from qfleet.act import Actor, Policy, evaluate_policy, num_eval_lanes, run_actor
from qfleet.act.explore import EpsilonGreedyExplorer
from qfleet.data import Array, Rollout, Step
from qfleet.envs.episodes import TRAIN
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.nets import QNet
from qfleet.nets.memory import Memory
from qfleet.qlearn import Scalar
from qfleet.testing.toys import Counting, Masked, Unrepeatable
from qfleet.training.channels import LatestWeights, RolloutQueue

LENGTHS = (3, 5, 1, 4)


def counting(lanes: int) -> SyncVectorEnv:
    Counting.made = 0
    return SyncVectorEnv(lambda: Counting(LENGTHS), lanes, seed=1, stream=TRAIN)


def policy(inputs: int = 3, actions: int = 3) -> Policy:
    return Policy(QNet(nn.Linear(inputs, actions), nn.Identity()), Scalar(), (actions,))


def make_actor(world: SyncVectorEnv) -> Actor:
    inputs, actions = world.spec.obs[0], world.spec.num_actions
    explorer = EpsilonGreedyExplorer(lambda step: 0.5, (actions,))
    actor = Actor(world, policy(inputs, actions), explorer, np.random.default_rng(0))
    actor.start()
    return actor


def gather(actor: Actor, num: int) -> tuple[dict[str, Array], list[tuple[float, int]]]:
    """So many rows put together, and the episodes that ended."""
    rollouts: list[Rollout] = []
    finished: list[tuple[float, int]] = []
    for _ in range(num):
        actor.send()
        rollout, ended = actor.receive()
        rollouts.append(rollout)
        finished += ended
    names = ("obs", "action", "reward", "discount", "last")
    return {name: np.concatenate([getattr(rollout, name) for rollout in rollouts]) for name in names}, finished


def expected_rows(num: int) -> list[tuple[int, int, float, float, bool]]:
    """One lane of the counting world: episode, step, reward, discount, last."""
    rows: list[tuple[int, int, float, float, bool]] = []
    episode = 0
    while len(rows) < num:
        length = LENGTHS[episode % 4]
        for step in range(length):
            dies = step + 1 == length and episode % 2 == 0
            rows.append((episode, step, 100.0 * episode + step + 1, 0.0 if dies else 1.0, False))
        rows.append((episode, length, 0.0, 1.0, True))
        episode += 1
    return rows[:num]


def test_rows_are_steps_and_final_observations_in_order() -> None:
    actor = make_actor(counting(3))
    rows, _ = gather(actor, 40)
    for lane in range(3):
        columns = (rows[name][:, lane].tolist() for name in ("obs", "reward", "discount", "last"))
        got = [(int(obs[1]), int(obs[2]), *rest) for obs, *rest in zip(*columns, strict=True)]
        assert got == expected_rows(40)
        assert (rows["obs"][:, lane, 0] == lane).all()
    assert rows["action"].dtype == np.int64
    assert rows["discount"].dtype == rows["reward"].dtype == np.float32


def test_final_rows_are_not_steps() -> None:
    actor = make_actor(counting(2))
    rows, finished = gather(actor, 41)
    assert actor.steps == np.count_nonzero(~rows["last"])
    ended = [row for row in expected_rows(42) if row[4]]
    returns = [sum(100.0 * episode + step + 1 for step in range(length)) for episode, length, *_ in ended]
    expected = [(total, length) for total, (_, length, *_) in zip(returns, ended, strict=True)]
    assert finished == [pair for pair in expected for _ in range(2)]


def test_the_row_holds_the_action_the_world_took() -> None:
    world = counting(2)
    rows, _ = gather(make_actor(world), 30)
    for lane, env in enumerate(world._envs):
        taken = rows["action"][:, lane][~rows["last"][:, lane]]
        assert env.actions == taken.tolist()  # type: ignore[attr-defined]


def test_steps_in_flight_are_counted_between_send_and_receive() -> None:
    actor = make_actor(counting(2))
    seen = []
    for _ in range(5):
        actor.send()
        before, in_flight = actor.steps, actor.in_flight
        actor.receive()
        assert actor.in_flight == 0
        assert actor.steps == before + in_flight
        seen.append(in_flight)
    assert seen == [2, 2, 2, 0, 2]  # the fourth row is the final observation of episodes of three steps


def test_rollouts_are_numbered_and_hold_the_mask_of_their_actions() -> None:
    actor = make_actor(SyncVectorEnv(Masked, 3, seed=1, stream=TRAIN))
    masks = []
    for sequence in range(20):
        shown = actor.current().mask
        actor.send()
        rollout, _ = actor.receive()
        assert rollout.source == (0, 0, sequence)
        assert rollout.mask is not None
        assert shown is not None
        assert np.array_equal(rollout.mask[0], shown)
        assert shown[np.arange(3), rollout.action[0]].all()
        masks.append(shown)
    assert not np.stack(masks).all()


def test_a_full_channel_makes_the_worker_wait_without_losing_a_row() -> None:
    actor, channel = make_actor(counting(1)), RolloutQueue(1)
    worker = run_actor(actor, channel, LatestWeights())
    assert [next(worker).busy for _ in range(5)] == [True, True, True, False, False]
    first = channel.get()
    assert next(worker).busy
    second = channel.get()
    assert first is not None
    assert second is not None
    assert (first.source[2], second.source[2]) == (0, 1)


def test_a_restored_actor_continues_exactly() -> None:
    first, again = make_actor(counting(2)), make_actor(counting(2))
    gather(first, 7)
    state = first.state_dict()
    expected, expected_ends = gather(first, 20)
    again.policy = first.policy
    gather(again, 3)
    assert not again.load_state_dict(state).any()
    got, ends = gather(again, 20)
    assert ends == expected_ends
    assert all(np.array_equal(got[name], expected[name]) for name in expected)


class Forgetful(Counting):
    """Driven again with another `offset` it is elsewhere."""

    offset = 0

    def _obs(self) -> Array:
        return super()._obs() + np.array([0, 0, Forgetful.offset], np.float32)


def test_an_episode_that_cannot_be_replayed_ends_as_truncated() -> None:
    first, again = (make_actor(SyncVectorEnv(Unrepeatable, 2, seed=1, stream=TRAIN)) for _ in range(2))
    gather(first, 3)
    was = first.current().obs.copy()
    lost = again.load_state_dict(first.state_dict())
    assert lost.all()
    rows, _ = gather(again, 2)
    assert rows["last"].tolist() == [[True, True], [False, False]]
    assert np.array_equal(rows["obs"][0], was)  # shown once more, as the final observation of what was given up
    assert again.steps == first.steps + 2


def forgetful_actors() -> tuple[Actor, Actor]:
    """Two actors in the same world."""
    Forgetful.offset = Counting.made = 0
    first = make_actor(SyncVectorEnv(lambda: Forgetful(LENGTHS), 2, seed=1, stream=TRAIN))
    Counting.made = 0
    return first, make_actor(SyncVectorEnv(lambda: Forgetful(LENGTHS), 2, seed=1, stream=TRAIN))


@pytest.mark.parametrize("saved_again", [False, True])
@pytest.mark.parametrize("rows_before", [2, 3])  # in an episode, and at its end
def test_a_lost_lane_starts_a_whole_new_episode(rows_before: int, saved_again: bool) -> None:
    first, again = forgetful_actors()
    before, _ = gather(first, rows_before)
    state = first.state_dict()
    Forgetful.offset = 1000
    assert again.load_state_dict(state).all()
    Forgetful.offset = 0
    if saved_again:
        Counting.made = 0
        third = make_actor(SyncVectorEnv(lambda: Forgetful(LENGTHS), 2, seed=1, stream=TRAIN))
        assert not third.load_state_dict(again.state_dict()).any()
        again = third
    rows, finished = gather(again, 7)
    whole = {name: np.concatenate([before[name], rows[name]]) for name in rows}
    end = (0, rows_before, 0.0, 1.0, True)
    for lane in range(2):
        columns = (whole[name][:, lane].tolist() for name in ("obs", "reward", "discount", "last"))
        got = [(int(obs[1]), int(obs[2]), *rest) for obs, *rest in zip(*columns, strict=True)]
        assert got == [*expected_rows(rows_before), end, *expected_rows(4 + 6)[4:]]
    # The episode that was given up is not reported; the next one is, from its first step.
    assert finished == [(float(sum(100 + step for step in range(1, 6))), 5)] * 2
    assert again.steps == np.count_nonzero(~whole["last"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("obs", np.zeros((2, 4), np.float32)),
        ("obs", np.zeros((2, 3))),
        ("obs", np.full((2, 3), np.nan, np.float32)),
        ("last", np.zeros(3, bool)),
        ("last", np.zeros(2)),
        ("returns", np.zeros(1)),
        ("returns", np.full(2, np.inf)),
        ("lengths", np.array([-1, 0])),
        ("steps", -1),
        ("steps", 2**60),
        ("steps", True),
        ("sequence", 1.5),
        ("rng", {"bit_generator": "Philox"}),
        ("rng", "no"),
        ("world", {}),
        ("world", None),
    ],
)
def test_a_damaged_state_is_refused(field: str, value: object) -> None:
    actor = make_actor(counting(2))
    gather(actor, 4)
    state = actor.state_dict()
    with pytest.raises(ValueError, match="missing|generator" if field in ("rng", "world") else field):
        actor.load_state_dict({**state, field: value})
    with pytest.raises(ValueError, match=f"{field} is missing"):
        actor.load_state_dict({name: kept for name, kept in state.items() if name != field})
    assert not actor.load_state_dict(state).any()


@pytest.mark.parametrize("position", [-1, 5, 2**40])
def test_a_generator_never_reads_outside_its_buffer(position: int) -> None:
    actor = make_actor(counting(2))
    actor.rng = np.random.Generator(np.random.Philox(3))
    state = actor.state_dict()
    state["rng"] = {**state["rng"], "buffer_pos": position}
    with pytest.raises(ValueError, match="buffer_pos"):
        actor.load_state_dict(state)


@pytest.mark.parametrize("episodes", [1, 3, 7])
def test_every_lane_plays_equally_many_episodes(episodes: int) -> None:
    # Lane k's n-th episode has the n-th length, so the returns tell which episodes were counted.
    returns = evaluate_policy(policy(), counting(3), episodes).returns
    totals = [sum(100.0 * n + step + 1 for step in range(LENGTHS[n % 4])) for n in range(3)]
    assert returns == [totals[number // 3] for number in range(episodes)]


def test_short_episodes_are_not_favoured() -> None:
    class Uneven(Counting):
        """The first copy's episodes are twenty times as long as the second's."""

        def __init__(self) -> None:
            super().__init__((20,) if Counting.made == 0 else (1,))

    Counting.made = 0
    returns = evaluate_policy(policy(), SyncVectorEnv(Uneven, 2, seed=1, stream=TRAIN), 6).returns
    lengths = [20 if value % 100 == 10 else 1 for value in returns]  # 1 + ... + 20 = 210, plus hundreds
    assert lengths == [20, 1] * 3


def test_an_endless_episode_is_cut_at_the_limit() -> None:
    class Uneven(Counting):
        """The first copy never ends by itself; the second does before the limit, at it, and after it."""

        def __init__(self) -> None:
            super().__init__((10**9,) if Counting.made == 0 else (3, 4, 5))

    Counting.made = 0
    found = evaluate_policy(policy(), SyncVectorEnv(Uneven, 2, seed=1, stream=TRAIN), 6, max_steps=4)
    # 1 + 2 + 3 + 4, plus 100 a step for each episode before; every episode is counted once, from its first step.
    assert found.returns == [10, 6, 410, 410, 810, 810]
    # Those of the first copy, and the one of the second that would have had five steps: four are not cut.
    assert (found.cut_episodes, found.lost_episodes) == (4, 0)


def test_an_evaluation_can_be_stopped() -> None:
    calls = iter(range(100))
    assert len(evaluate_policy(policy(), counting(2), 50, stop=lambda: next(calls) > 20).returns) < 50


@pytest.mark.parametrize("episodes", [1, 20, 100, 128, 129, 200, 1_000])
def test_lanes_share_episodes_evenly(episodes: int) -> None:
    lanes = num_eval_lanes(episodes)
    rounds = -(-episodes // lanes)
    assert lanes <= 128
    assert 0 <= lanes * rounds - episodes < rounds  # no lane plays a whole episode in vain, but for rounding


class Losing:
    """The counting world of one lane, but some steps never happen: `script` says g(ood), n(othing yet) or b(egun)."""

    def __init__(self, script: str) -> None:
        self._world, self._script = counting(1), iter(script)
        self.spec, self.num = self._world.spec, 1

    def reset(self) -> Step:
        self._last = self._world.reset()
        return self._last

    def send(self, action: Array) -> None:
        self._action = action

    def receive(self) -> Step:
        happens, lost = next(self._script), np.ones(1, bool)
        if happens == "n":
            return Step(self._last.obs.copy(), np.zeros(1, np.float32), ~lost, lost, lost=lost)
        if happens == "b":
            self._world.abandon(lost)
        self._world.send(self._action)
        self._last = self._world.receive()
        return self._last if happens == "g" else replace(self._last, lost=lost)


def lose(script: str) -> tuple[Actor, list[tuple[int, int, bool]], list[int], list[tuple[float, int]]]:
    """(episode, step, last) of every row, what was in flight before each, and the episodes that ended."""
    actor = make_actor(Losing(script))  # type: ignore[arg-type]
    rows, flying, finished = [], [], []
    for _ in script:
        actor.send()
        flying.append(actor.in_flight)
        rollout, ended = actor.receive()
        finished += ended
        rows.append((int(rollout.obs[0, 0, 1]), int(rollout.obs[0, 0, 2]), bool(rollout.last[0, 0])))
    return actor, rows, flying, finished


def test_a_lost_step_makes_its_row_the_episodes_last() -> None:
    actor, rows, flying, finished = lose("gb" + "gggggg")
    assert rows == [(0, 0, False), (0, 1, True), *((1, step, step == 5) for step in range(6))]
    assert flying == [1, 1, 1, 1, 1, 1, 1, 0]  # only afterwards was it known that the second did not happen
    assert actor.steps == 6
    assert finished == [(float(sum(100 + step for step in range(1, 6))), 5)]


def test_a_lane_without_an_observation_has_no_step_in_flight() -> None:
    actor, rows, flying, finished = lose("gnnb" + "ggggg")
    assert rows[:4] == [(0, 0, False), (0, 1, True), (0, 1, True), (0, 1, True)]
    assert rows[4:] == [(1, step, False) for step in range(5)]
    assert flying == [1, 1, 0, 0, 1, 1, 1, 1, 1]
    assert actor.steps == 6
    assert finished == [(float(sum(100 + step for step in range(1, 6))), 5)]


def test_a_lost_reset_keeps_the_finished_episode() -> None:
    # Episode 0 has three steps; the fourth row is its final observation, and the reset after it does not happen.
    actor, rows, _, finished = lose("gggnb" + "gg")
    assert rows == [*((0, step, step == 3) for step in range(4)), (0, 3, True), (1, 0, False), (1, 1, False)]
    assert finished == [(6.0, 3)]
    assert actor.steps == 5


def test_the_memory_is_reset_after_a_lost_episode() -> None:
    actor = make_actor(Losing("ggnbgg"))  # type: ignore[arg-type]
    net = QNet(nn.Linear(3, 3), nn.Linear(4, 3), memory=Memory(3, 4, 3))
    actor.policy = Policy(net, Scalar(), (3,))
    actor.memory = actor.policy.initial_state(1)
    blank = []
    for _ in range(6):
        actor.send()
        state = actor.receive()[0].state
        assert state is not None
        blank.append(not state.any())
    assert blank == [True, False, False, True, True, False]


def test_a_lane_that_failed_from_the_start_is_not_counted() -> None:
    class Late(Losing):
        def reset(self) -> Step:
            step = super().reset()
            return replace(step, truncated=np.ones(1, bool), lost=np.ones(1, bool))

    actor = make_actor(Late("bg"))  # type: ignore[arg-type]
    flying, rows = [], []
    for _ in range(2):
        actor.send()
        flying.append(actor.in_flight)
        rows.append(actor.receive()[0])
    assert flying == [0, 1]
    assert [bool(row.last[0, 0]) for row in rows] == [True, False]
    assert actor.steps == 1
