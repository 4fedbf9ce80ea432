"""A spaces.json that leads elsewhere, is huge, means nothing, or describes spaces that cost much."""

import json
from functools import partial
from typing import Any

from tests.hostile.cases.forged import DEEP, LONG, WHOLE
from tests.hostile.cases.kinds import directory, empty, fifo
from tests.hostile.cases.links import dangling, same
from tests.hostile.cases.sizes import GB, sparse
from tests.hostile.place import Case, Place

FILE = "spaces.json"
READERS = ("policy", "resume", "eval", "runs")  # the commands that read or write it, and some that do not
REFUSED: dict[str, tuple[int, ...]] = {"policy": (2, 6), "eval": (0,), "runs": (0,)}
WIDE = {"type": "Box", "shape": [8_000_000], "dtype": "float64", "low": -1, "high": 1}
MANY = {"type": "Discrete", "n": 8_000_000, "start": 0}
PARTS = {"type": "Tuple", "parts": [{"type": "Discrete", "n": 2, "start": 0}] * 4_000}
OBSERVATIONS: dict[str, Any] = {
    "wide-box": WIDE,
    "wide-discrete": MANY,
    "many-parts": PARTS,
    "text": {"type": "Dict", "parts": [["\u001b[31m\nFORGED", {"type": "Text", "min_length": 0, "max_length": 9}]]},
    "long-number": {"type": "Discrete", "n": int(LONG), "start": 0},
    "overflow": {**WIDE, "shape": [2**23] * 32},
    "forged-name": {"type": "\u001b[31m\nFORGED"},
}
ACTIONS: dict[str, Any] = {
    "wide-box": WIDE,
    "wide-discrete": MANY,
    "many-dimensions": {"type": "MultiBinary", "shape": [1_000]},
    "tuple": PARTS,
}


def changed(fields: dict[str, Any], place: Place) -> None:
    """Other spaces than those of the run."""
    place.change(FILE, **fields)


def text(content: str | bytes, place: Place) -> None:
    """Another text."""
    place.write(FILE, content)


def nested(levels: int, place: Place) -> None:
    """A space in a space in a space."""
    inner = '{"type": "Tuple", "parts": [' * levels + '{"type": "Discrete", "n": 2, "start": 0}' + "]}" * levels
    place.write(FILE, f'{{"format": 1, "observation": {inner}, "action": {json.dumps(MANY)}}}')


def case(name: str, make: Any, codes: dict[str, tuple[int, ...]] | None = None) -> Case:
    """A case for the commands that have to do with the file."""
    return Case(f"spaces-{name}", make, codes=REFUSED if codes is None else codes, only=READERS)


CASES = [
    case("link-to-another-run", partial(same, FILE)),
    case("link-to-nothing", partial(dangling, FILE)),
    case("fifo", partial(fifo, FILE)),
    case("folder", partial(directory, FILE), {**REFUSED, "resume": (5,)}),
    case("empty", partial(empty, FILE)),
    case("sparse", partial(sparse, FILE, 100 * GB)),
    case("deep", partial(text, '{"format": 1, "observation": ' + DEEP)),
    case("nested-900", partial(nested, 900)),
    case("nested-17", partial(nested, 17)),
    case("stack", partial(changed, {"stack": 4})),
    case("not-kept", partial(changed, {"not_kept": "\u001b[31m\nFORGED " * 1_000})),
    *(case(f"is-{name}", partial(text, content)) for name, content in WHOLE.items()),
    *(case(name, partial(changed, {"observation": space})) for name, space in OBSERVATIONS.items()),
    *(case(f"action-{name}", partial(changed, {"action": space})) for name, space in ACTIONS.items()),
]
