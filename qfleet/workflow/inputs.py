"""The hashes that name the stages of a workflow: of plain data, of a policy's weights, of files that are imported."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from qfleet.datasets.convert.foreign import MAX_FILE_BYTES
from qfleet.errors import UsageError
from qfleet.files import TooLarge, is_file, is_folder, list_inside, open_inside
from qfleet.nets import state_arrays
from qfleet.training.checkpoints.saved_policy import load_policy

HASH_CHARS = 12
PART_BYTES = 1 << 20


def hash_of(value: Any) -> str:
    """The first characters of the hash of plain data."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:HASH_CHARS]


def weights_hash(run: Path | None) -> str:
    """SHA-256 of the best weights of a run: one that learned more has others. Empty without a run."""
    if run is None:
        return ""
    digest = hashlib.sha256()
    for name, array in sorted(state_arrays(load_policy(run).net).items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def files_hash(source: Path) -> str:
    """SHA-256 of the names and contents of a file, or of all files below a folder; links are not followed."""
    try:
        folder, names = (source.parent, [source.name]) if source.is_file() else (source, sorted(walk(source, "")))
        digest = hashlib.sha256()
        for name in names:
            add_file(digest, folder, name)
    except OSError as error:
        raise UsageError(
            f"{source} cannot be imported",
            f"The system says: {error.strerror or error}.",
            "Name a file, or a folder of files, as `source` in the table [import].",
        ) from error
    if not names:
        raise UsageError(
            f"there is nothing to import at {source}",
            "It is neither a file nor a folder with files.",
            "Check `source` in the table [import].",
        )
    return digest.hexdigest()


def add_file(digest: "hashlib._Hash", folder: Path, name: str) -> None:
    """Hash the name, the size and the content of a file that is not too large to import."""
    with os.fdopen(open_inside(folder, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise TooLarge(folder / name, size, MAX_FILE_BYTES)
        digest.update(f"{name}\n{size}\n".encode(errors="surrogateescape"))
        while part := file.read(PART_BYTES):
            digest.update(part)


def walk(folder: Path, below: str) -> Iterator[str]:
    """The names of all regular files below a folder."""
    for entry in list_inside(folder, below or "."):
        name = f"{below}{entry}"
        if is_folder(folder, name):
            yield from walk(folder, f"{name}/")
        elif is_file(folder, name):
            yield name
