"""Checkpoints of older versions: settings that did not exist yet, other names of layers, lanes with the same rows."""

import re
from collections.abc import Iterable
from typing import Any

from qfleet.data import Array, State
from qfleet.data.state_reader import saved_count, saved_numbers
from qfleet.errors import UsageError
from qfleet.plan.draft import Assignment, Draft
from qfleet.replay import Replay
from qfleet.save import Checkpoint, unpack_tensors

SPARE_BYTES = 1 << 20
# Hidden layers were bare before they could be normalised; a convolution had no normalisation between it and its ReLU.
HIDDEN = re.compile(r"(head\.\w+\.hidden)\.(weight|bias)$")
TORSO = re.compile(r"(torso\.layers)\.(\d+)\.(weight|bias)$")


def with_new_settings(saved: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's settings, and the defaults of settings that did not exist yet, which change nothing."""
    draft = Draft()
    try:
        draft.apply_layer(Assignment(path, value, "checkpoint") for path, value in saved.items())
    except UsageError:  # a setting that this version does not have: the comparison with the plan reports it
        return saved
    return {**draft.values, **saved}


def max_file_bytes(arrays: Iterable[Array]) -> int:
    """The largest size of a file with these arrays: older versions stored a little more, and names need some bytes."""
    return 2 * sum(array.nbytes for array in arrays) + SPARE_BYTES


def read_arrays(checkpoint: Checkpoint, file: str, max_bytes: int) -> dict[str, Array]:
    """The arrays of one file, under the present names of layers."""
    arrays = unpack_tensors(checkpoint.read(file, max_bytes))
    if not any(HIDDEN.search(name) for name in arrays):
        return arrays
    torso = str(checkpoint.meta.get("plan", {}).get("net.torso.type"))
    return {current_layer_name(name, torso): value for name, value in arrays.items()}


def current_layer_name(name: str, torso: str) -> str:
    """The present name of a layer; a torso of the user's own keeps its names."""
    name = HIDDEN.sub(r"\1.linear.\2", name)
    if torso == "mlp":
        return TORSO.sub(r"\1.\2.linear.\3", name)
    if torso == "nature":
        return TORSO.sub(lambda found: f"{found[1]}.{int(found[2]) * 3 // 2}.{found[3]}", name)
    return name


def with_spans(state: State, replay: Replay) -> State:
    """A replay's state with the rows of each group of lanes; once all lanes had the same rows."""
    if "spans" in state:
        return state
    row = saved_count(state, "row")
    stride = replay.cut.stride
    first = saved_numbers(state, "first", (replay.lanes,), max(0, row - replay.store.rows), row)
    spans = [[0, replay.lanes, saved_count(state, "first_row", row), row]]
    return {**state, "spans": spans, "first": -(-first // stride) * stride}


def lacks_values(batch_source: State) -> bool:
    """Was fresh experience saved without the values of its actions? Older versions recomputed them."""
    return "learned_items" in batch_source and "told" not in batch_source
