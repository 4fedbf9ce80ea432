"""Every command that reads a run folder, and checks of its result that hold for any folder."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hostile.place import COMMAND, FORGED, Case, Place, outside

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 20.0
LIMIT_MEGABYTES = 1000
PROGRAMS = re.compile(r"(git|uname|lscpu|python[0-9.]*|ffmpeg[-\w.]*)$")
TINY = ("net.torso.type=mlp", "net.torso.sizes=[8]", "replay.capacity=1000", "eval.episodes=2", "eval.test_episodes=2")
# Characters that move the cursor, change colours, or ring; line ends and tabs are allowed.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Command:
    """A command line for a place, and the exit codes that are allowed."""

    arguments: Callable[[Place], list[str]]
    codes: tuple[int, ...] = (0, 2, 3, 4, 5, 6)


def run_or_member(place: Place) -> str:
    """The run, or the first member of the group."""
    member = place.run / "seed-0"
    return f"runs/{place.name}/seed-0" if os.path.lexists(member) else f"runs/{place.name}"


def run_or_group(place: Place) -> str:
    """The run or the group."""
    return f"runs/{place.name}"


COMMANDS: dict[str, Command] = {
    "runs": Command(lambda place: ["runs"], (0,)),
    "runs-json": Command(lambda place: ["runs", "--json"], (0,)),
    "show": Command(lambda place: ["runs", "show", run_or_group(place)], (0, 2, 5, 6)),
    "show-json": Command(lambda place: ["runs", "show", run_or_group(place), "--json"], (0, 2, 5, 6)),
    "diff": Command(lambda place: ["runs", "diff", run_or_member(place), "good"], (0, 2, 5)),
    "verify": Command(lambda place: ["verify", run_or_group(place)], (0, 2, 5, 6)),
    "plan-show": Command(lambda place: ["plan", "show", "--plan", run_or_member(place) + "/run.toml"], (0, 2)),
    "plan-check": Command(lambda place: ["plan", "check", run_or_member(place) + "/run.toml"], (0, 2)),
    "compare": Command(lambda place: ["compare", run_or_group(place), "good"], (0, 2, 5)),
    "plot": Command(lambda place: ["plot", run_or_group(place)], (0, 2, 5)),
    "eval": Command(lambda place: ["eval", run_or_member(place), "--episodes", "1"]),
    "eval-latest": Command(
        lambda place: ["eval", run_or_member(place), "--episodes", "1", "--which", "latest", "--json"]
    ),
    "eval-elsewhere": Command(
        lambda place: ["eval", run_or_member(place), "--episodes", "1", "--env", "CartPole-v0", "env.wrappers=[]"]
    ),
    "play": Command(lambda place: ["play", run_or_member(place), "--episodes", "1"]),
    "record": Command(lambda place: ["record", run_or_member(place)]),
    "policy": Command(lambda place: ["Policy.load", run_or_member(place)]),
    "sync": Command(lambda place: ["sync", run_or_member(place), "sync.type=local"], (2, 5)),
    "train-plan": Command(
        lambda place: ["train", "--plan", run_or_member(place) + "/run.toml", "--steps", "16", "--out", "new"]
    ),
    "train-from": Command(
        lambda place: ["train", "CartPole-v1", "--from", run_or_member(place), "--steps", "16", "--out", "new", *TINY]
    ),
    "resume": Command(lambda place: ["resume", run_or_group(place), "--steps", "320"]),
    "rm": Command(lambda place: ["runs", "rm", run_or_group(place), "--yes"], (0, 2, 5)),
}


@dataclass(frozen=True)
class CommandResult:
    """The result of a command: exit code, resources used, output and audited events."""

    code: int
    stopped: str
    seconds: float
    megabytes: int
    left: int
    out: str
    err: str
    audit: tuple[str, ...]


class Server:
    """The process that forks for each command."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        env |= {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
        command = [sys.executable, "-P", str(Path(__file__).with_name("server.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.requests = 0
        assert "ready" in self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server has ended"
        return dict(json.loads(line))

    def _reply(self) -> dict[str, Any]:
        """The reply to the last request; replies to requests that a test gave up are skipped."""
        while True:
            reply = self._line()
            if reply.pop("number") == self.requests:
                return reply

    def run(self, root: Path, arguments: list[str], limit_seconds: float = LIMIT_SECONDS) -> CommandResult:
        """Run one command line in `root` as a user whose home is there."""
        home = root / "home"
        log = root / "logs" / "command"
        log.parent.mkdir(exist_ok=True)
        env = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "TMPDIR": str(root / "tmp")}
        request: dict[str, Any] = {
            "arguments": arguments,
            "cwd": str(root),
            "env": env,
            "log": str(log),
            "root": str(root),
        }
        self.requests += 1
        request |= {"number": self.requests, "limit_seconds": limit_seconds}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        reply = self._reply()
        texts = [log.with_suffix(end).read_bytes().decode(errors="replace") for end in (".out", ".err", ".audit")]
        return CommandResult(**reply, out=texts[0], err=texts[1], audit=tuple(texts[2].splitlines()))

    def close(self) -> None:
        """Close its input, which ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)


def executed(place: Place, result: CommandResult) -> list[str]:
    """Signs that something of the hostile folder was executed or connected to."""
    found = [f"executed: {path.name}" for path in place.canary.iterdir()]
    for line in result.audit:
        event, _, rest = line.partition(" ")
        program = rest.split("'")[1] if event == "start" and "'" in rest else ""
        own = program and PROGRAMS.search(program) and not program.startswith(str(place.root))
        found += [] if own else [f"audit: {line[:200]}"]
    return found


def unsafe_output(result: CommandResult) -> list[str]:
    """Control characters and forged lines in the output."""
    text = result.out + "\n" + result.err
    marks = sorted(set(CONTROL.findall(text)))
    forged = [line for line in text.splitlines() if line.startswith(FORGED)]
    return [f"prints raw {mark!a}" for mark in marks] + [f"forged line: {line[:80]!r}" for line in forged[:1]]


def over_limits(result: CommandResult) -> list[str]:
    """Exceeded limits of time, memory and processes."""
    found = [f"stopped: {result.stopped} after {result.seconds:.0f} s"] if result.stopped else []
    if result.megabytes > LIMIT_MEGABYTES:
        found.append(f"held {result.megabytes} MB")
    return found + ([f"left {result.left} processes"] if result.left else [])


def broken(result: CommandResult) -> list[str]:
    """Crashes, tracebacks, and messages that report a bug."""
    text = result.out + result.err
    found = [f"ended by signal {-result.code}"] if result.code < 0 and not result.stopped else []
    if "bug in qfleet" in text or "Traceback (most recent" in text:
        line = next((line for line in text.splitlines() if "error:" in line.lower()), text[-200:])
        found.append(f"bug: {line.strip()[:300]}")
    return found


def violations(
    place: Place, name: str, case: Case, result: CommandResult, before: dict[str, tuple[Any, ...]]
) -> list[str]:
    """All violations by one command."""
    found = executed(place, result) + unsafe_output(result) + over_limits(result) + broken(result)
    after = outside(place)
    found += [
        f"outside: {path} changed" for path in sorted(before.keys() | after) if before.get(path) != after.get(path)
    ]
    codes = case.codes.get(name, COMMANDS[name].codes)
    if result.code not in codes and not result.stopped:
        found.append(f"exit code {result.code}, not one of {codes}: {(result.err or result.out)[-300:]!r}")
    if name.startswith("runs") and "good" not in result.out:
        found.append("hides the good run")
    if name not in ("show-json", "runs-json", "plan-show"):
        found += [f"shows {text!r}" for text in (*case.absent, COMMAND) if text in result.out + result.err]
    return found


def find_violations(server: Server, place: Place, case: Case, names: tuple[str, ...]) -> list[str]:
    """Run commands one after the other on one hostile folder; returns the violations of each."""
    found: list[str] = []
    for name in names:
        before = outside(place)
        result = server.run(place.root, COMMANDS[name].arguments(place))
        found += [f"{name}: {text}" for text in violations(place, name, case, result, before)]
        for path in place.canary.iterdir():
            path.unlink()
    return found
