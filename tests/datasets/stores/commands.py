"""qfleet's commands in processes of their own, as a user starts them."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 170
COLLECT = ("data", "collect", "CartPole-v1")
SMALL = (
    "net.torso.type=mlp",
    "net.torso.sizes=[8]",
    "algo.batch_size=32",
    "eval.episodes=2",
    "eval.test_episodes=2",
    "runtime.compile=false",
)


@dataclass
class Commands:
    """Commands in one folder, with the cache of this test only; what they print is kept for `all_output`."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def start(self, *words: str, **env: str) -> "subprocess.Popen[str]":
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "qfleet", *words],
            cwd=self.folder,
            env={**os.environ, "QFLEET_CACHE": str(self.folder / "cache"), **self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, process: "subprocess.Popen[str]") -> tuple[int, str]:
        """The exit code of a command, and what it printed."""
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"a command took more than {SECONDS} s:\n{output}") from None
        self.outputs.append(output)
        return process.returncode, output

    def run(self, *words: str, **env: str) -> tuple[int, str]:
        """Run a command to its end."""
        return self.finish(self.start(*words, **env))

    def succeed(self, *words: str, **env: str) -> str:
        """Run a command that must succeed; what it printed."""
        code, output = self.run(*words, **env)
        assert code == 0, f"{' '.join(words)} -> {code}\n{output}"
        return output

    def whole_chain(self, url: str) -> str:
        """Collect, validate, prepare, inspect and train at a URL; what `inspect` printed."""
        raw = f"{url}/raw"
        ready = f"{url}/ready"
        self.succeed(*COLLECT, raw, "--episodes", "40", "--seed", "1", "env.num=4")
        assert self.succeed("data", "validate", raw).startswith("ok: 40 episodes in 1 files")
        self.succeed("data", "prepare", raw, ready, "--split", "50/25/25")
        found = self.succeed("data", "inspect", ready, "--json")
        learn = ["replay.type=dataset", f"replay.path={ready}", "until.epochs=1", "--name", "run", "--quiet"]
        self.succeed("train", "CartPole-v1", *learn, *SMALL)
        return found


def files_holding(texts: Sequence[str], folder: Path) -> Mapping[str, str]:
    """Which files below a folder hold one of these texts."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            found |= {str(path): text for text in texts if text.encode() in data}
    return found
