"""The manifest of a checkpoint: which files it has, how long they are, and what they hash to.

Its bytes are canonical and carry their own hash, so a change of any byte shows. The rule of the hash stays the same in
every format; that is how a newer format is told from a damaged manifest.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qfleet.save.damage import Damaged, NewerFormat

FORMAT = 1
MANIFEST_NAME = "manifest.json"
_STEP_NAME = re.compile(r"step_([0-9]{12})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file as the manifest knows it."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    files: dict[str, FileEntry]
    meta: dict[str, Any]


def step_name(step: int) -> str:
    """The directory of a step; names sort as steps do."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step {step} does not fit 12 digits")
    return f"step_{step:012d}"


def step_of(name: str) -> int | None:
    """The step a directory name stands for, if it is one."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def valid_name(name: str) -> bool:
    """Whether a file name is a relative path of plain characters that stays inside its checkpoint."""
    return _FILE_NAME.fullmatch(name) is not None and name != MANIFEST_NAME


def write_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes, sealed with their own hash."""
    files = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in manifest.files.items()}
    return _seal({"format": FORMAT, "step": manifest.step, "files": files, "meta": manifest.meta})


def parse_manifest(raw: bytes) -> Manifest:
    """The manifest in these bytes, if not one of them was changed since `write_manifest`."""
    body = _unseal(raw)
    version, step, files, meta = (body.get(key) for key in ("format", "step", "files", "meta"))
    if type(version) is not int or version < 1:
        raise Damaged(MANIFEST_NAME, "it has no format")
    if version > FORMAT:
        raise NewerFormat(version, _written_by(meta))
    if type(step) is not int or not isinstance(files, dict) or not isinstance(meta, dict):
        raise Damaged(MANIFEST_NAME, "it lacks step, files or meta")
    return Manifest(step, {name: _entry(name, fields) for name, fields in files.items()}, meta)


def _canonical(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree, indent=1, sort_keys=True, allow_nan=False).encode("ascii") + b"\n"


def _seal(body: Mapping[str, Any]) -> bytes:
    return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def _unseal(raw: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(raw)
        body = {key: value for key, value in tree.items() if key != "sha256"}
        whole = _seal(body) == raw
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Damaged(MANIFEST_NAME, "it is not a manifest") from None
    if not whole:
        raise Damaged(MANIFEST_NAME, "its bytes do not match the hash it carries")
    return body


def _entry(name: str, fields: Any) -> FileEntry:
    size, digest = (fields.get("bytes"), fields.get("sha256")) if isinstance(fields, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise Damaged(MANIFEST_NAME, f"its entry {name!r} is malformed")
    if not valid_name(name):
        raise Damaged(MANIFEST_NAME, f"the file name {name!r} is not allowed")
    return FileEntry(size, digest)


def _written_by(meta: Any) -> str | None:
    """The version to install, from `meta["versions"]["qfleet"]`; harmless whatever stands there."""
    versions = meta.get("versions") if isinstance(meta, dict) else None
    version = str(versions.get("qfleet", "")) if isinstance(versions, dict) else ""
    return version if re.fullmatch(r"[0-9A-Za-z.+!-]{1,40}", version) else None
