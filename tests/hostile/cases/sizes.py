"""Files that are far too large: sparse, long, or declared to be."""

import json
import struct
from functools import partial

from tests.hostile.cases.links import placed
from tests.hostile.place import Case, Place

MB = 1 << 20
GB = 1 << 30


def sparse(name: str, size: int, place: Place) -> None:
    """A file of zeros that takes no space on the disk."""
    path = place.clear(placed(place, name))
    with path.open("wb") as file:
        file.truncate(size)


def grown(name: str, size: int, place: Place) -> None:
    """The file as it is, and zeros after it."""
    with (place.run / placed(place, name)).open("r+b") as file:
        file.truncate(size)


def lines(name: str, line: bytes, size: int, place: Place) -> None:
    """One short line over and over."""
    block = line * (MB // len(line))
    with place.clear(placed(place, name)).open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)


def one_line(name: str, size: int, place: Place) -> None:
    """One row that never ends."""
    with place.clear(name).open("wb") as file:
        file.write(b'{"kind":"progress","reason":"')
        for _ in range(size // MB):
            file.write(b"x" * MB)


def sealed_sparse(name: str, size: int, place: Place) -> None:
    """A sparse file in a checkpoint, sealed: its size and hash are right."""
    sparse(name, size, place)
    place.seal()


def header_only(count: int, place: Place) -> None:
    """A tensor file whose header declares an array of many bytes that are not there, or are a hole."""
    header = json.dumps({"torso.0.weight": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    path = place.newest / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(min(8 + len(header) + 4 * count, 2 * GB))
    place.seal()


def long_header(place: Place) -> None:
    """A tensor file whose header is said to be longer than any memory."""
    (place.newest / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    place.seal()


def bomb(place: Place) -> None:
    """A compressed segment that unpacks to far more than it should."""
    from qfleet.save.segments import compress

    segment = next((place.newest / "replay").iterdir())
    segment.write_bytes(compress(bytes(GB)))
    place.seal()


def many_files(folder: str, count: int, place: Place) -> None:
    """So many files that a list of them is long."""
    (place.run / folder).mkdir(exist_ok=True)
    for number in range(count):
        (place.run / folder / f"file-{number}").touch()


def many_checkpoints(place: Place) -> None:
    """Thousands of empty checkpoint folders, all newer than the real one."""
    for number in range(3000):
        (place.run / "checkpoints" / f"step_{10**9 + number:012d}").mkdir()


def deep_folders(place: Place) -> None:
    """A path that is longer than the system takes."""
    path = place.run / "logs"
    path.mkdir(exist_ok=True)
    for _ in range(300):
        path = path / "d"
        path.mkdir()


def long_manifest(place: Place) -> None:
    """A manifest of many files that are not there."""
    from qfleet.save.manifest import FileEntry

    place.seal(files={f"file-{number}": FileEntry(10**15, "0" * 64) for number in range(50_000)})


SPARSE = {"run.toml": 100 * MB, "status.json": GB, "best.json": GB, "events.jsonl": GB, "provenance.json": GB}
CASES = [
    *(Case(f"sparse-{name}", partial(sparse, name, size)) for name, size in SPARSE.items()),
    Case("sparse-metrics-500-MB", partial(sparse, "metrics.jsonl", 500 * MB)),
    Case("sparse-metrics-1-TB", partial(sparse, "metrics.jsonl", 1 << 40)),
    Case("grown-metrics-500-MB", partial(grown, "metrics.jsonl", 500 * MB)),
    Case("grown-events-500-MB", partial(grown, "events.jsonl", 500 * MB)),
    Case("lines-metrics-200-MB", partial(lines, "metrics.jsonl", b"{}\n", 200 * MB)),
    Case("lines-events-200-MB", partial(lines, "events.jsonl", b"{}\n", 200 * MB)),
    Case(
        "lines-metrics-of-rows", partial(lines, "metrics.jsonl", b'{"kind":"eval","mean":1,"env_steps":1}\n', 60 * MB)
    ),
    Case("lines-metrics-empty", partial(lines, "metrics.jsonl", b"\n", 100 * MB)),
    Case("one-line-metrics", partial(one_line, "metrics.jsonl", 100 * MB)),
    Case("one-line-status", partial(one_line, "status.json", 100 * MB)),
    Case("sparse-log", partial(sparse, "logs/run-0.log", 1 << 40)),
    Case("sealed-sparse-model", partial(sealed_sparse, "CHECKPOINT/model.safetensors", 2 * GB)),
    Case("sealed-sparse-optimiser", partial(sealed_sparse, "CHECKPOINT/optim.safetensors", 2 * GB)),
    Case("sealed-sparse-state", partial(sealed_sparse, "CHECKPOINT/state.json", GB)),
    Case("sealed-sparse-arrays", partial(sealed_sparse, "CHECKPOINT/state.safetensors", GB)),
    Case("sealed-sparse-extra", partial(sealed_sparse, "CHECKPOINT/extra", 2 * GB)),
    Case("sparse-manifest", partial(sparse, "CHECKPOINT/manifest.json", 8 * GB)),
    Case("header-of-tensors-declares-2-GB", partial(header_only, 500_000_000)),
    Case("header-of-tensors-declares-4-TB", partial(header_only, 10**12)),
    Case("header-of-tensors-is-long", long_header),
    Case("segment-is-a-bomb", bomb),
    Case("many-logs", partial(many_files, "logs", 5000)),
    Case("many-files", partial(many_files, ".", 5000)),
    Case("many-checkpoints", many_checkpoints),
    Case("deep-folders", deep_folders),
    Case("long-manifest", long_manifest),
]
