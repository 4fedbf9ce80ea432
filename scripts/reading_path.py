"""Which files a reader meets in one inline run, from the command to the first checkpoint.

Runs `qfleet train CartPole-v1` in this process and follows every call. Prints the files of qfleet whose functions were
called, with their lines, and the chain of calls from `main` to the first step of an environment.
"""

import argparse
import json
import sys
import tempfile
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "qfleet")
SETTINGS = ("until.steps=600", "save.every_steps=200", "runtime.threads=1", "runtime.compile=false", "eval.episodes=0")


class Trace:
    """Files whose functions were called until the first checkpoint, and the chain of calls to the first step.

    The command trains in a process of its own, which is a fork of this one: there the findings go into a file.
    """

    def __init__(self, report: Path) -> None:
        self.report = report
        self.called: set[str] = set()
        self.chain: list[str] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        file = file_of(frame)
        if event != "call" or not file.startswith(PACKAGE) or is_import(frame):
            return
        self.called.add(file)
        if not self.chain and code.co_name == "send" and "/envs/" in code.co_filename:
            self.chain = chain_to(frame)
        if self.chain and code.co_name == "commit" and code.co_filename.endswith("save/checkpoint.py"):
            sys.setprofile(None)
            self.report.write_text(json.dumps({"called": sorted(self.called), "chain": self.chain}))


def file_of(frame: FrameType) -> str:
    """The file of a function; that of the class for a constructor that `dataclass` has generated."""
    code = frame.f_code
    if code.co_filename == "<string>" and code.co_name == "__init__" and "self" in frame.f_locals:
        module = sys.modules.get(type(frame.f_locals["self"]).__module__)
        return str(getattr(module, "__file__", ""))
    return code.co_filename


def is_import(frame: FrameType | None) -> bool:
    """Does this run only because a module is imported?"""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and (code.co_name == "<module>" or not code.co_flags & CO_OPTIMIZED):
            return True
        frame = frame.f_back
    return False


def chain_to(frame: FrameType | None) -> list[str]:
    """The calls of qfleet's own functions that lead to a frame, outermost first; comprehensions are not calls."""
    found: list[str] = []
    while frame is not None:
        name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        if frame.f_code.co_filename.startswith(PACKAGE) and not name.endswith(("<module>", "comp>", "<genexpr>")):
            found.append(f"{Path(frame.f_code.co_filename).relative_to(ROOT)}: {name}")
        frame = frame.f_back
    return found[::-1]


def num_lines(file: str) -> int:
    with open(file, encoding="utf-8") as text:
        return sum(1 for _ in text)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        sys.setprofile(Trace(report))
        from qfleet.cli import main as command

        code = command(["train", "CartPole-v1", "--quiet", "--out", folder, *SETTINGS])
        sys.setprofile(None)
        found = json.loads(report.read_text())
    if code:
        raise SystemExit(f"the run ended with exit code {code}")
    for file in found["called"]:
        print(f"{num_lines(file):6} {Path(file).relative_to(ROOT)}")
    print(f"files: {len(found['called'])}, lines: {sum(map(num_lines, found['called']))}")
    print(f"calls from main to the first environment step: {len(found['chain'])}")
    print("\n".join(found["chain"]))


if __name__ == "__main__":
    main()
