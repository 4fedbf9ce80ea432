"""Breaks promises on purpose, one at a time, in a copy of the tree; each must be noticed by the tests named with it."""

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
BREAKS = Path(__file__).with_name("mutations.toml")
LIMIT_SECONDS = 600
LIBRARIES = ("torch", "numpy", "gymnasium", "numba", "msgspec", "hypothesis", "safetensors.numpy", "matplotlib.pyplot")
COPIED = ("qfleet", "tests", "scripts", "examples", "benchmarks", "docs")  # folders; of files, all at the top


class Break(NamedTuple):
    """One promise broken: `old` stands once in `file` and becomes `new`; one of `tests` must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def apply(self, root: Path) -> None:
        """Break it in the tree at `root`."""
        path = root / self.file
        text = path.read_text("utf-8")
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.name}: its text stands {text.count(self.old)} times in {self.file}, not once")
        path.write_text(text.replace(self.old, self.new), "utf-8")

    def mend(self, root: Path) -> None:
        """Put the file back as it was."""
        shutil.copy2(ROOT / self.file, root / self.file)


def load() -> list[Break]:
    """All breaks, in the order of their file."""
    return [Break(**each) for each in tomllib.loads(BREAKS.read_text("utf-8"))["break"]]


def copy_tree(to: Path) -> None:
    """The tree, with what was compiled of it: that is known by the time of its source."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, to / path.name)


def import_libraries() -> None:
    """Once for all: a fork has them at once, a new process takes seconds for them. Nothing of ours is imported."""
    for name in LIBRARIES:
        importlib.import_module(name)


def run_tests(root: Path, tests: list[str], log: Path) -> None:
    """In a forked process: run tests of the tree at `root`, and leave with pytest's exit code."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(root)
    os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1", CI="1")
    sys.dont_write_bytecode = True
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "scripts"))]
    code = 3
    try:
        code = int(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def passes(root: Path, tests: list[str]) -> tuple[bool, str]:
    """Do these tests pass in the tree at `root`? Also the end of what they print."""
    log = root / "mutate.log"
    pid = os.fork()
    if pid == 0:
        run_tests(root, tests, log)
    code = wait_for(pid)
    said = log.read_text("utf-8", "replace")[-3000:]
    if code not in (0, 1, None):  # no such test, or pytest itself failed: says nothing about the break
        raise SystemExit(f"pytest ended with {code}\n{said}")
    return code == 0, said


def wait_for(pid: int) -> int | None:
    """The exit code of a process; None if it had to be ended."""
    limit = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def chosen(breaks: list[Break], names: list[str], sample: int | None) -> list[Break]:
    """Those that are named, or so many at random, or all."""
    unknown = set(names) - {each.name for each in breaks}
    if unknown:
        raise SystemExit(f"there is no break called {', '.join(sorted(unknown))}; see scripts/mutate --list")
    picked = [each for each in breaks if not names or each.name in names]
    return picked if sample is None else random.sample(picked, min(sample, len(picked)))


def report(root: Path, breaks: list[Break]) -> list[str]:
    """Break one after the other; says which were not noticed."""
    survived: list[str] = []
    for each in breaks:
        begin = time.monotonic()
        each.apply(root)
        noticed = not passes(root, each.tests)[0]
        each.mend(root)
        survived += [] if noticed else [each.name]
        print(f"{'killed' if noticed else 'SURVIVED':9} {time.monotonic() - begin:5.0f} s  {each.name}", flush=True)
    return survived


def main() -> int:
    """0 when every break was noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="list the breaks and their tests, and run nothing")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, at random")
    asked = parser.parse_args()
    # A shell has what it starts in the background ignore Ctrl-C, and tests of signals would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    breaks = chosen(load(), asked.names, asked.sample)
    if asked.list:
        for each in breaks:
            print(f"{each.name:44} {each.file:32} {' '.join(each.tests)}")
        return 0
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="qfleet-mutate-") as folder:
        copy_tree(Path(folder))
        fine, said = passes(Path(folder), sorted({test for each in breaks for test in each.tests}))
        if not fine:
            print(f"tests fail although nothing is broken:\n{said}")
            return 1
        survived = report(Path(folder), breaks)
    print(f"{len(breaks) - len(survived)} of {len(breaks)} were noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
