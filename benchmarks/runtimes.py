"""CartPole on every runtime: as many updates, and learning that does not differ."""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.grid import Cell, Grid, main
from benchmarks.report import ROOT, installed

ACTORS = ("runtime.type=processes", "actors.num=2")
PORT = 46_379
RUNTIMES: dict[str, tuple[str, ...]] = {
    "inline": (),
    "processes": ACTORS,
    "processes, replay too": (*ACTORS, "runtime.replay_process=true"),
    "processes, central": (*ACTORS, "runtime.inference=central"),
    "ray, two nodes": ("runtime.type=ray", "actors.num=2", f"runtime.address=127.0.0.1:{PORT}"),
}
# The whole budget, so that steps and updates compare; the best checkpoint is tested.
WHOLE = ("until.score=none", "until.steps=40000")
GRID = Grid(
    "runtimes",
    "The same plan on every runtime",
    tuple(
        Cell("CartPole-v1", "cartpole", 475.0, (*WHOLE, *settings), f"CartPole-v1, {name}")
        for name, settings in RUNTIMES.items()
    ),
    seeds=5,
    columns=3,
    jobs=1,  # several processes each
    notes=(
        "40,000 steps allow (40,000 - 1,000) / 4 = 9,750 updates; a run ends with the row that reaches the last. "
        "Ray has two nodes of `ray.cluster_utils.Cluster` on this machine."
    ),
)


@contextmanager
def two_nodes() -> Iterator[None]:
    """A Ray cluster with a token for the time of the benchmark, where Ray is installed."""
    if installed("ray") is None:
        print("ray is not installed: its runs will fail", flush=True)
        yield
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        token = Path(folder) / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(20), encoding="ascii")
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        script = [sys.executable, str(ROOT / "tests" / "support" / "ray_cluster.py"), str(PORT)]
        pipe = subprocess.PIPE
        with subprocess.Popen(script, stdin=pipe, stdout=pipe, text=True) as cluster:  # noqa: S603 - our own script
            if cluster.stdout is None or not cluster.stdout.readline().strip():
                raise SystemExit("the Ray cluster did not start")
            try:
                yield
            finally:
                cluster.communicate("end\n", timeout=60)


if __name__ == "__main__":
    with two_nodes():
        main(GRID, __doc__)
