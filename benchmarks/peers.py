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
WANTED = ("torch==2.13.0", "stable-baselines3", "sbx-rl", "gymnasium")
SHOWN = ("torch", "stable-baselines3", "sbx-rl", "jax", "gymnasium", "numpy")
INSTALL_SECONDS = 3_600.0
ASK = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


def ensure() -> None:
    """Make `.venv-peers` with the tested versions unless it is already complete."""
    if versions() is not None:
        return
    print("installing peers into .venv-peers (some hundred megabytes, once)", file=sys.stderr)
    venv.create(HOME, with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), *WANTED]
    subprocess.run(pip, check=True, timeout=INSTALL_SECONDS)  # noqa: S603 - our own interpreter
    if versions() is None:
        raise SystemExit("the peers' environment is not complete after installing; remove .venv-peers and try again")


def versions() -> dict[str, str] | None:
    """What is installed there; None when something is missing or torch is not the pinned one."""
    if not PYTHON.exists():
        return None
    ask = [str(PYTHON), "-c", ASK, *SHOWN]
    asked = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - our own
    if asked.returncode:
        return None
    found: dict[str, str] = json.loads(asked.stdout)
    return found if found["torch"].split("+")[0] == "2.13.0" else None


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
