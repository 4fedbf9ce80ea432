"""A policy with memory: its state, when it is reset, and that actor, evaluation and learner have the same."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.act import Actor, Policy, add_reward, evaluate_policy
from qfleet.act.actor import taken_and_best_values
from qfleet.act.explore import EpsilonGreedyExplorer
from qfleet.data import Array, Rollout, State
from qfleet.envs.episodes import TRAIN
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.nets import QNet
from qfleet.nets.memory import Memory
from qfleet.qlearn import Scalar
from qfleet.qlearn.heads import Decoupled
from qfleet.save import pack_state, unpack_state
from qfleet.testing.toys import BoxAction, Counting, Masked, Unrepeatable

LENGTHS = (3, 5, 1, 4)


class Witness(nn.Module):
    """A memory that records its inputs and counts the rows since its reset; its best action is (row % 3)."""

    cell_state_size = 1  # the count
    actions = 3  # the previous action as one-hot
    size = 1
    state_size = 5  # with the previous reward

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Array, Array]] = []

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Values and the count."""
        self.seen.append((features.numpy().copy(), state.numpy().copy()))
        return torch.eye(3)[features[:, 2].long() % 3], state[:, :1] + 1


def witness() -> tuple[Policy, Witness]:
    memory = Witness()
    return Policy(QNet(nn.Identity(), nn.Identity(), memory=memory), Scalar(), (3,)), memory  # type: ignore[arg-type]


def counting(lanes: int, lengths: tuple[int, ...] = LENGTHS) -> SyncVectorEnv:
    Counting.made = 0
    return SyncVectorEnv(lambda: Counting(lengths), lanes, seed=1, stream=TRAIN)


def start(world: SyncVectorEnv, policy: Policy, *, epsilon: float = 0.5, record_values: bool = False) -> Actor:
    explorer = EpsilonGreedyExplorer(lambda step: epsilon, policy.actions)
    actor = Actor(world, policy, explorer, np.random.default_rng(0), record_values=record_values)
    actor.start()
    return actor


def gather(actor: Actor, num: int) -> list[Rollout]:
    rollouts = []
    for _ in range(num):
        actor.send()
        rollouts.append(actor.receive()[0])
    return rollouts


def remembered(obs: Array, actions: dict[tuple[int, int, int], int]) -> list[float]:
    """The state that lane `copy` must have at this step of this episode: zeros at its beginning."""
    copy, episode, step = (int(number) for number in obs)
    if step == 0:
        return [0.0] * 5
    one_hot = np.eye(3)[actions[copy, episode, step - 1]]
    return [float(step), *one_hot.tolist(), 100.0 * episode + step]  # the reward says which step it was for


def check_seen(seen: list[tuple[Array, Array]], actions: dict[tuple[int, int, int], int]) -> int:
    """Every recorded state is as expected; returns how many were not zero."""
    used = 0
    for obs, state in seen:
        for lane, row in enumerate(obs):
            assert state[lane].tolist() == remembered(row, actions)
            used += int(state[lane].any())
    return used


def test_an_actors_state_has_action_and_reward_and_is_reset_between_episodes() -> None:
    policy, memory = witness()
    rollouts = gather(start(counting(3), policy), 40)
    actions = {
        (lane, *rollout.obs[0, lane, 1:].astype(int).tolist()): int(rollout.action[0, lane])
        for rollout in rollouts
        for lane in range(3)
    }
    wanted = [int(obs[2]) % 3 for rollout in rollouts for obs in rollout.obs[0]]
    taken = [int(action) for rollout in rollouts for action in rollout.action[0]]
    assert wanted != taken  # some actions were random: it is those taken that are remembered
    assert len(memory.seen) == 40
    assert check_seen(memory.seen, actions) > 60
    for rollout, (_, state) in zip(rollouts, memory.seen, strict=True):
        assert rollout.state is not None
        assert np.array_equal(rollout.state[0], state)  # the row keeps the memory before it
        assert rollout.state.dtype == np.float32


def greedy_actions(lanes: int, episodes: int, steps: int) -> dict[tuple[int, int, int], int]:
    return {(lane, e, step): step % 3 for lane in range(lanes) for e in range(episodes) for step in range(steps)}


def test_an_evaluations_state_is_kept_and_reset_likewise() -> None:
    policy, memory = witness()
    returns = evaluate_policy(policy, counting(2), 6).returns
    assert returns == [6.0, 6.0, 515.0, 515.0, 201.0, 201.0]
    assert check_seen(memory.seen, greedy_actions(2, 8, 6)) > 10


def test_an_evaluation_resets_the_state_of_an_abandoned_episode() -> None:
    policy, memory = witness()
    evaluate_policy(policy, counting(2, (10**9,)), 6, max_steps=4)
    assert check_seen(memory.seen, greedy_actions(2, 8, 6)) > 10
    assert max(int(obs[0, 2]) for obs, _ in memory.seen) == 4


def test_two_evaluations_share_no_state() -> None:
    policy, memory = witness()
    world = counting(2)
    evaluate_policy(policy, world, 2)
    memory.seen.clear()
    evaluate_policy(policy, world, 2)
    assert not memory.seen[0][1].any()


def test_add_reward_resets_only_lanes_that_begin() -> None:
    state = np.ones((3, 4), np.float32)
    after = add_reward(state, np.array([5, 6, 7], np.float32), np.array([False, True, False]))
    assert after is not None
    assert after.tolist() == [[1, 1, 1, 5], [0, 0, 0, 0], [1, 1, 1, 7]]
    assert add_reward(None, np.zeros(3, np.float32), np.zeros(3, np.bool_)) is None


# Coming back


def packed(state: State) -> State:
    """The state as it is read from disk."""
    return unpack_state({name: bytes(data) for name, data in pack_state({"actor": state}).items()})["actor"]  # type: ignore[no-any-return]


def rows_of(rollouts: list[Rollout]) -> list[Any]:
    names = ("obs", "action", "reward", "discount", "last", "state", "value")
    return [getattr(rollout, name).tolist() for rollout in rollouts for name in names]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("rows", [2, 3, 4, 9])  # in an episode, at its end, after it
def test_a_restored_actor_has_its_memory(rows: int, kind: Literal["lstm", "gru"]) -> None:
    policy = recurrent(3, 3, kind)
    first, again = (start(counting(2), policy, record_values=True) for _ in range(2))
    gather(first, rows)
    state = first.state_dict()
    kept = packed(state)
    expected = rows_of(gather(first, 15))
    gather(again, 5)
    Counting.made = 0
    assert not again.load_state_dict(kept).any()
    assert again.memory is not None
    assert again.memory.dtype == np.float32
    assert rows_of(gather(again, 15)) == expected


def test_saved_state_does_not_change_when_the_actor_continues() -> None:
    actor = start(counting(2), recurrent(3, 3))
    gather(actor, 2)
    state = actor.state_dict()
    before = state["memory"].copy()
    gather(actor, 3)
    assert np.array_equal(state["memory"], before)


@pytest.mark.parametrize(
    "value", [None, np.zeros((2, 4), np.float32), np.zeros((2, 5), np.int64), np.full((2, 5), np.nan, np.float32)]
)
def test_a_damaged_memory_is_refused(value: Array | None) -> None:
    actor = start(counting(2), witness()[0])
    gather(actor, 2)
    state = actor.state_dict()
    with pytest.raises(ValueError, match="memory"):
        actor.load_state_dict({**state, "memory": value})
    assert not actor.load_state_dict(state).any()


def test_the_memory_of_an_episode_that_cannot_be_replayed_is_reset() -> None:
    policy = recurrent(2, 4)
    first, again = (start(SyncVectorEnv(Unrepeatable, 2, seed=1, stream=TRAIN), policy) for _ in range(2))
    gather(first, 3)
    assert again.load_state_dict(first.state_dict()).all()
    final, begun = gather(again, 2)
    assert final.last.all()
    assert final.state is not None
    assert final.state.any()  # the old episode's memory goes with its last observation
    assert begun.state is not None
    assert not begun.state.any()


# Actor and learner


def recurrent(inputs: int, actions: int, kind: Literal["lstm", "gru"] = "lstm", torso: int = 6) -> Policy:
    torch.manual_seed(0)
    memory = Memory(torso, 4, actions, kind)
    return Policy(QNet(nn.Linear(inputs, torso), nn.Linear(4, actions), memory=memory), Scalar(), (actions,))


def unroll(policy: Policy, rows: dict[str, Tensor], num: int) -> tuple[Tensor, Tensor]:
    """Outputs of the first rows, and the state after them."""
    obs, action, gain, last = (rows[name][:num] for name in ("obs", "action", "reward", "last"))
    with torch.no_grad():
        return policy.net.unroll(obs, action, gain, last, rows["state"][0])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_learner_unrolls_to_the_actors_values(kind: Literal["lstm", "gru"]) -> None:
    policy = recurrent(3, 3, kind)
    rollouts = gather(start(counting(3), policy, record_values=True), 30)
    names = ("obs", "action", "reward", "last", "state", "value")
    rows = {name: torch.from_numpy(np.concatenate([getattr(one, name) for one in rollouts])) for name in names}
    for begin in (0, 7, 16):
        part = {name: column[begin:] for name, column in rows.items()}
        out, _ = unroll(policy, part, len(part["last"]))
        _, before = unroll(policy, part, len(part["last"]) - 1)
        taken = out.gather(2, part["action"].unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(taken, part["value"][..., 0])
        torch.testing.assert_close(out.amax(2), part["value"][..., 1])
        torch.testing.assert_close(before, part["state"][-1])


def test_rows_hold_the_values_of_the_action_and_of_the_best_allowed_one() -> None:
    torch.manual_seed(0)
    policy = Policy(QNet(nn.Linear(2, 4), nn.Identity()), Scalar(), (4,))
    different = 0
    for rollout in gather(start(SyncVectorEnv(Masked, 3, seed=1, stream=TRAIN), policy, record_values=True), 30):
        values = policy.forward(rollout.obs[0])[0]
        assert rollout.value is not None
        assert rollout.mask is not None
        for lane in range(3):
            allowed = [values[lane, action] for action in range(4) if rollout.mask[0, lane, action]]
            assert rollout.value[0, lane].tolist() == [values[lane, rollout.action[0, lane]], max(allowed)]
            different += max(allowed) < values[lane].max()
    assert different > 5


def test_without_allowed_actions_the_best_value_is_of_all() -> None:
    values, mask = np.array([[1.0, 3.0], [2.0, 5.0]]), np.array([[False, False], [True, False]])
    assert taken_and_best_values(values, [np.array([0, 0])], mask).tolist() == [[1.0, 3.0], [2.0, 2.0]]


def test_decoupled_rows_hold_means_over_dimensions() -> None:
    torch.manual_seed(0)
    net = QNet(nn.Linear(2, 6), nn.Unflatten(1, (2, 3)))
    policy = Policy(net, Decoupled((3, 3)), (3, 3))
    world = SyncVectorEnv(BoxAction, 2, seed=1, stream=TRAIN, bins=3)
    for rollout in gather(start(world, policy, record_values=True), 20):
        values = policy.forward(rollout.obs[0])[0]
        assert rollout.value is not None
        for lane in range(2):
            first, second = divmod(int(rollout.action[0, lane]), 3)
            taken = (values[lane, 0, first] + values[lane, 1, second]) / 2
            best = (values[lane, 0].max() + values[lane, 1].max()) / 2
            assert rollout.value[0, lane].tolist() == pytest.approx([taken, best])


def test_values_are_recorded_only_if_asked() -> None:
    policy = Policy(QNet(nn.Linear(3, 3), nn.Identity()), Scalar(), (3,))
    (rollout,) = gather(start(counting(2), policy), 1)
    assert rollout.value is None
    assert rollout.state is None


def test_taken_and_best_values_by_hand() -> None:
    values = np.array([[1.0, 5.0, 3.0], [4.0, 2.0, 9.0]], np.float32)
    mask = np.array([[True, True, True], [True, True, False]])
    assert taken_and_best_values(values, [np.array([2, 1])], None).tolist() == [[3, 5], [2, 9]]
    assert taken_and_best_values(values, [np.array([2, 1])], mask).tolist() == [[3, 5], [2, 4]]
