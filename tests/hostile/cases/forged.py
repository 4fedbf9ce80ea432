"""Files of a run with the right form and wrong content: types, numbers, nesting, seals."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import safetensors.numpy

from tests.hostile.place import Case, Place

DOCUMENTS = ("status.json", "best.json", "provenance.json", "trust.json")
LONG = "9" * 4000
DEEP = "[" * 100_000
# A value of each kind that a field may have instead of its own.
VALUES: dict[str, Any] = {
    "none": None,
    "list": [[], {}],
    "dict": {"a": {"b": []}},
    "text": "x",
    "surrogate": "\ud800",
    "big": 10**300,
    "long": int(LONG),
    "negative": -1,
    "fraction": 0.5,
    "true": True,
    "nothing": "",
}
WHOLE = {
    "nan": '{"mean": NaN, "state": NaN, "step": NaN, "env_steps": Infinity, "score": -Infinity}',
    "huge-number": f'{{"mean": 1e999999, "env_steps": {LONG}, "step": {LONG}, "score": {{"mean": {LONG}}}}}',
    "deep": '{"a": ' + DEEP,
    "deep-closed": '{"a": ' + "[" * 900 + "]" * 900 + "}",
    "list": "[1, 2, 3]",
    "text": '"done"',
    "number": LONG,
    "null": "null",
    "duplicates": '{"state": "done", "state": "running", "mean": 1, "mean": "x", "step": 0, "step": -1}',
    "surrogates": '{"state": "\\ud800", "reason": "\\udfff", "mean": 1, "resume": "\\ud800"}',
    "nuls": '{"state": "\\u0000", "reason": "\\u0000"}',
    "not-utf8": b"\xff\xfe{\x00}\x00",
    "byte-order-mark": b"\xef\xbb\xbf{}",
    "binary": bytes(range(256)),
}
ROWS = {
    "types": '{"kind":"eval","mean":"x","env_steps":{},"low":[],"high":null,"seconds":"y","episodes":-1}',
    "progress-types": '{"kind":"progress","return_mean":[],"env_steps":"a","loss":{},"steps_per_second":"z"}',
    "nan": '{"kind":"eval","mean":NaN,"env_steps":Infinity,"low":-Infinity,"high":NaN}',
    "long": f'{{"kind":"eval","mean":{LONG},"env_steps":{LONG}}}',
    "big": '{"kind":"eval","mean":1e308,"env_steps":1e308,"low":-1e308,"high":1e308}',
    "kind-list": '{"kind":["eval"],"split":{"a":1},"mean":1}',
    "deep": '{"kind":"eval","mean":' + "[" * 50_000,
    "negative": '{"kind":"eval","mean":1,"env_steps":-9223372036854775809}',
    "returns": '{"kind":"eval","mean":1,"env_steps":5,"returns":"abc","low":1,"high":2}',
}


def whole(name: str, text: str | bytes, place: Place) -> None:
    """Another document."""
    place.write(name, text)


def every_field(name: str, value: Any, place: Place) -> None:
    """Every field of a document, and of what is in it, with the same wrong value."""
    place.write(name, json.dumps(dict.fromkeys(place.read(name), value)))


def inner_fields(name: str, value: Any, place: Place) -> None:
    """The fields of documents inside a document, with a wrong value."""
    document = place.read(name)
    changed = {key: dict.fromkeys(each, value) if isinstance(each, dict) else each for key, each in document.items()}
    place.write(name, json.dumps(changed))


def row(text: str, place: Place) -> None:
    """A forged row after the real ones."""
    with (place.run / "metrics.jsonl").open("a") as file:
        file.write(text + "\n")
    with (place.run / "events.jsonl").open("a") as file:
        file.write(text.replace('"eval"', '"warning"') + "\n")


def meta(value: Any, place: Place) -> None:
    """A manifest whose notes are of another form, sealed."""
    place.seal(meta=value)


def raw_manifest(text: str, place: Place) -> None:
    """A manifest of another form."""
    (place.newest / "manifest.json").write_text(text)


def walk(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree with every leaf changed."""
    if isinstance(tree, dict) and "$array" not in tree:
        return {key: walk(each, change) for key, each in tree.items()}
    return [walk(each, change) for each in tree] if isinstance(tree, list) else change(tree)


def state_leaves(value: Any, place: Place) -> None:
    """Every plain value of the saved state is another, sealed."""
    path = place.newest / "state.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(walk(tree, lambda leaf: leaf if isinstance(leaf, dict) else value)))
    place.seal()


def state_arrays(change: Callable[[Any], Any], file: str, place: Place) -> None:
    """Every array of a file is another, sealed."""
    path = place.newest / file
    arrays = safetensors.numpy.load_file(path)
    path.write_bytes(
        safetensors.numpy.save({name: np.ascontiguousarray(change(each)) for name, each in arrays.items()})
    )
    place.seal()


def state_text(text: str, place: Place) -> None:
    """Another saved state, sealed."""
    (place.newest / "state.json").write_text(text)
    place.seal()


def other_step(place: Place) -> None:
    """A checkpoint under the name of a later step."""
    place.newest.rename(place.newest.with_name("step_999999999999"))


def sealed_later(place: Place) -> None:
    """A checkpoint of the last step that a name can have, sealed."""
    later = place.newest.with_name("step_999999999999")
    place.newest.rename(later)
    place.seal(later, step=999_999_999_999)


ARRAYS: dict[str, Callable[[Any], Any]] = {
    "empty": lambda array: array[..., :0] if array.ndim else array,
    "wider": lambda array: np.zeros((*array.shape, 3), array.dtype),
    "longer": lambda array: np.zeros((1000, *array.shape[1:]), array.dtype),
    "bytes": lambda array: array.astype(np.uint8),
    "nan": lambda array: np.full_like(array, np.nan) if array.dtype.kind == "f" else array,
    "largest": lambda array: np.full_like(array, np.iinfo(array.dtype).max) if array.dtype.kind in "iu" else array,
    "negative": lambda array: np.full_like(array, -1) if array.dtype.kind == "i" else array,
}
TENSORS = ("model.safetensors", "optim.safetensors", "state.safetensors")
STATES = {
    "deep": '{"a": ' + DEEP,
    "list": "[]",
    "empty": "{}",
    "nan": '{"line": NaN}',
    "unknown": '{"a": {"$array": "x"}}',
}
MANIFESTS = {
    "deep": DEEP,
    "long-number": f'{{"format": {LONG}}}',
    "list": "[]",
    "surrogate": '{"files": {"\\ud800": 1}}',
}
FEW = {name: VALUES[name] for name in ("none", "list", "dict", "surrogate", "long", "negative")}
CASES = [
    *(Case(f"forged-{n}-is-{w}", partial(whole, n, t)) for n in DOCUMENTS[:2] for w, t in WHOLE.items()),
    *(Case(f"forged-{n}-is-{w}", partial(whole, n, WHOLE[w])) for n in DOCUMENTS[2:] for w in ("deep", "huge-number")),
    *(Case(f"forged-status.json-fields-{w}", partial(every_field, "status.json", v)) for w, v in VALUES.items()),
    *(Case(f"forged-best.json-fields-{w}", partial(every_field, "best.json", v)) for w, v in FEW.items()),
    *(Case(f"forged-provenance.json-fields-{w}", partial(every_field, "provenance.json", v)) for w, v in FEW.items()),
    *(Case(f"forged-status-inner-{w}", partial(inner_fields, "status.json", v)) for w, v in FEW.items()),
    *(Case(f"forged-row-{w}", partial(row, text)) for w, text in ROWS.items()),
    *(Case(f"forged-meta-{w}", partial(meta, v)) for w, v in (("empty", {}), ("types", {"versions": [], "plan": 3}))),
    *(Case(f"forged-manifest-{w}", partial(raw_manifest, text)) for w, text in MANIFESTS.items()),
    *(Case(f"forged-state-{w}", partial(state_text, text)) for w, text in STATES.items()),
    *(Case(f"forged-state-leaves-{w}", partial(state_leaves, v)) for w, v in VALUES.items() if w != "surrogate"),
    *(Case(f"forged-{n}-{w}", partial(state_arrays, c, n)) for n in TENSORS for w, c in ARRAYS.items()),
    Case("forged-step-name", other_step),
    Case("forged-last-step", sealed_later),
]
