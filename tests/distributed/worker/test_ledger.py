"""The ledger accepts every rollout once, in order, of the newest incarnation only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.distributed.worker.ledger import Ledger


def make_ledger(workers: int = 2) -> Ledger:
    """A ledger whose workers have all begun incarnation 0."""
    made = Ledger(workers)
    for worker in range(workers):
        made.begin(worker, 0)
    return made


def test_rollouts_are_accepted_in_order() -> None:
    ledger = make_ledger()
    assert [ledger.admit((0, 0, sequence), 5) for sequence in (0, 1, 2)] == ["accept"] * 3
    assert ledger.steps == [15, 0]
    assert ledger.rollouts == [3, 0]
    assert ledger.sequences[0] == 3


def test_a_duplicate_has_no_second_effect() -> None:
    ledger = make_ledger()
    ledger.admit((0, 0, 0), 5)
    ledger.admit((0, 0, 1), 5)
    before = ledger.state_dict()
    assert [ledger.admit((0, 0, 0), 5), ledger.admit((0, 0, 1), 5)] == ["duplicate"] * 2
    assert all((before[name] == value).all() for name, value in ledger.state_dict().items())


def test_a_rollout_after_a_gap_is_refused() -> None:
    ledger = make_ledger()
    assert ledger.admit((0, 0, 1), 5) == "refuse"
    assert sum(ledger.steps) == 0
    assert ledger.sequences[0] == 0
    assert [ledger.admit((0, 0, sequence), 5) for sequence in (0, 1)] == ["accept"] * 2


def test_a_newer_incarnation_counts_from_zero_and_the_older_one_is_refused() -> None:
    ledger = make_ledger()
    ledger.admit((0, 0, 0), 5)
    ledger.begin(0, 1)
    assert [ledger.admit((0, 0, 0), 5), ledger.admit((0, 0, 1), 5)] == ["refuse"] * 2
    assert ledger.admit((0, 1, 0), 7) == "accept"
    assert ledger.steps == [12, 0]
    assert ledger.admit((1, 0, 0), 1) == "accept"  # the others are not touched


def test_a_worker_that_was_never_started_is_refused() -> None:
    assert Ledger(1).admit((0, 0, 0)) == "refuse"
    assert make_ledger().admit((0, 1, 0)) == "refuse"


@pytest.mark.parametrize("source", [(-1, 0, 0), (2, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_an_invalid_source_is_refused(source: tuple[int, int, int]) -> None:
    ledger = make_ledger()
    ledger.admit((1, 0, 0))
    assert ledger.admit(source) == "refuse"
    assert Ledger(2).admit(source) == "refuse"


def test_begin_is_idempotent_and_refuses_older_incarnations() -> None:
    ledger = make_ledger()
    ledger.begin(0, 3)
    ledger.admit((0, 3, 0), 5)
    ledger.begin(0, 3)
    assert ledger.sequences[0] == 1
    with pytest.raises(ValueError, match="older"):
        ledger.begin(0, 2)


def test_a_restart_accepts_no_rollout_twice() -> None:
    ledger = make_ledger()
    ledger.admit((0, 0, 0), 5)
    ledger.begin(1, 1)
    again = Ledger(2)
    again.load_state_dict(ledger.state_dict())
    assert again.admit((0, 0, 0), 5) == "duplicate"
    assert again.admit((0, 0, 1), 5) == "accept"
    assert again.admit((1, 0, 0), 5) == "refuse"
    assert sum(again.steps) == 10


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
    ledger, state = make_ledger(), make_ledger().state_dict()
    with pytest.raises(ValueError, match=name):
        ledger.load_state_dict({**state, name: value})
    assert ledger.admit((0, 0, 0)) == "accept"


messages = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 4)), max_size=60)


@given(messages, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 1)), max_size=4))
def test_any_order_of_messages_counts_each_source_once_and_in_order(
    sources: list[tuple[int, int, int]], replaced: list[tuple[int, int]]
) -> None:
    ledger, accepted = make_ledger(), list[tuple[int, int, int]]()
    for at, source in enumerate(sources):
        for _, worker in (pair for pair in replaced if pair[0] == at):
            ledger.begin(worker, ledger.incarnations[worker] + 1)
        if ledger.admit(source, 1 + source[2]) == "accept":
            assert source[1] == ledger.incarnations[source[0]]
            accepted.append(source)
    assert len(set(accepted)) == len(accepted)
    assert sum(ledger.steps) == sum(1 + source[2] for source in accepted)
    for worker, incarnation in {source[:2] for source in accepted}:
        own = [source[2] for source in accepted if source[:2] == (worker, incarnation)]
        assert own == list(range(len(own)))
