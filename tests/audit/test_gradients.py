"""The audit of several learners: what is as promised passes, and every planted fault is found."""

from collections.abc import Callable
from typing import Any

import pytest

from qfleet.audit.checks import check_records
from qfleet.audit.gradients import check_gradients

Note = dict[str, Any]


def note(op: str, group: int, **fields: Any) -> Note:
    return {"role": "team", "op": op, "at": 0.0, "group": group, **fields}


def formed(group: int, learners: list[int], updates: int, *, in_step: bool = True) -> Note:
    return note("formed", group, learners=learners, updates=updates, in_step=in_step, exact=True)


def dealt(group: int, update: int, learner: int, items: int = 11) -> Note:
    return note("dealt", group, update=update, learner=learner, items=items)


def made(group: int, update: int, own: int = 11, *, finite: bool = True) -> Note:
    return note("made", group, update=update, own=own, items=33, finite=finite)


def learned(group: int, learner: int) -> Note:
    return note("learned", group, learner=learner)


def held(group: int, versions: list[int], taken: list[int]) -> Note:
    return note("held", group, versions=versions, taken=taken)


def whole(group: int, update: int, *, finite: bool = True) -> list[Note]:
    """An update of three learners."""
    orders = [dealt(group, update, learner) for learner in (1, 2)]
    return [*orders, made(group, update, finite=finite), learned(group, 1), learned(group, 2)]


def good() -> list[Note]:
    """One is lost in the third update, which two make; one alone; a server; back at a checkpoint."""
    return [
        formed(1, [1, 2], 0),
        *whole(1, 1),
        *whole(1, 2, finite=False),
        *whole(1, 2),
        dealt(1, 3, 1),
        formed(2, [2], 2),
        dealt(2, 3, 2, 16),
        made(2, 3, 17),
        made(0, 4, 33),
        formed(3, [1, 2], 4),
        *whole(3, 5),
        *whole(3, 6),
        held(3, [2, 2], [6, 6]),
        note("began", 0),  # resumed by another process, which counts its groups anew
        formed(1, [1, 2], 2),
        *whole(1, 3),
        formed(4, [1, 2], 2),
        *whole(4, 3),
    ]


def first(notes: list[Note], op: str) -> int:
    return next(at for at, found in enumerate(notes) if found["op"] == op)


def without(op: str) -> Callable[[list[Note]], None]:
    return lambda notes: notes.pop(first(notes, op)) and None


def twice(op: str) -> Callable[[list[Note]], None]:
    return lambda notes: notes.insert(first(notes, op), dict(notes[first(notes, op)]))


def other(op: str, **fields: Any) -> Callable[[list[Note]], None]:
    return lambda notes: notes[first(notes, op)].update(fields)


FAULTS: dict[str, tuple[Callable[[list[Note]], None], str]] = {
    "an update twice": (twice("made"), "update 1 was made after 1"),
    "an update lost": (without("made"), "a share for update 2 after 0"),
    "a part lost": (without("dealt"), "update 1: 22 of 33 items"),
    "a part twice": (twice("dealt"), "update 1: 44 of 33 items"),
    "a gradient twice": (twice("learned"), "learned more often"),
    "one of a group that is over": (lambda notes: notes.append(learned(3, 1)), "after group 4 was formed"),
    "a stranger": (other("dealt", learner=7), "learner 7 is not in group 1"),
    "a shard that made a step too many": (other("held", versions=[3, 2]), "shard 0 in group 3 made 3 steps"),
    "a shard that took one twice": (other("held", taken=[7, 6]), "took 7 gradients"),
    "a shard that lost one": (other("held", taken=[6, 5]), "took 5 gradients"),
    "an older group": (lambda notes: notes.append(formed(3, [1], 3)), "group 3 came after 4"),
}


def test_a_correct_history_passes() -> None:
    assert check_gradients(good()) == []
    assert check_records(good()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_found(fault: str) -> None:
    notes, (change, text) = good(), FAULTS[fault]
    change(notes)
    found = check_gradients(notes)
    assert {violation.rule for violation in found} == {"gradient"}
    assert any(text in violation.text for violation in found), found


def test_gradients_in_flight_are_no_violation() -> None:
    loose = [formed(1, [1, 2], 0, in_step=False), dealt(1, 1, 1), dealt(1, 1, 2), made(1, 1), learned(1, 2)]
    for taken in (2, 3):  # the word of learner 1 is still due
        assert check_gradients([*loose, held(1, [taken], [taken])]) == []
    for taken in (1, 4):
        assert check_gradients([*loose, held(1, [taken], [taken])]) != []
