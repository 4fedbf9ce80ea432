"""The manifest of a checkpoint: its files with their sizes and hashes.

Its bytes are canonical and include their own hash, so a change of any byte is noticed. The hash is computed the same
way in every format, so that a newer format can be distinguished from a damaged manifest.
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
    """The size and hash of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest."""

    step: int
    files: dict[str, FileEntry]
    meta: dict[str, Any]


def step_name(step: int) -> str:
    """The directory name of a step; names sort as steps do."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step {step} does not fit 12 digits")
    return f"step_{step:012d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's directory name; None for other names."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def valid_name(name: str) -> bool:
    """Whether a file name is a relative path of plain characters that stays inside its checkpoint."""
    return _FILE_NAME.fullmatch(name) is not None and name != MANIFEST_NAME


def write_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest, with their hash."""
    files = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in manifest.files.items()}
    return _with_hash({"format": FORMAT, "step": manifest.step, "files": files, "meta": manifest.meta})


def parse_manifest(raw: bytes) -> Manifest:
    """The manifest in these bytes, if not one of them was changed since `write_manifest`."""
    body = _check_hash(raw)
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


def _with_hash(body: Mapping[str, Any]) -> bytes:
    return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def _check_hash(raw: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(raw)
        body = {key: value for key, value in tree.items() if key != "sha256"}
        whole = _with_hash(body) == raw
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
    """The version to install, from `meta["versions"]["qfleet"]`; None if that is no version."""
    versions = meta.get("versions") if isinstance(meta, dict) else None
    version = str(versions.get("qfleet", "")) if isinstance(versions, dict) else ""
    return version if re.fullmatch(r"[0-9A-Za-z.+!-]{1,40}", version) else None
