"""Real processes for tests to kill. Importing torch takes seconds, so it is done once here; each child is a fork."""

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60.0


class Child:
    """One process that runs a qfleet command."""

    def __init__(self, nursery: "Nursery", pid: int, log: Path) -> None:
        self._nursery, self.pid, self._log = nursery, pid, log
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """Its exit code (minus the signal that ended it), or None while it lives."""
        if self._code is None:
            self._code = self._nursery.ask({"poll": self.pid})
        return self._code

    def send(self, number: int) -> None:
        """Send a signal, unless it is gone."""
        if self.code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """Its exit code."""
        limit = time.monotonic() + seconds
        while (code := self.code) is None:
            assert time.monotonic() < limit, f"process {self.pid} still runs:\n{self.said()}"
            time.sleep(0.002)
        return code

    def said(self) -> str:
        """What it has written to its standard streams."""
        return self._log.read_text(errors="replace")


class Nursery:
    """A process that has imported everything and forks a child per command."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.support.nursery"]
        root = str(Path(__file__).parents[2])
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ}
        )

    def ask(self, question: dict[str, Any]) -> Any:
        """One question to the server, and its answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, *words: str) -> Child:
        """A child that runs `qfleet WORDS`; its output goes to a file of its own."""
        self._num += 1
        log = self._folder / f"{self._num}.log"
        return Child(self, self.ask({"words": words, "log": str(log)}), log)

    def close(self) -> None:
        """End the server and what it still has."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(LIMIT_SECONDS)
        if self._server.stdout is not None:
            self._server.stdout.close()


def serve() -> None:
    """Answer questions until there are no more."""
    import qfleet.api  # imports torch before the first fork
    import qfleet.testing.toys  # noqa: F401  registers toys/...
    from qfleet.data import Spec
    from qfleet.replay.warm import warm

    warm(Spec((4,), "float32", (2,)))
    alive: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        if "words" in question:
            answer: int | None = fork(question["words"], question["log"])
            alive.add(answer or 0)
        else:
            answer = poll(question["poll"])
            alive -= {question["poll"]} if answer is not None else set()
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def fork(words: list[str], log: str) -> int:
    """A child that runs one command and never returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from qfleet.cli import main

        code = main(words)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def poll(pid: int) -> int | None:
    """The exit code of a child that is gone."""
    done, ended = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(ended) if done else None


if __name__ == "__main__":
    serve()
