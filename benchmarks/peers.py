"""Other libraries, in an environment of their own, so that ours stays as it is. `scripts/bench peers` makes it."""

import json
import subprocess
import sys
import venv

from benchmarks.command import Finished, run
from benchmarks.report import ROOT

HOME = ROOT / ".venv-peers"
PYTHON = HOME / "bin" / "python"
CONSTRAINTS = ROOT / "benchmarks" / "constraints-peers.txt"
NEEDED = ("torch==2.13.0", "stable-baselines3", "sbx-rl", "gymnasium")
# What these ask for does not fit together (RLlib wants gymnasium 1.2.2, Tianshou an old virtualenv), so they come
# without it; the parts that their DQN really imports are listed after them.
LOOSE = ("ale-py", "cpprb", "minatar", "opencv-python-headless", "ray", "sensai-utils", "tianshou", "torchrl")
PARTS = (
    *("click", "deepdiff", "h5py", "hoptorch", "jsonschema", "lz4", "matplotlib", "numba", "ormsgpack", "overrides"),
    *("packaging", "pandas", "pettingzoo", "pyarrow", "pydantic", "pyvers", "requests", "tensorboard", "tensorboardX"),
    "tensordict",
)
SHOWN = ("torch", "stable-baselines3", "sbx-rl", "jax", "gymnasium", "numpy")
INSTALL_SECONDS = 3_600.0
ASK = "import importlib.metadata as m, json; print(json.dumps([(d.name, d.version) for d in m.distributions()]))"


def ensure() -> None:
    """Make `.venv-peers` with the tested versions unless it is already complete; some peers may be missing."""
    if set(LOOSE) <= set(versions() or {}):
        return
    print("installing peers into .venv-peers (some hundred megabytes, once)", file=sys.stderr)
    if not PYTHON.exists():
        venv.create(HOME, with_pip=True)
    if not install(*NEEDED) or versions() is None:
        raise SystemExit("the peers' environment is not complete after installing; remove .venv-peers and try again")
    for words in (PARTS, *(("--no-deps", name) for name in LOOSE)):
        if not install(*words):
            print(f"left out, as it does not install here: {words[-1]}", file=sys.stderr)


def install(*words: str) -> bool:
    """Let pip install something in a version that was tested."""
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), *words]
    return not subprocess.run(pip, check=False, timeout=INSTALL_SECONDS).returncode  # noqa: S603 - our own interpreter


def versions() -> dict[str, str] | None:
    """What is installed there of peers; None when something needed is missing or torch is not the pinned one."""
    if not PYTHON.exists():
        return None
    asked = subprocess.run([str(PYTHON), "-c", ASK], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    listed: list[tuple[str, str]] = [] if asked.returncode else json.loads(asked.stdout)
    found = {name.lower().replace("_", "-"): version for name, version in listed}
    named = {name: found[name] for name in (*SHOWN, *LOOSE) if name in found}
    return named if set(SHOWN) <= set(named) and named["torch"].split("+")[0] == "2.13.0" else None


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules with the peers' Python."""
    return [str(PYTHON), "-m", module, *arguments]


def train(peer: str, seed: int, limit_seconds: float, *arguments: str) -> Finished:
    """One peer, one seed, in a process of its own, stopped at the limit."""
    return run(command("benchmarks.peer_dqn", peer, "--seed", str(seed), *arguments), limit_seconds)


def main() -> None:
    """Make the environment and say what is in it."""
    ensure()
    print(json.dumps(versions(), indent=2))


if __name__ == "__main__":
    main()
