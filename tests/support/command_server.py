"""Real qfleet processes for tests to kill: forks of a server that has imported torch once, which takes seconds."""

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60.0


class CommandProcess:
    """One process that runs a qfleet command."""

    def __init__(self, server: "CommandServer", pid: int, log: Path) -> None:
        self._server = server
        self.pid = pid
        self._log = log
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """Its exit code (minus the signal that ended it), or None while it runs."""
        if self._code is None:
            self._code = self._server.ask({"poll": self.pid})
        return self._code

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """Its exit code."""
        limit = time.monotonic() + seconds
        while (code := self.code) is None:
            assert time.monotonic() < limit, f"process {self.pid} still runs:\n{self.output()}"
            time.sleep(0.002)
        return code

    def output(self) -> str:
        """What it has written to its standard streams."""
        return self._log.read_text(errors="replace")


class CommandServer:
    """A process that has imported everything and forks a child per command."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num = 0
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.support.command_server"]
        root = str(Path(__file__).parents[2])
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ}
        )

    def ask(self, request: dict[str, Any]) -> Any:
        """Send one request to the server; returns its reply."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, *arguments: str) -> CommandProcess:
        """A process that runs `qfleet ARGUMENTS`; its output goes to a file of its own."""
        self._num += 1
        log = self._folder / f"{self._num}.log"
        return CommandProcess(self, self.ask({"arguments": arguments, "log": str(log)}), log)

    def close(self) -> None:
        """End the server and the processes that still run."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(LIMIT_SECONDS)
        if self._server.stdout is not None:
            self._server.stdout.close()


def serve() -> None:
    """Answer requests until there are no more."""
    import qfleet.api
    import qfleet.testing.toys  # noqa: F401  registers toys/...
    from qfleet.data import Spec
    from qfleet.replay.warm import warm

    warm(Spec((4,), "float32", (2,)))
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "arguments" in request:
            reply: int | None = fork(request["arguments"], request["log"])
            alive.add(reply or 0)
        else:
            reply = poll(request["poll"])
            alive -= {request["poll"]} if reply is not None else set()
        print(json.dumps(reply), flush=True)
    for pid in alive:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def fork(arguments: list[str], log: str) -> int:
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

        code = main(arguments)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def poll(pid: int) -> int | None:
    """The exit code of a child that has ended."""
    done, ended = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(ended) if done else None


if __name__ == "__main__":
    serve()
