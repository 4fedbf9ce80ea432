"""scripts/qfleet on a strange machine: a stub stands in for Python, so nothing is downloaded."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HASHED = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
TOOLS = (
    "bash",
    "cat",
    "chmod",
    "cksum",
    "cp",
    "dirname",
    "flock",
    "grep",
    "mkdir",
    "mv",
    "readlink",
    "rm",
    "sleep",
    "tail",
)

# Answers the questions scripts/setup asks, makes a "venv" that holds itself, and counts its pip installs.
STUB = """#!/usr/bin/env bash
case "$*" in
  *version_info*) echo "${STUB_VERSION:-3.12}" ;;
  *ensurepip*) exit "${STUB_ENSUREPIP:-0}" ;;
  "-P -m venv "*)
    mkdir -p "$4/bin" && cp "$0" "$4/bin/python"
    printf '#!/usr/bin/env bash\\nprintf "[%%s]" "$@"\\nexit 7\\n' >"$4/bin/qfleet" && chmod +x "$4/bin/qfleet" ;;
  *"pip --version"*) ;;
  *"pip install"*)
    sleep "${STUB_SLEEP:-0}"; echo "$*" >>"$STUB_LOG"; echo "the disk is full"; exit "${STUB_PIP:-0}" ;;
esac
"""


class Machine:
    """A copy of the scripts in a folder with a space in its name, and a PATH that holds little else."""

    def __init__(self, folder: Path) -> None:
        self.root, self.path, self.log = folder / "a clone", folder / "bin", folder / "installs"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        self.path.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            if found:
                (self.path / tool).symlink_to(found)
        (self.path / "env").symlink_to("/usr/bin/env")

    def add_python(self) -> None:
        (self.path / "python3").write_text(STUB)
        (self.path / "python3").chmod(0o755)

    def start(self, *arguments: str, script: str = "qfleet", **settings: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / script), *arguments],
            cwd=self.path,
            env={"PATH": str(self.path), "STUB_LOG": str(self.log), **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str, **settings: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **settings)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def installs(self) -> list[str]:
        """Those of the project itself; its packages come before, by their hashes."""
        return [line for line in self.calls if "--editable" in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_call_installs_and_passes_everything_on(machine: Machine) -> None:
    machine.add_python()
    code, out, err = machine.call("train", "two words", "--x=*")
    assert (code, out) == (7, "[train][two words][--x=*]")
    assert "setting up .venv" in err
    assert len(machine.installs) == 1
    assert f"--constraint {machine.root}/constraints.txt --editable {machine.root}[all]" in machine.installs[0]


@pytest.mark.skipif(not HASHED, reason="there are hashes for Linux on x86_64 and aarch64")
def test_packages_come_by_their_hashes_first(machine: Machine) -> None:
    machine.add_python()
    machine.call()
    locked = f"--no-deps --require-hashes --requirement {machine.root}/scripts/locked/all.txt"
    assert locked in machine.calls[0]
    assert len(machine.calls) == 2
    (machine.root / ".venv/stamp").unlink()
    machine.call(QFLEET_HASHES="0")
    assert len(machine.calls) == 3  # by no hashes, as asked


def test_later_calls_are_silent_and_install_nothing(machine: Machine) -> None:
    machine.add_python()
    machine.call()
    assert machine.call("again") == (7, "[again]", "")
    assert len(machine.installs) == 1


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml", "scripts/locked/all.txt"])
def test_changed_versions_are_installed(machine: Machine, name: str) -> None:
    machine.add_python()
    machine.call()
    with (machine.root / name).open("a") as file:
        file.write("# changed\n")
    assert machine.call()[0] == 7
    assert len(machine.installs) == 2


def test_a_moved_folder_is_set_up_again(machine: Machine) -> None:
    machine.add_python()
    machine.call()
    (machine.root / ".venv/lib/old").mkdir(parents=True)
    machine.root = machine.root.rename(machine.root.with_name("elsewhere"))
    assert machine.call()[0] == 7
    assert len(machine.installs) == 2
    assert not (machine.root / ".venv/lib/old").exists()


def test_a_venv_the_user_made_is_kept(machine: Machine) -> None:
    machine.add_python()
    machine.call()
    (machine.root / ".venv/stamp").unlink()
    (machine.root / ".venv/home").unlink()
    mine = machine.root / ".venv/lib/mine"
    mine.mkdir(parents=True)
    assert machine.call()[0] == 7
    assert mine.exists()


def test_a_failed_install_is_explained_and_never_taken_for_a_good_one(machine: Machine) -> None:
    machine.add_python()
    code, out, err = machine.call(STUB_PIP="1")
    assert (code, out) == (1, "")
    assert "the disk is full" in err
    assert "setup.log" in err
    assert "run the same command again" in err
    failed = len(machine.calls)
    assert failed == 1  # nothing is tried after what failed
    assert machine.call()[0] == 7
    assert len(machine.installs) == 1
    assert len(machine.calls) > failed


@pytest.mark.skipif(shutil.which("flock") is None, reason="this system has no flock")
def test_two_first_calls_install_once(machine: Machine) -> None:
    machine.add_python()
    both = [machine.start(STUB_SLEEP="1") for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [7, 7]
    assert sum("waiting for it" in err for err in errors) == 1
    assert len(machine.installs) == 1


def test_a_link_to_the_script_works(machine: Machine) -> None:
    machine.add_python()
    link = machine.path / "link"
    link.symlink_to(machine.root / "scripts/qfleet")
    done = subprocess.run(
        [str(link), "x"],
        env={"PATH": str(machine.path), "STUB_LOG": str(machine.log)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (7, "[x]")


def test_no_python_is_said(machine: Machine) -> None:
    code, _, err = machine.call()
    assert code == 2
    assert "no Python 3.11 to 3.14 was found" in err
    assert "QFLEET_PYTHON" in err


@pytest.mark.parametrize("version", ["3.10", "3.9", "2.7", "4.0"])
def test_another_python_is_not_taken(machine: Machine, version: str) -> None:
    machine.add_python()
    assert machine.call(STUB_VERSION=version)[0] == 2
    assert not machine.installs


def test_a_python_without_ensurepip_is_explained(machine: Machine) -> None:
    machine.add_python()
    code, _, err = machine.call(STUB_ENSUREPIP="1")
    assert code == 2
    assert "apt install python3.12-venv" in err


def test_a_wrong_choice_of_python_is_not_ignored(machine: Machine) -> None:
    machine.add_python()
    code, _, err = machine.call(QFLEET_PYTHON="/nowhere/python")
    assert code == 2
    assert "QFLEET_PYTHON=/nowhere/python" in err


def test_every_script_can_be_run() -> None:
    names = ("bench", "check", "docs", "fix", "qfleet", "test")
    scripts = [ROOT / ".ci/run", *(ROOT / "scripts" / name for name in names)]
    assert not [script.name for script in scripts if not os.access(script, os.X_OK)]
    assert not [script.name for script in scripts if "set -euo pipefail" not in script.read_text()]


def test_run_by_itself_it_adds_extras(machine: Machine) -> None:
    machine.add_python()
    code, _, err = machine.call("ray", "mpi", script="setup")
    assert (code, "adding ray,mpi" in err) == (0, True)
    assert machine.installs[0].endswith(f"--editable {machine.root}[all]")
    assert machine.installs[1].endswith(
        f"--constraint {machine.root}/constraints.txt --editable {machine.root}[ray,mpi]"
    )


def test_an_extra_that_is_none_or_fails_is_said(machine: Machine) -> None:
    machine.add_python()
    code, _, err = machine.call("plt", script="setup")
    assert code == 2
    assert "there is no extra 'plt'" in err
    assert len(machine.installs) == 1
    code, _, err = machine.call("plot", script="setup", STUB_PIP="1")
    assert code == 1
    assert "the disk is full" in err
