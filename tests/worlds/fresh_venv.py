"""A venv of its own: qfleet from this checkout by pip, and the packages of other people's environments."""

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.worlds.tested_worlds import PACKAGES, ROOT

EXTRAS = "box2d,mujoco"
CONSTRAINTS = (ROOT / "constraints.txt", ROOT / "tests/worlds/constraints.txt")
INSTALL_SECONDS = 480
PROBE = "tomli_w"  # a small package without dependencies: says whether there is a package index at all


class NoPackageIndex(Exception):
    """pip reaches no packages here."""


@dataclass(frozen=True)
class FreshVenv:
    """A folder with a venv; `missing` names packages that did not install, each with pip's reason."""

    folder: Path
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Path:
        """Its site-packages."""
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))

    def run(self, *command: str, cwd: Path, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a program of the venv as a user would, who has activated it and sits at no display."""
        program = str(self.folder / "bin" / command[0])
        # Nothing of the checkout or of the venv that runs the tests is in the way.
        hidden = ("PYTEST", "PYTHON", "VIRTUAL")
        env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        env |= {"SDL_VIDEODRIVER": "dummy", "SUMO_HOME": str(self.site / "sumo"), "VIRTUAL_ENV": str(self.folder)}
        return subprocess.run(
            [program, *command[1:]], cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False
        )

    def pip(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call its pip, with the pinned versions."""
        pins = [f"--constraint={file}" for file in CONSTRAINTS]
        arguments = ("install", "--disable-pip-version-check", "--no-input", "--prefer-binary", *pins, *words)
        return self.run("python", "-m", "pip", *arguments, cwd=self.folder, seconds=INSTALL_SECONDS)


def make_venv(folder: Path, session: str) -> FreshVenv:
    """The venv in `folder`; made anew if the wanted versions changed. A session installs qfleet once, whoever asks."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        venv = folder / f"venv-{_wanted()}"
        ready = venv / "missing.json"
        if not ready.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], timeout=120, check=True)
        done = venv / "session"
        if not ready.exists() or not done.exists() or done.read_text() != session:
            ready.unlink(missing_ok=True)  # an install that is interrupted is begun again
            ready.write_text(json.dumps(_install(FreshVenv(venv))))
            done.write_text(session)
        return FreshVenv(venv, json.loads(ready.read_text()))


def _install(venv: FreshVenv) -> dict[str, str]:
    """Install qfleet and all packages at once; if that fails, one package after the other."""
    qfleet = f"{ROOT}[{EXTRAS}]"
    if venv.pip(qfleet, *PACKAGES).returncode != 0:
        _require(venv, venv.pip(qfleet))
        missing = {package: _reason(venv.pip(package)) for package in PACKAGES}
    else:
        missing = {}
    # The same version may be there from an earlier commit.
    _require(venv, venv.pip("--force-reinstall", "--no-deps", qfleet))
    return {package: reason for package, reason in missing.items() if reason}


def _require(venv: FreshVenv, done: subprocess.CompletedProcess[str]) -> None:
    """A failed install of qfleet itself is an error of qfleet, unless nothing at all can be installed here."""
    if done.returncode == 0:
        return
    if venv.pip("--force-reinstall", "--no-deps", "--no-cache-dir", PROBE).returncode != 0:
        raise NoPackageIndex(_reason(done))
    raise AssertionError(f"pip could not install qfleet:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why pip failed, in a line; empty if it did not."""
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return lines[-1] if lines else f"pip ended with {done.returncode}"


def _wanted() -> str:
    """Changes with the interpreter, the packages and their versions."""
    texts = [file.read_text("utf-8") for file in (*CONSTRAINTS, ROOT / "pyproject.toml")]
    text = json.dumps([sys.version, EXTRAS, PACKAGES, *texts])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock: two test processes want the venv at the same time. The suite's own time limit bounds the wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shown(done: subprocess.CompletedProcess[str], command: Sequence[str]) -> str:
    """What a failed assertion shows of a command."""
    return f"{' '.join(command)} -> {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
