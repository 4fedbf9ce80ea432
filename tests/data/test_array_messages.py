"""Rollouts, batches and priorities are unpacked as they were packed; what does not fit the spec is refused.

Shapes: T rows, B lanes, N items, W rows of a window, A actions.
"""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.data import Array, Batch, Rollout, Sequences, Spec
from qfleet.data.array_messages import (
    RolloutHeader,
    as_batch,
    as_priorities,
    as_rollout,
    batch_arrays,
    batch_form,
    pack_rollout,
    rollout_bytes,
    rollout_parts,
    unpack_rollout,
)
from qfleet.data.wire_format import Message, pack, to_bytes, unpack

LIMIT = 1 << 20
SPECS = st.builds(
    Spec,
    st.sampled_from([(3,), (2, 2), ()]),
    st.sampled_from(["float32", "uint8", "float64", "int64"]),
    st.sampled_from([(4,), (2, 3)]),
    stack=st.sampled_from([1, 4]),
    masked=st.booleans(),
    state=st.sampled_from([(), (2,)]),
)


class Note(Message):
    """A message that only carries arrays."""


PLAIN = Spec((3,), "float32", (4,), masked=True, state=(2,))


def filled(rng: np.random.Generator, dtype: str, *shape: int, high: int = 2) -> Array:
    return rng.integers(0, high, shape).astype(dtype)


def make_rollout(spec: Spec, rows: int = 3, lanes: int = 2, seed: int = 0, *, values: bool = True) -> Rollout:
    rng = np.random.default_rng(seed)
    return Rollout(
        filled(rng, spec.dtype, rows, lanes, *spec.obs, high=100),
        filled(rng, "int64", rows, lanes, high=spec.num_actions),
        filled(rng, "float32", rows, lanes),
        filled(rng, "float32", rows, lanes),
        filled(rng, "bool", rows, lanes),
        source=(1, 2, 2**40),
        version=2**50,
        mask=filled(rng, "bool", rows, lanes, spec.num_actions) if spec.masked else None,
        state=filled(rng, "float32", rows, lanes, *spec.state) if spec.state else None,
        value=filled(rng, "float32", rows, lanes, 2) if values else None,
        probability=np.full((rows, lanes), 0.5) if values else None,
        finished=((1.5, 3), (-2.0, 1)),
        ends=(0, rows - 1),
    )


def make_batch(spec: Spec, num: int = 5) -> Batch:
    rng = np.random.default_rng(1)
    numbers: list[Array] = [filled(rng, "float32", num) for _ in range(3)]
    masks = [filled(rng, "bool", num, spec.num_actions) if spec.masked else None for _ in range(2)]
    obs, next_obs = (filled(rng, spec.dtype, num, *spec.input_shape, high=100) for _ in range(2))
    action = filled(rng, "int64", num, high=spec.num_actions)
    return Batch(obs, action, numbers[0], numbers[1], next_obs, numbers[2], np.arange(num), *masks)


def make_sequences(spec: Spec, rows: int = 6, learned: int = 4, num: int = 5) -> Sequences:
    rng = np.random.default_rng(2)
    return Sequences(
        filled(rng, spec.dtype, rows, num, *spec.input_shape, high=100),
        filled(rng, "int64", rows, num, high=spec.num_actions),
        filled(rng, "float32", rows, num),
        filled(rng, "bool", rows, num),
        filled(rng, "float32", num, *spec.state),
        filled(rng, "float32", learned, num),
        filled(rng, "float32", learned, num),
        filled(rng, "int64", learned, num, high=rows),
        filled(rng, "float32", num),
        np.arange(num),
        filled(rng, "bool", rows, num, spec.num_actions) if spec.masked else None,
    )


def same(one: Any, other: Any) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)]
    return type(one) is type(other) and all(
        (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) if isinstance(a, np.ndarray) else a == b
        for a, b in pairs
    )


@given(SPECS, st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_rollouts_are_unpacked_as_packed(spec: Spec, rows: int, lanes: int, values: bool, compressed: bool) -> None:
    rollout = make_rollout(spec, rows, lanes, values=values)
    rollout = replace(rollout, finished=rollout.finished[: rows * lanes], ends=rollout.ends[: rows * lanes])
    message = pack_rollout(rollout, compress=("obs",) if compressed else ())
    assert same(unpack_rollout(message, spec, lanes, limit_bytes=LIMIT), rollout)


@given(SPECS, st.integers(1, 4), st.integers(1, 3))
def test_rollout_bytes_is_the_length_of_the_largest_message(spec: Spec, rows: int, lanes: int) -> None:
    finished = ((1e300, 2**60),) * (rows * lanes)
    largest: dict[str, Any] = {
        "finished": finished,
        "ends": (rows - 1,) * len(finished),
        "source": (2**62,) * 3,
        "version": 2**62,
    }
    rollout = replace(make_rollout(spec, rows, lanes), **largest)
    room = rollout_bytes(spec, lanes, rows)
    assert pack(*rollout_parts(rollout), memoryview(bytearray(room))) == room


@given(SPECS, st.booleans())
def test_batches_are_unpacked_as_packed(spec: Spec, sequences: bool) -> None:
    batch = make_sequences(spec) if sequences else make_batch(spec)
    _, arrays = unpack(to_bytes(Note(), batch_arrays(batch)), Note, limit_bytes=LIMIT)
    assert batch_form(batch) == ("sequences" if sequences else "steps")
    assert same(as_batch(batch_form(batch), arrays, spec), batch)


def test_priorities_are_unpacked_as_packed() -> None:
    ids, priority = np.array([5, 7], np.int64), np.array([0.5, 2.0], np.float32)
    message = to_bytes(Note(), {"ids": ids, "priority": priority})
    found = as_priorities(unpack(message, Note, limit_bytes=LIMIT)[1])
    assert [part.tolist() for part in found] == [[5, 7], [0.5, 2.0]]


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "lanes": ("obs", {"obs": np.zeros((3, 4, 3), np.float32)}),
    "dtype": ("obs", {"obs": np.zeros((3, 2, 3), np.float64)}),
    "shape": ("obs", {"obs": np.zeros((3, 2, 4), np.float32)}),
    "dimensions": ("reward", {"reward": np.zeros(3, np.float32)}),
    "rows": ("reward", {"reward": np.zeros((4, 2), np.float32)}),
    "an action too many": ("action", {"action": np.full((3, 2), 4)}),
    "an action too few": ("action", {"action": np.full((3, 2), -1)}),
    "masks missing": ("mask", {"mask": None}),
    "memory missing": ("state", {"state": None}),
    "reward missing": ("reward", {"reward": None}),
    "episodes": ("episodes", {"finished": ((1.0, 1),) * 7, "ends": (0,) * 7}),
    "an end nowhere": ("ends", {"ends": (0, 3)}),
    "an end missing": ("ends", {"ends": (0,)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rollout_that_does_not_fit_is_refused(name: str) -> None:
    match, changes = WRONG[name]
    as_rollout(*rollout_parts(make_rollout(PLAIN)), PLAIN, 2)
    with pytest.raises(ValueError, match=match):
        as_rollout(*rollout_parts(replace(make_rollout(PLAIN), **changes)), PLAIN, 2)


WRONG_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "source": ("length 3", {"source": (1, 2)}),
    "negative source": (">= 0", {"source": (1, -2, 3)}),
    "a source of text": ("Expected `int`, got `str`", {"source": (1, 2, "3")}),
    "version": ("Expected `int`, got `str`", {"version": "new"}),
    "a version that is a fraction": ("Expected `int`, got `float`", {"version": 1.5}),
    "a version that is a truth value": ("Expected `int`, got `bool`", {"version": True}),
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_a_wrong_description_of_a_rollout_is_refused(name: str) -> None:
    match, changes = WRONG_HEADERS[name]
    message = pack_rollout(replace(make_rollout(PLAIN), **changes))
    with pytest.raises(ValueError, match=match):
        unpack_rollout(message, PLAIN, 2, limit_bytes=LIMIT)


def test_a_message_of_another_kind_is_not_a_rollout() -> None:
    _, arrays = rollout_parts(make_rollout(PLAIN))
    unpack_rollout(to_bytes(RolloutHeader((1, 2, 3), 0), arrays), PLAIN, 2, limit_bytes=LIMIT)
    with pytest.raises(ValueError, match="Invalid value 'Note'"):
        unpack_rollout(to_bytes(Note(), arrays), PLAIN, 2, limit_bytes=LIMIT)


def test_unexpected_arrays_and_kinds_are_refused() -> None:
    bare = replace(PLAIN, masked=False)
    with pytest.raises(ValueError, match=r"\['mask'\] not expected"):
        as_rollout(*rollout_parts(make_rollout(PLAIN)), bare, 2)
    with pytest.raises(ValueError, match="empty"):
        as_rollout(*rollout_parts(replace(make_rollout(PLAIN, rows=0), finished=(), ends=())), PLAIN, 2)
    with pytest.raises(ValueError, match="missing"):
        as_batch("steps", {}, PLAIN)
    with pytest.raises(ValueError, match="missing"):
        as_batch("steps", batch_arrays(make_sequences(PLAIN)), PLAIN)
    with pytest.raises(ValueError, match="missing"):
        as_batch("sequences", batch_arrays(make_batch(PLAIN)), PLAIN)
    with pytest.raises(ValueError, match="missing"):
        as_priorities(batch_arrays(make_batch(PLAIN)))
    with pytest.raises(ValueError, match="missing"):
        as_batch("steps", rollout_parts(make_rollout(PLAIN))[1], PLAIN)


def test_batches_that_do_not_fit_are_refused() -> None:
    for batch, changes, match in (
        (make_batch(PLAIN), {"weight": np.zeros(6, np.float32)}, "weight"),
        (make_batch(PLAIN), {"action": np.full(5, 4)}, "action"),
        (make_batch(PLAIN), {"ids": np.zeros(5, np.int32)}, "ids"),
        (make_sequences(PLAIN), {"ahead": np.full((4, 5), 6)}, "ahead"),
        (make_sequences(PLAIN), {"discount": np.zeros((3, 5), np.float32)}, "discount"),
    ):
        as_batch(batch_form(batch), batch_arrays(batch), PLAIN)
        with pytest.raises(ValueError, match=match):
            as_batch(batch_form(batch), batch_arrays(batch) | changes, PLAIN)


@pytest.mark.parametrize("priority", [np.nan, np.inf, -1.0])
def test_priorities_must_be_finite_and_not_negative(priority: float) -> None:
    with pytest.raises(ValueError, match="priority"):
        as_priorities({"ids": np.zeros(2, np.int64), "priority": np.array([1.0, priority], np.float32)})


# The numbers of log.info


def with_info(rollout: Rollout, *numbers: float) -> Rollout:
    return replace(rollout, finished=tuple((*episode, *numbers) for episode in rollout.finished))


def test_a_rollout_with_info_comes_through_and_nan_too() -> None:
    rollout = with_info(make_rollout(PLAIN), 0.5, float("nan"), float("inf"))
    assert rollout.finished
    found = unpack_rollout(pack_rollout(rollout), PLAIN, 2, limit_bytes=LIMIT, num_info=3)
    assert repr(found.finished) == repr(rollout.finished)
    empty = replace(rollout, finished=(), ends=())
    assert unpack_rollout(pack_rollout(empty), PLAIN, 2, limit_bytes=LIMIT, num_info=3).finished == ()


@pytest.mark.parametrize(("sent", "expected"), [((0.5,), 0), ((0.5,), 2), ((), 1)])
def test_a_rollout_with_other_numbers_of_info_is_refused(sent: tuple[float, ...], expected: int) -> None:
    rollout = with_info(make_rollout(PLAIN), *sent)
    with pytest.raises(ValueError, match="info"):
        unpack_rollout(pack_rollout(rollout), PLAIN, 2, limit_bytes=LIMIT, num_info=expected)


def test_a_ring_has_room_for_the_info_of_every_episode() -> None:
    rollout = make_rollout(PLAIN, rows=3)
    ends = tuple(row for row in range(3) for _ in range(2))
    full = replace(rollout, finished=tuple((1.0, 1, 2.0, 3.0) for _ in ends), ends=ends)
    assert len(pack_rollout(full)) <= rollout_bytes(PLAIN, 2, 3, 2)
    assert rollout_bytes(PLAIN, 2, 3, 2) >= rollout_bytes(PLAIN, 2, 3) + 8 * 2 * 6


@pytest.mark.parametrize("wrong", [0.0, -0.5, 1.5])
def test_a_probability_of_a_step_is_above_0_and_at_most_1(wrong: float) -> None:
    rollout = make_rollout(PLAIN)
    assert rollout.probability is not None
    rollout.last[:] = False
    rollout.probability[1, 0] = np.nan  # unknown
    assert as_rollout(*rollout_parts(rollout), PLAIN, 2).probability is not None
    rollout.probability[1, 0] = wrong
    with pytest.raises(ValueError, match="probability"):
        as_rollout(*rollout_parts(rollout), PLAIN, 2)
    rollout.last[1, 0] = True  # no action was taken
    as_rollout(*rollout_parts(rollout), PLAIN, 2)
