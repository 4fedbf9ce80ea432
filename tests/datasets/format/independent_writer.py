"""A writer of the format that knows docs/datasets.md and nothing of qfleet; without sketches, in one file."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.datasets.format.independent_reader import content_hash

SPEC = {"obs": [3], "dtype": "float32", "actions": [2], "stack": 1, "masked": False}
COLUMN = {"name": "obs", "dtype": "float32", "shape": [3]}
TEXT = pa.string()
STEP = [("t", pa.int32()), ("action", pa.int64()), ("reward", pa.float64())]
STEP += [("terminated", pa.bool_()), ("truncated", pa.bool_()), ("probability", pa.float64())]
ROW = [("id", TEXT), ("file", TEXT), ("row_group", pa.int32()), ("row", pa.int64()), ("length", pa.int64())]
ROW += [("undiscounted_return", pa.float64()), ("terminated", pa.bool_()), ("truncated", pa.bool_())]
ROW += [("seed", pa.int64()), ("world", TEXT), ("behaviour", TEXT), ("split", TEXT), ("hash", TEXT)]


def write_data_set(folder: Path, episodes: dict[str, dict[str, Any]]) -> None:
    """Episodes of vectors of three numbers and two actions."""
    (folder / "data").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    index = []
    for id, each in episodes.items():
        num = len(each["action"])
        known = {"length": num, "terminated": each["terminated"], "truncated": not each["terminated"]}
        arrays = {"observations": {"obs": each["obs"]}, "probability": None, "mask": None}
        place = {"id": id, "file": "data/all-00000.parquet", "row_group": 0, "row": len(rows), "seed": None}
        about = {"world": "Walk-v0", "behaviour": "", "split": "all", "undiscounted_return": sum(each["reward"])}
        index.append(place | known | about | {"hash": content_hash({**each, **known, **arrays}, {})})
        for t in range(num + 1):
            row: dict[str, Any] = {"episode": id, "t": t, "obs": each["obs"][t].tobytes()}
            if t < num:
                row |= {"action": int(each["action"][t]), "reward": float(each["reward"][t])}
                row |= {"terminated": each["terminated"] and t == num - 1}
                row |= {"truncated": not each["terminated"] and t == num - 1}
            rows.append(row)
    fields = [pa.field("episode", TEXT, False), pa.field("t", pa.int32(), False)]
    fields += [pa.field(name, kind) for name, kind in STEP[1:]] + [pa.field("obs", pa.binary(12), False)]
    write_table(folder / "data/all-00000.parquet", rows, fields)
    write_table(folder / "episodes.parquet", index, [pa.field(name, kind, name == "seed") for name, kind in ROW])
    reward = np.concatenate([each["reward"] for each in episodes.values()])
    (folder / "statistics.json").write_text(json.dumps({"all": statistics(episodes, reward)}))
    counts = {"rows": len(rows), "episodes": len(episodes), "steps": len(reward)}
    manifest = {"format": 1, "env_id": "Walk-v0", "spec": SPEC, "observations": [COLUMN], "spaces": ""}
    manifest |= {"files": [entry(folder, "data/all-00000.parquet") | counts | {"split": "all"}]}
    manifest |= {"index": entry(folder, "episodes.parquet"), "statistics": entry(folder, "statistics.json")}
    manifest |= {"num_episodes": len(episodes), "num_steps": len(reward), "settings": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_table(path: Path, rows: list[dict[str, Any]], fields: list[Any]) -> None:
    """Rows as a Parquet file of one row group."""
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), path, compression="zstd")


def entry(folder: Path, name: str) -> dict[str, Any]:
    """A file of the manifest."""
    data = (folder / name).read_bytes()
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def statistics(episodes: dict[str, dict[str, Any]], reward: np.ndarray) -> dict[str, Any]:
    """Without sketches."""
    found = list(episodes.values())
    actions = np.concatenate([each["action"] for each in found])
    return {
        "observations": {"obs": moments(np.concatenate([each["obs"] for each in found]).astype(np.float64))},
        "reward": moments(reward[:, None]),
        "returns": moments(np.array([[each["reward"].sum()] for each in found])),
        "lengths": moments(np.array([[float(len(each["reward"]))] for each in found])),
        "actions": np.bincount(actions, minlength=2).tolist(),
    }


def moments(values: np.ndarray) -> dict[str, Any]:
    """Of each column."""
    mean = values.mean(0)
    return {
        "count": [len(values)] * values.shape[1],
        "mean": mean.tolist(),
        "m2": ((values - mean) ** 2).sum(0).tolist(),
        "min": values.min(0).tolist(),
        "max": values.max(0).tolist(),
        "num_not_finite": 0,
        "sketch": [],
    }
