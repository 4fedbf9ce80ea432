"""Joint actions: their numbering, their splitting, and the limit on their number."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from qfleet.build.resolve import resolve
from qfleet.data import Spec, join_actions, split_actions
from qfleet.data.joint_actions import MAX_OUTPUTS
from qfleet.envs.spaces import adapt_actions
from qfleet.errors import UsageError
from qfleet.plan.schema import Env, Net, Plan

COUNTS = [(3,), (2, 3), (4, 1, 2), (2, 2, 2, 2, 3)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_joint_action_counts_the_last_dimension_fastest(counts: tuple[int, ...]) -> None:
    for number, choices in enumerate(itertools.product(*map(range, counts))):
        assert split_actions(number, counts) == list(choices)
        assert join_actions(choices, counts) == number


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_arrays_and_tensors_are_split_alike(counts: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(counts))
    parts = split_actions(numbers, counts)
    np.testing.assert_array_equal(parts, np.unravel_index(numbers, counts))
    np.testing.assert_array_equal(join_actions(parts, counts), numbers)
    for tensor, array in zip(split_actions(torch.from_numpy(numbers), counts), parts, strict=True):
        assert tensor.tolist() == array.tolist()


def test_as_many_joint_actions_as_64_bits_number_are_decoded_exactly() -> None:
    adapter = adapt_actions(spaces.Box(-1, 1, (38,)), 3, "x")
    last = 3**38 - 1
    assert adapter.decode(last).tolist() == [1.0] * 38
    assert adapter.decode(last - 1).tolist() == [1.0] * 37 + [0.0]


def spec_of(space: spaces.Space[Any], bins: int | None = None, *, masked: bool = False) -> Spec:
    return Spec((4,), "float32", adapt_actions(space, bins, "X-v0").counts, masked=masked)


def refusal(plan: Plan, spec: Spec) -> UsageError:
    with pytest.raises(UsageError) as caught:
        resolve(plan, spec)
    return caught.value


@pytest.mark.parametrize(
    ("space", "bins", "counted"),
    [
        (spaces.Box(-1, 1, (7,)), None, "78,125 joint actions (dimensions 5 x 5 x 5 x 5 x 5 x 5 x 5)"),
        (spaces.Box(-1, 1, (20,)), 2, f"1,048,576 joint actions (dimensions {' x '.join('2' * 20)})"),
        (spaces.MultiDiscrete([200, 300]), None, "60,000 joint actions (dimensions 200 x 300)"),
        (spaces.MultiBinary(40), None, f"1,099,511,627,776 joint actions (dimensions {' x '.join('2' * 40)})"),
    ],
)
def test_too_many_joint_actions_are_refused_unless_decoupled(space: Any, bins: int | None, counted: str) -> None:
    spec = spec_of(space, bins)
    error = refusal(Plan(env=Env(id="X-v0")), spec)
    assert error.what == f"X-v0 has {counted}"
    assert error.why == "The network would need an output for each of them; the limit is 10,000."
    assert error.fix.startswith("Set net.decoupled=true (preset decqn)")
    resolve(Plan(env=Env(id="X-v0"), net=Net(decoupled=True)), spec)


def test_the_limit_itself_is_allowed() -> None:
    plan = Plan(env=Env(id="X-v0"))
    resolve(plan, Spec((4,), "float32", (100, MAX_OUTPUTS // 100)))
    assert "10,001" in refusal(plan, Spec((4,), "float32", (MAX_OUTPUTS + 1,))).what


def test_decoupled_dimensions_refuse_masks() -> None:
    error = refusal(Plan(env=Env(id="X-v0"), net=Net(decoupled=True)), spec_of(spaces.Discrete(3), masked=True))
    assert error.what == "net.decoupled does not go with the action masks of X-v0"
    assert error.why.startswith("Masks are about joint actions")
    assert error.fix == "Leave net.decoupled off."
