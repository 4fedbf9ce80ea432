"""Data prepared by Spark, in a venv of its own beside the packages of this environment; it needs Java 17."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.prepare import PreparePlan, prepare_dataset
from tests.support.recorded import make_dataset

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(500)]
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
ROOT = Path(__file__).parents[3]
OLDEST_JAVA = 17


def java_version() -> int:
    """The major version of Java on this machine; 0 if there is none."""
    program = shutil.which("java")
    if program is None:
        return 0
    shown = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    found = re.search(r'version "(\d+)', shown)
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> Path:
    """A Python with pyspark; its venv is kept for the next session."""
    if java_version() < OLDEST_JAVA:
        pytest.skip(f"Spark needs Java {OLDEST_JAVA}, and here is {java_version() or 'none'}")
    folder = request.config.cache.mkdir("spark")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        venv = folder / f"venv-{sys.version_info.major}.{sys.version_info.minor}"
        ready = venv / "ready"
        if not ready.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], timeout=120, check=True)
            site = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv)}))
            (site / "beside.pth").write_text(sysconfig.get_path("purelib"))
            install = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(CONSTRAINTS)]
            done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                pytest.skip(f"pyspark cannot be installed: {done.stderr.strip()[-300:]}")
            ready.touch()
        return venv / "bin/python"


def prepare(python: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "qfleet", "data", "prepare", *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)


def test_the_result_is_that_of_one_process(python: Path, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "raw", [3 + at % 11 for at in range(300)], file_bytes=2_000)
    version = prepare_dataset(dataset, str(tmp_path / "local"), PreparePlan(file_bytes=4_000))
    target = tmp_path / "spark"
    options = ("--engine", "spark", "--jobs", "2", "--file-bytes", "4000", "--json")
    done = prepare(python, str(tmp_path / "raw"), str(target), *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == version
    assert validate_dataset(open_dataset(str(target))) == []


def test_an_error_of_the_work_is_the_command_s_own(python: Path, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "raw", [5] * 100, file_bytes=2_000)
    file = tmp_path / "raw" / dataset.files()[1].name
    file.write_bytes(file.read_bytes()[:-1])
    done = prepare(python, str(tmp_path / "raw"), str(tmp_path / "out"), "--engine", "spark", "--jobs", "2")
    assert done.returncode == 5
    assert "its bytes are not those that the manifest lists" in done.stderr
    assert not (tmp_path / "out/manifest.json").exists()
