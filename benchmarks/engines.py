"""Do all engines prepare the same data set? Random CartPole and Pong, prepared by processes, Ray Data and Spark.

Every engine must make the same version, which is the hash of the manifest with the hashes of all files. Seconds are
those of the whole command, with the start of Ray or Java; they compare nothing. An engine that is not installed is
named, and fails the benchmark unless `--engines` leaves it out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report

WORLDS = {"CartPole-v1": 1_000_000, "ALE/Pong-v5": 100_000}  # steps
ENGINES = ("local", "ray", "spark")
SETTINGS = {"CartPole-v1": ["env.num=64"], "ALE/Pong-v5": ["env.num=16"]}
COLLECT_SECONDS = 3_600
PREPARE_SECONDS = 1_800


def collect(env_id: str, steps: int, folder: Path) -> dict[str, Any]:
    """A data set of a random policy."""
    words = ["collect", env_id, str(folder), *SETTINGS.get(env_id, []), "--steps", str(steps), "--json"]
    done = run(words, COLLECT_SECONDS)
    if done.returncode != 0:
        raise SystemExit(f"collecting {env_id} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(words: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """A command of `qfleet data`."""
    command = [sys.executable, "-m", "qfleet", "data", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=report.ROOT)  # noqa: S603


def prepare(engine: str, jobs: int, source: Path, target: Path, file_bytes: int) -> dict[str, Any]:
    """One preparation: its version and seconds, or why there is none."""
    options = ["--engine", engine, "--jobs", str(jobs), "--file-bytes", str(file_bytes), "--json"]
    began = time.perf_counter()
    done = run(["prepare", str(source), str(target), *options], PREPARE_SECONDS)
    row: dict[str, Any] = {"engine": engine, "jobs": jobs, "seconds": round(time.perf_counter() - began, 1)}
    if done.returncode != 0:
        return row | {"version": None, "error": done.stderr[-500:]}
    found = json.loads(done.stdout)
    files = len(list((target / "data").glob("*.parquet")))
    return row | {"version": found["version"], "files": files}


def measure(env_id: str, steps: int, engines: list[str], folder: Path, file_bytes: int) -> dict[str, Any]:
    """All engines on one environment."""
    name = env_id.replace("/", "-")
    source = folder / name
    found = collect(env_id, steps, source)
    cases = [("local", 1), *((engine, 2) for engine in engines)]
    rows = []
    for engine, jobs in cases:
        rows.append(prepare(engine, jobs, source, folder / f"{name}-{engine}-{jobs}", file_bytes))
        print(f"{env_id}: {rows[-1]}", file=sys.stderr)
    same = len({row["version"] for row in rows}) == 1 and rows[0]["version"] is not None
    numbers = {key: found[key] for key in ("episodes", "steps", "bytes")}
    return {"env": env_id, "source": found["version"], **numbers, "file_bytes": file_bytes, "rows": rows, "same": same}


def page(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    parts = ["One data set, prepared by every engine; `scripts/bench engines` makes this page.\n"]
    for each in found["worlds"]:
        parts.append(f"## {each['env']}\n")
        verdict = "**one content hash**" if each["same"] else "**different content hashes**"
        parts.append(
            f"{each['steps']:,} steps of a random policy in {each['episodes']:,} episodes; output files of "
            f"{each['file_bytes']:,} bytes before compression. {verdict}.\n"
        )
        rows = [(r["engine"], r["jobs"], r.get("files"), r["seconds"], r["version"]) for r in each["rows"]]
        parts.append(report.table(("engine", "processes", "files", "seconds", "version"), rows))
    return "\n".join(parts)


def main() -> int:
    """Measure; write benchmarks/results/engines.*; fail if versions differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--worlds", default=",".join(WORLDS), help="environment ids")
    parser.add_argument("--steps", type=int, help="in place of each world's own")
    parser.add_argument("--file-bytes", type=int, default=8_000_000, help="small, so that there is work for everybody")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qfleet-engines-") as folder:
        worlds = [
            measure(name, options.steps or WORLDS[name], options.engines.split(","), Path(folder), options.file_bytes)
            for name in options.worlds.split(",")
        ]
    found = {"worlds": worlds}
    text = page(found)
    print(text)
    if not options.no_save:
        report.save("engines", found, text)
    return int(not all(each["same"] for each in worlds))


if __name__ == "__main__":
    sys.exit(main())
