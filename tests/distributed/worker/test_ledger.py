"""The ledger accepts every rollout once, in order, of the newest incarnation only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.distributed.worker.ledger import Ledger


def ledger(workers: int = 2) -> Ledger:
    """Everyone has begun incarnation 0."""
    made = Ledger(workers)
    for worker in range(workers):
        made.begin(worker, 0)
    return made


def test_in_order_and_once() -> None:
    train_state = ledger()
    assert [train_state.judge((0, 0, sequence), 5) for sequence in (0, 1, 2)] == ["accept"] * 3
    assert train_state.steps == [15, 0]
    assert train_state.rollouts == [3, 0]
    assert train_state.expected(0) == 3


def test_a_duplicate_has_no_second_effect() -> None:
    train_state = ledger()
    train_state.judge((0, 0, 0), 5)
    train_state.judge((0, 0, 1), 5)
    before = train_state.state_dict()
    assert [train_state.judge((0, 0, 0), 5), train_state.judge((0, 0, 1), 5)] == ["duplicate"] * 2
    assert all((before[name] == value).all() for name, value in train_state.state_dict().items())


def test_what_overtook_another_is_refused_until_its_turn() -> None:
    train_state = ledger()
    assert train_state.judge((0, 0, 1), 5) == "refuse"
    assert train_state.total_steps == 0
    assert train_state.expected(0) == 0
    assert [train_state.judge((0, 0, sequence), 5) for sequence in (0, 1)] == ["accept"] * 2


def test_a_newer_incarnation_counts_from_zero_and_the_older_one_is_refused() -> None:
    train_state = ledger()
    train_state.judge((0, 0, 0), 5)
    train_state.begin(0, 1)
    assert [train_state.judge((0, 0, 0), 5), train_state.judge((0, 0, 1), 5)] == ["refuse"] * 2
    assert train_state.judge((0, 1, 0), 7) == "accept"
    assert train_state.steps == [12, 0]
    assert train_state.judge((1, 0, 0), 1) == "accept"  # the others are not touched


def test_one_that_never_began_is_refused() -> None:
    assert Ledger(1).judge((0, 0, 0)) == "refuse"
    assert ledger().judge((0, 1, 0)) == "refuse"


@pytest.mark.parametrize("source", [(-1, 0, 0), (2, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_nonsense_is_refused(source: tuple[int, int, int]) -> None:
    train_state = ledger()
    train_state.judge((1, 0, 0))
    assert train_state.judge(source) == "refuse"
    assert Ledger(2).judge(source) == "refuse"


def test_to_begin_again_changes_nothing_and_to_go_back_is_an_error() -> None:
    train_state = ledger()
    train_state.begin(0, 3)
    train_state.judge((0, 3, 0), 5)
    train_state.begin(0, 3)
    assert train_state.expected(0) == 1
    with pytest.raises(ValueError, match="older"):
        train_state.begin(0, 2)


def test_a_dismissed_worker_is_refused_until_its_next_incarnation() -> None:
    train_state = ledger()
    train_state.judge((0, 0, 0), 5)
    train_state.dismiss(0)
    assert [train_state.judge((0, 0, 0)), train_state.judge((0, 0, 1), 5)] == ["refuse"] * 2
    train_state.begin(0, 0)
    assert not train_state.is_current(0, 0)  # only a newer one ends it
    train_state.begin(0, 1)
    assert train_state.judge((0, 1, 0), 5) == "accept"
    assert train_state.steps == [10, 0]


def test_a_restart_does_not_open_the_window_again() -> None:
    train_state = ledger()
    train_state.judge((0, 0, 0), 5)
    train_state.dismiss(1)
    again = Ledger(2)
    again.load_state_dict(train_state.state_dict())
    assert again.judge((0, 0, 0), 5) == "duplicate"
    assert again.judge((0, 0, 1), 5) == "accept"
    assert again.judge((1, 0, 0), 5) == "refuse"
    assert again.total_steps == 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("incarnations", np.array([0])),
        ("incarnations", np.array([0, -2])),
        ("sequences", np.array([0, -1])),
        ("sequences", np.array([9, 0])),
        ("steps", np.array([0.5, 1.0])),
        ("rollouts", [0, 0]),
        ("dismissed", np.array([0, 1])),
        ("dismissed", None),
    ],
)
def test_a_damaged_state_is_named_and_changes_nothing(name: str, value: object) -> None:
    train_state, state = ledger(), ledger().state_dict()
    with pytest.raises(ValueError, match=name):
        train_state.load_state_dict({**state, name: value})
    assert train_state.judge((0, 0, 0)) == "accept"


messages = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 4)), max_size=60)


@given(messages, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 1)), max_size=4))
def test_whatever_comes_each_source_counts_once_and_in_order(
    sources: list[tuple[int, int, int]], replaced: list[tuple[int, int]]
) -> None:
    train_state, accepted = ledger(), list[tuple[int, int, int]]()
    for at, source in enumerate(sources):
        for _, worker in (pair for pair in replaced if pair[0] == at):
            train_state.begin(worker, train_state.incarnations[worker] + 1)
        if train_state.judge(source, 1 + source[2]) == "accept":
            assert source[1] == train_state.incarnations[source[0]]
            accepted.append(source)
    assert len(set(accepted)) == len(accepted)
    assert train_state.total_steps == sum(1 + source[2] for source in accepted)
    for worker, incarnation in {source[:2] for source in accepted}:
        own = [source[2] for source in accepted if source[:2] == (worker, incarnation)]
        assert own == list(range(len(own)))
