"""Raw observations in, raw actions out: single and batched, of every space, and one clear message for anything else."""

import threading
import warnings
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from qfleet.act import Policy
from qfleet.act.predict import make_predictor
from qfleet.build.make import make_policy
from qfleet.data.space_format import EnvSpaces, read_spaces, write_spaces
from qfleet.errors import UsageError
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan

SMALL = {"net.torso.type": "mlp", "net.torso.sizes": (8,), "runtime.device": "cpu"}
LSTM = {"net.memory.type": "lstm", "net.memory.size": 4, "algo.view.type": "sequences"}
VECTOR = spaces.Box(-5.0, 5.0, (3,), np.float32)
FOUR = spaces.Discrete(4)


def policy_in(
    obs: spaces.Space[Any], action: spaces.Space[Any] = FOUR, *, masked: bool = False, stack: int = 1, **settings: Any
) -> Policy:
    """A policy with fresh weights in an environment of these spaces, which have been text in between."""
    plan = plan_of(settings)
    kept = read_spaces(write_spaces(EnvSpaces(obs, action, masked, stack)))
    predictor = make_predictor(plan, kept)
    policy = make_policy(plan, predictor.spaces.spec, torch.device("cpu"))
    policy.predictor = predictor
    return policy


def plan_of(settings: dict[str, Any]) -> Plan:
    plan = make_plan("CartPole-v1", None, {**SMALL, **{k: v for k, v in settings.items() if k != "env.bins"}})
    bins = settings.get("env.bins")
    return msgspec.structs.replace(plan, env=msgspec.structs.replace(plan.env, bins=bins))


OBSERVATIONS: dict[str, tuple[spaces.Space[Any], list[Any], Any]] = {
    "vector": (VECTOR, [np.zeros(3, np.float32), np.ones(3, np.float32)], None),
    "float64": (VECTOR, [np.zeros(3), np.full(3, 0.1)], None),
    "lists": (VECTOR, [[0, 0, 1], [0.5, 0.25, 1]], None),
    "scalar": (spaces.Box(0, 1, (), np.float32), [0.5, 0.25], None),
    "picture": (spaces.Box(0, 255, (3, 4, 4), np.uint8), [np.zeros((3, 4, 4), np.uint8)] * 2, None),
    "flags": (spaces.Box(0, 1, (2, 2), np.bool_), [np.eye(2, dtype=bool), ~np.eye(2, dtype=bool)], None),
    "discrete": (spaces.Discrete(5, start=2), [2, 6], None),
    "large discrete": (spaces.Discrete(5_000), [0, 4_999], None),
    "multi-discrete": (spaces.MultiDiscrete([3, 4]), [np.array([0, 3]), np.array([2, 0])], None),
    "multi-binary": (spaces.MultiBinary(3), [np.array([0, 1, 1], np.int8), np.array([1, 0, 0], np.int8)], None),
    "tuple": (
        spaces.Tuple([spaces.Discrete(32), spaces.Discrete(2)]),
        [(4, 1), (31, 0)],
        (np.array([4, 31]), np.array([1, 0])),
    ),
    "dict": (
        spaces.Dict({"far": spaces.Discrete(2), "place": VECTOR, "words": spaces.Text(3)}),
        [{"far": 1, "place": np.ones(3), "words": "ab"}, {"far": 0, "place": np.zeros(3), "words": "a"}],
        {"far": np.array([1, 0]), "place": np.stack([np.ones(3), np.zeros(3)]), "words": ("ab", "a")},
    ),
    "nested, partly not read": (
        spaces.Dict({"a": spaces.Tuple([spaces.Graph(FOUR, None), VECTOR]), "b": spaces.Graph(FOUR, None)}),
        [{"a": (None, np.ones(3))}, {"a": (None, np.zeros(3)), "b": 7}],
        {"a": (None, np.stack([np.ones(3), np.zeros(3)]))},
    ),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_of_every_space_are_read_one_by_one_or_in_a_batch(name: str) -> None:
    space, singles, batch = OBSERVATIONS[name]
    policy = policy_in(space)
    found = [policy.predict(obs) for obs in singles]
    assert all(type(action) is int and FOUR.contains(action) and state is None for action, state in found)
    batches = [singles if isinstance(space, spaces.Dict | spaces.Tuple) else np.stack(singles)]
    for together in batches if batch is None else [*batches, batch]:
        actions, state = policy.predict(together)
        assert state is None
        assert (actions.shape, actions.dtype.kind) == ((2,), "i")
        assert actions.tolist() == [action for action, _ in found]
        np.testing.assert_allclose(policy.values(together), [policy.values(obs) for obs in singles], rtol=1e-5)
    assert policy.values(singles[0]).shape == (4,)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_an_observation_is_encoded_as_in_training(name: str) -> None:
    from qfleet.envs.spaces import adapt_obs

    space, singles, _ = OBSERVATIONS[name]
    policy = policy_in(space)
    adapter = adapt_obs(space, "x")
    for obs in singles:
        rows = np.empty((1, *adapter.shape), adapter.dtype)
        rows[0] = adapter.encode(obs)
        assert policy.values(obs).tolist() == policy.act(rows)[2][0].tolist()


def test_a_stack_of_frames_is_one_observation() -> None:
    policy = policy_in(spaces.Box(0, 255, (4, 6, 6), np.uint8), stack=4)
    assert policy.spec is not None
    assert (policy.spec.obs, policy.spec.stack, policy.spec.input_shape) == ((6, 6), 4, (4, 6, 6))
    frames = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 6), np.uint8)
    assert policy.predict(frames)[0].tolist() == policy.act(frames)[0].tolist()
    assert policy.predict(frames[1])[0] == policy.act(frames[1:])[0][0]
    with pytest.raises(UsageError, match=r"shape: expected \(4, 6, 6\), or \[B, 4, 6, 6\] for a batch, got \(6, 6\)"):
        policy.predict(frames[0, 0])


ACTIONS: dict[str, tuple[spaces.Space[Any], dict[str, Any]]] = {
    "discrete": (spaces.Discrete(4, start=10), {}),
    "multi-discrete": (spaces.MultiDiscrete([2, 3], start=[1, 5]), {}),
    "multi-binary": (spaces.MultiBinary(3), {}),
    "box": (spaces.Box(np.array([-1, 0], np.float32), np.array([1, 4], np.float32)), {"env.bins": 3}),
    "scalar box": (spaces.Box(-2.0, 2.0, (), np.float64), {"env.bins": 3}),
    "decoupled": (spaces.MultiDiscrete([2, 5, 3]), {"net.decoupled": True}),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_are_those_of_the_original_space(name: str) -> None:
    space, settings = ACTIONS[name]
    policy = policy_in(VECTOR, space, **settings)
    obs = np.random.default_rng(1).normal(size=(5, 3))
    together, _ = policy.predict(obs)
    assert together.shape == (5, *space.shape)  # type: ignore[misc]
    indices, _, _ = policy.act(obs.astype(np.float32))
    for row, action, index in zip(obs, together, indices, strict=True):
        single, _ = policy.predict(row)
        assert space.contains(single)
        assert np.array_equal(single, action)
        assert np.array_equal(single, policy.raw_action(int(index)))
    assert together.dtype == (np.int64 if name == "discrete" else space.dtype)


def test_the_value_of_an_action_is_at_its_index() -> None:
    policy = policy_in(VECTOR, spaces.Discrete(4, start=10))
    values = policy.values(np.ones(3))
    assert policy.predict(np.ones(3))[0] == policy.raw_action(int(values.argmax())) == 10 + values.argmax()
    for wrong in (-1, 4):
        with pytest.raises(UsageError, match="Give an index from 0 to 3"):
            policy.raw_action(wrong)


def test_decoupled_values_are_per_dimension() -> None:
    policy = policy_in(VECTOR, spaces.MultiDiscrete([2, 5, 3]), **{"net.decoupled": True})
    values = policy.values(np.ones((2, 3)))
    assert values.shape == (2, 3, 5)
    assert np.isneginf(values).sum(2).tolist() == [[3, 0, 2]] * 2
    assert policy.predict(np.ones((2, 3)))[0].tolist() == values.argmax(2).tolist()
    with pytest.raises(UsageError, match=r"mask= does not go with net\.decoupled"):
        policy.predict(np.ones(3), mask=np.ones(30))


# Masks


def test_only_allowed_actions_are_chosen() -> None:
    policy = policy_in(VECTOR, spaces.Discrete(4, start=1), masked=True)
    obs = np.random.default_rng(2).normal(size=(6, 3))
    masks = np.eye(4, dtype=np.int8)[[0, 1, 2, 3, 0, 1]]
    assert policy.predict(obs, mask=masks)[0].tolist() == [1, 2, 3, 4, 1, 2]
    assert policy.predict(obs, mask=masks, deterministic=False, epsilon=1.0)[0].tolist() == [1, 2, 3, 4, 1, 2]
    assert policy.predict(obs[0], mask=[False, False, True, False])[0] == 3
    assert policy.predict(obs[0], mask=np.ones(4))[0] == 1 + policy.values(obs[0]).argmax()


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (None, "mask= is missing"),
        (np.ones(3), "size"),
        (np.zeros(4), "no allowed action"),
        ("abcd", "'abcd'"),
        (7, "size"),
        (np.ones((2, 4)), "size"),
    ],
)
def test_a_wrong_mask_is_refused(mask: Any, text: str) -> None:
    policy = policy_in(VECTOR, masked=True)
    with pytest.raises(UsageError) as caught:
        policy.predict(np.ones(3), mask=mask)
    assert "mask" in caught.value.what
    assert "action_mask" in caught.value.fix


@pytest.mark.parametrize("mask", [np.ones(4), np.ones((3, 4)), [np.ones(4), np.zeros(4)], 1])
def test_a_batch_has_a_mask_for_each_observation(mask: Any) -> None:
    with pytest.raises(UsageError, match="mask="):
        policy_in(VECTOR).predict(np.ones((2, 3)), mask=mask)


def test_a_mask_may_be_given_where_training_had_none() -> None:
    policy = policy_in(VECTOR)
    assert policy.predict(np.ones(3), mask=[0, 0, 0, 1])[0] == 3


# Wrong observations


@pytest.mark.parametrize(
    ("space", "obs", "text"),
    [
        (VECTOR, np.zeros(4), "expected (3,), or [B, 3] for a batch, got (4,)"),
        (VECTOR, np.zeros((2, 2, 3)), "got (2, 2, 3)"),
        (VECTOR, 1.0, "got ()"),
        (VECTOR, None, "got ()"),
        (VECTOR, [[1, 2, 3], [1]], "expected Box"),
        (VECTOR, np.array(["a", "b", "c"]), "dtype: expected float32"),
        (VECTOR, [0, np.nan, 0], "finite"),
        (VECTOR, [0, np.inf, 0], "finite"),
        (VECTOR, [0, 1e300, 0], "finite"),
        (VECTOR, [0, 5.5, 0], "observation[1]: expected a value from -5 to 5, got 5.5"),
        (VECTOR, np.array([[0, 0, 0], [0, 0, 9.0]]), "(number 1 of the batch)"),
        (VECTOR, np.zeros((0, 3)), "a batch without observations"),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([0.5, 0.5]), "dtype: expected uint8, got float64"),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([0, 300]), "dtype: expected uint8, got int64"),
        (spaces.Discrete(3), 3, "an integer from 0 to 2"),
        (spaces.Discrete(3), -1, "an integer from 0 to 2"),
        (spaces.Discrete(3), 1.0, "an integer from 0 to 2"),
        (spaces.Discrete(3), True, "an integer from 0 to 2"),
        (spaces.Discrete(3), "1", "an integer from 0 to 2"),
        (spaces.Discrete(3), np.array([0, 5]), "(number 1 of the batch)"),
        (spaces.MultiDiscrete([2, 2]), [0, 2], "expected MultiDiscrete"),
        (spaces.MultiBinary(2), [0, 2], "expected MultiBinary"),
        (spaces.Tuple([FOUR, FOUR]), (1,), "observation[1]: expected a value, got none"),
        (spaces.Tuple([FOUR, FOUR]), 3, "a tuple"),
        (spaces.Tuple([FOUR, FOUR]), (1, np.array([1, 2])), "all single, or batches of one size"),
        (spaces.Tuple([FOUR, FOUR]), [1, 2], "(number 0 of the batch)"),
        (spaces.Dict({"a": FOUR, "b": VECTOR}), {"a": 1}, "observation['b']: expected a value, got none"),
        (spaces.Dict({"a": FOUR, "b": VECTOR}), {"a": 1, "b": np.zeros(2)}, "observation['b'] shape: expected (3,)"),
        (spaces.Dict({"a": FOUR, "b": VECTOR}), {"a": 9, "b": np.zeros(3)}, "observation['a']"),
        (spaces.Dict({"a": FOUR, "b": VECTOR}), {"a": 1, "b": np.full(3, 7.0)}, "observation['b'][0]"),
        (spaces.Dict({"a": FOUR, "b": VECTOR}), 5, "a dict"),
        (spaces.Dict({"w": spaces.Text(3)}), {"w": "much too long"}, "observation['w']"),
        (spaces.Dict({"w": spaces.Text(3)}), {"w": 3}, "observation['w']"),
    ],
)
def test_a_wrong_observation_is_refused_with_one_message(space: spaces.Space[Any], obs: Any, text: str) -> None:
    policy = policy_in(space)
    for call in (policy.predict, policy.values):
        with pytest.raises(UsageError) as caught:
            call(obs)
        assert text in caught.value.what, caught.value.what
        assert caught.value.why
        assert caught.value.fix


def test_a_key_of_the_space_forges_no_line() -> None:
    space = spaces.Dict({"a\x1b[31m\nFORGED": FOUR, "t": spaces.Text(2, charset="a\x1b\n")})
    with pytest.raises(UsageError) as caught:
        policy_in(space).predict({"t": "a"})
    assert not {"\x1b", "\n"} & set(caught.value.what + caught.value.why)


def test_bounds_are_not_checked_if_training_did_not() -> None:
    policy = policy_in(VECTOR)
    assert policy.predictor is not None
    plan = policy.predictor.plan
    unchecked = msgspec.structs.replace(plan, env=msgspec.structs.replace(plan.env, check_bounds=False))
    policy.predictor = make_predictor(unchecked, policy.predictor.spaces.kept)
    assert policy.predict(np.full(3, 7.0))[0] in range(4)


def test_values_that_are_not_finite_are_reported() -> None:
    policy = policy_in(spaces.Box(-np.inf, np.inf, (3,), np.float32))
    for weight in policy.net.parameters():
        weight.data.fill_(1e10)
    for call in (policy.predict, policy.values):
        with pytest.raises(UsageError, match="values for this observation are not finite"):
            call(np.full(3, 1e38))


def test_a_policy_without_spaces_says_so() -> None:
    policy = policy_in(VECTOR)
    policy.predictor = None
    for call in (policy.predict, policy.values, policy.seed):
        with pytest.raises(UsageError, match="does not know the spaces"):
            call(1)


# Memory


def test_the_state_carries_the_past() -> None:
    policy = policy_in(VECTOR, **LSTM)
    obs = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)
    state, carried = policy.initial_state(1), None
    for step, row in enumerate(obs):
        expected, state, values = policy.act(row[None], state)
        np.testing.assert_array_equal(policy.values(row, carried, reward=step * 0.5), values[0])
        action, carried = policy.predict(row, carried, reward=step * 0.5)
        assert action == expected[0]
        assert carried is not None
        assert carried.shape == state[0].shape  # type: ignore[index]
        state[:, -1] = (step + 1) * 0.5  # type: ignore[index]


def test_lanes_of_a_batch_begin_anew_alone() -> None:
    policy = policy_in(VECTOR, **LSTM)
    obs = np.random.default_rng(4).normal(size=(2, 3, 3))
    _, state = policy.predict(obs[0])
    before = np.array(state)
    starts = np.array([True, False, True])
    found = policy.values(obs[1], state, reward=[1.0, 2.0, 3.0], episode_start=starts)
    fresh = policy.values(obs[1])
    carried = policy.values(obs[1], state, reward=[1.0, 2.0, 3.0])
    np.testing.assert_allclose(found, np.where(starts[:, None], fresh, carried), rtol=1e-6)
    assert np.abs(fresh - carried).max() > 1e-6
    assert np.array_equal(before, np.array(state))  # what is given is not changed


def test_a_missing_reward_is_taken_for_zero_with_one_warning() -> None:
    policy = policy_in(VECTOR, **LSTM)
    _, state = policy.predict(np.ones(3))
    with pytest.warns(UserWarning, match="reward= was not given") as caught:
        _, after = policy.predict(np.ones(3), state)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.predict(np.ones(3), after)
    np.testing.assert_array_equal(after, policy.predict(np.ones(3), state, reward=0.0)[1])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"state": np.zeros(3, np.float32)}, "state= was given float32 of shape (3,)"),
        ({"state": "x"}, "state="),
        ({"state": np.full(13, np.nan, np.float32)}, "state="),
        ({"reward": [1.0, 2.0]}, "reward="),
        ({"reward": "x"}, "reward="),
        ({"reward": np.nan}, "reward="),
        ({"episode_start": 3}, "episode_start="),
    ],
)
def test_wrong_memories_are_refused(given: dict[str, Any], text: str) -> None:
    policy = policy_in(VECTOR, **LSTM)
    _, state = policy.predict(np.ones(3))
    assert state is not None
    assert state.shape == (13,)
    with pytest.raises(UsageError) as caught:
        policy.predict(np.ones(3), **{"state": state, "reward": 0.0, **given})
    assert text in caught.value.what


def test_a_policy_without_memory_takes_no_state() -> None:
    policy = policy_in(VECTOR)
    assert policy.predict(np.ones(3), None, reward=1.0, episode_start=True)[1] is None
    with pytest.raises(UsageError, match="state= was given"):
        policy.predict(np.ones(3), np.zeros(4))


# Exploration


def shares(policy: Policy, **given: Any) -> list[float]:
    """How often each action was chosen, from the most to the least frequent."""
    actions, _ = policy.predict(np.zeros((4_000, 3)), deterministic=False, **given)
    return [count / 4_000 for _, count in Counter(actions.tolist()).most_common()]


@pytest.mark.parametrize(
    ("settings", "epsilon"),
    [
        ({"algo.explore.start": 1.0, "algo.explore.end": 0.4, "algo.explore.steps": 10}, 0.4),
        ({"algo.explore.type": "constant", "algo.explore.epsilon": 0.2}, 0.2),
        ({"algo.explore.type": "exponential", "algo.explore.end": 0.6, "algo.explore.half_life_steps": 9}, 0.6),
        ({"algo.explore.type": "ladder", "algo.explore.base": 0.8, "algo.explore.power": 1.0, "env.num": 4}, 0.64),
    ],
    ids=["linear", "constant", "exponential", "ladder"],
)
def test_a_policy_explores_as_its_plan_does_at_the_end(settings: dict[str, Any], epsilon: float) -> None:
    policy = policy_in(VECTOR, **settings)
    policy.seed(5)
    found = shares(policy)
    assert found[0] == pytest.approx(1 - 0.75 * epsilon, abs=0.04)
    assert found[1:] == pytest.approx([epsilon / 4] * 3, abs=0.04)


def test_epsilon_can_be_chosen_and_the_seed_decides() -> None:
    policy = policy_in(VECTOR)
    policy.seed(7)
    first, _ = policy.predict(np.zeros((50, 3)), deterministic=False, epsilon=1.0)
    second, _ = policy.predict(np.zeros((50, 3)), deterministic=False, epsilon=1.0)
    policy.seed(7)
    again, _ = policy.predict(np.zeros((50, 3)), deterministic=False, epsilon=1.0)
    assert first.tolist() == again.tolist() != second.tolist()
    assert shares(policy, epsilon=1.0) == pytest.approx([0.25] * 4, abs=0.04)
    assert shares(policy, epsilon=0.0) == [1.0]


def test_softmax_is_drawn_at_its_last_temperature() -> None:
    settings = {"algo.explore.type": "softmax", "algo.explore.temperature": 100.0}
    assert shares(policy_in(VECTOR, **settings)) == pytest.approx([0.25] * 4, abs=0.04)
    assert shares(policy_in(VECTOR, **settings, **{"algo.explore.end": 1e-6, "algo.explore.steps": 10})) == [1.0]


def test_noise_is_on_only_when_exploring_and_the_seed_decides() -> None:
    policy = policy_in(VECTOR, **{"net.noisy": True, "algo.explore.type": "constant", "algo.explore.epsilon": 0.0})
    obs = np.random.default_rng(0).normal(size=(64, 3))
    before = torch.get_rng_state()
    policy.seed(1)
    found = [policy.predict(obs, deterministic=False)[0].tolist() for _ in range(20)]
    policy.seed(1)
    assert [policy.predict(obs, deterministic=False)[0].tolist() for _ in range(20)] == found
    assert len({str(each) for each in found}) > 1
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.predict(obs)[0].tolist() == policy.values(obs).argmax(1).tolist()
    assert policy.values(obs).tolist() == policy.values(obs).tolist()


def test_what_has_no_effect_or_no_meaning_is_refused() -> None:
    policy = policy_in(VECTOR)
    with pytest.raises(UsageError, match="no effect with deterministic=True"):
        policy.predict(np.ones(3), epsilon=0.1)
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(UsageError, match="no probability"):
            policy.predict(np.ones(3), deterministic=False, epsilon=wrong)


def test_a_function_of_the_users_own_cannot_be_kept() -> None:
    policy = policy_in(VECTOR, **{"algo.explore.type": "own"})
    with pytest.raises(UsageError, match="a function of your own"):
        policy.predict(np.ones(3), deterministic=False)
    assert policy.predict(np.ones(3), deterministic=False, epsilon=0.0)[0] == policy.predict(np.ones(3))[0]


# Threads


class Alone(nn.Module):
    """A layer that notices when two threads are in it at once."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.inside = 0
        self.most = 0

    def forward(self, values: Tensor) -> Tensor:
        self.inside += 1
        self.most = max(self.most, self.inside)
        threading.Event().wait(0.002)
        out: Tensor = self.inner(values)
        self.inside -= 1
        return out


def test_threads_take_turns() -> None:
    policy = policy_in(VECTOR, **{"net.noisy": True})
    alone = Alone(policy.net.torso)
    policy.net.torso = alone
    policy.fast_net = policy.net
    obs = np.random.default_rng(0).normal(size=(8, 3))
    expected = [policy.predict(row)[0] for row in obs]
    wrong: list[Any] = []

    def work(deterministic: bool) -> None:
        for _ in range(5):
            found = [policy.predict(row, deterministic=deterministic)[0] for row in obs]
            if deterministic and found != expected:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert alone.most == 1
