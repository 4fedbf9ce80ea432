"""A reader of the format that knows docs/datasets.md and nothing of qfleet: pyarrow, numpy, json and hashlib."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq


def read_data_set(folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """The version, and every episode by its id; AssertionError if a rule of the page is broken."""
    text = (folder / "manifest.json").read_bytes()
    manifest = json.loads(text)
    assert manifest["format"] == 1
    for entry in [*manifest["files"], manifest["index"], manifest["statistics"]]:
        data = (folder / entry["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    episodes = {}
    for row in pq.read_table(folder / "episodes.parquet").to_pylist():
        group = pq.ParquetFile(folder / row["file"]).read_row_group(row["row_group"]).to_pylist()
        rows = [each for each in group if each["episode"] == row["id"]]
        episodes[row["id"]] = row | read_episode(rows, manifest)
        assert len(rows) == row["length"] + 1
        assert content_hash(episodes[row["id"]], manifest) == row["hash"]
    return hashlib.sha256(text).hexdigest(), episodes


def read_episode(rows: list[dict[str, Any]], manifest: dict[str, Any]) -> dict[str, Any]:
    """The arrays of an episode. All rows but the last are steps."""
    steps = rows[:-1]
    assert [each["t"] for each in rows] == list(range(len(rows)))
    assert all(rows[-1][name] is None for name in ("action", "reward", "terminated", "truncated", "probability"))
    found: dict[str, Any] = {"observations": {}, "mask": None, "probability": None}
    for column in manifest["observations"]:
        kind = np.dtype(column["dtype"]).newbyteorder("<")
        data = b"".join(each[column["name"]] for each in rows)
        found["observations"][column["name"]] = np.frombuffer(data, kind).reshape(len(rows), *column["shape"])
    found["action"] = np.array([each["action"] for each in steps], "<i8")
    found["reward"] = np.array([each["reward"] for each in steps], "<f8")
    if steps[0]["probability"] is not None:
        found["probability"] = np.array([each["probability"] for each in steps], "<f8")
    if manifest["spec"]["masked"]:
        found["mask"] = np.frombuffer(b"".join(each["mask"] for each in rows), "|b1").reshape(len(rows), -1)
    return found


def content_hash(episode: dict[str, Any], manifest: dict[str, Any]) -> str:
    """The hash of what an episode holds."""
    digest = hashlib.sha256(f"{episode['length']} {episode['terminated']} {episode['truncated']}".encode())
    arrays = sorted(episode["observations"].items())
    arrays += [(name, episode[name]) for name in ("action", "reward", "probability", "mask")]
    for name, array in arrays:
        if array is not None:
            digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()
