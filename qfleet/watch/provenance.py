"""The provenance of a run: versions, git commit, machine and command. No environment variables, no host name."""

import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from qfleet.plan.secrets import redacted_arguments
from qfleet.system.cores import machine_cores
from qfleet.system.processor import processor

PACKAGES = ("qfleet", "torch", "numpy", "gymnasium", "safetensors", "msgspec", "numba", "ale-py", "MinAtar")
GIT_LIMIT_SECONDS = 2.0
MOST_TEXT_BYTES = 1 << 20
MOST_INDEX_BYTES = 64 << 20
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REF = re.compile(r"refs(/[\w+@#=-][\w.+@#=-]*)+")
STATUS = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all", "--no-renames")
NO_FILE = os.devnull


def program() -> str:
    """The command by which the user calls qfleet; scripts/qfleet sets its own."""
    return os.environ.get("QFLEET_PROGRAM") or "qfleet"


def resume_command(path: Path) -> str:
    """The command that resumes a run or a group."""
    return f"{program()} resume {shlex.quote(str(path))}"


def collect_provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, git commit of the current folder, hardware, platform and the command line."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redacted_arguments(command if command is not None else [Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": platform.platform(),
        "hardware": {"cpu": processor(), "cores": machine_cores(), "memory_bytes": _memory_bytes()},
        "git": git_state(Path()),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


# --- the git commit ---
# An untrusted repository may name programs in its settings (filters, hooks, a file system monitor), which even
# `git status` runs. The commit is therefore read from git's files, and changed files are found by running git in a
# temporary git folder with our own settings, a copy of the repository's index, and its objects.


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit that is checked out in a folder, and whether tracked files differ from it (None: unknown)."""
    with suppress(OSError, ValueError):
        if (found := _find_repository(folder.absolute())) is not None:
            top, own, shared = found
            commit = _commit(own, shared)
            return None if commit is None else {"commit": commit, "dirty": _is_dirty(top, own, shared, commit)}
    return None


def _find_repository(folder: Path) -> tuple[Path, Path, Path] | None:
    """The top folder, its git folder, and the git folder that all work trees of the repository share."""
    for top in (folder, *folder.parents):
        git = top / ".git"
        if not git.exists():
            continue
        if git.lstat().st_uid != os.geteuid():
            return None  # another user's: git does not trust it either
        own = git if git.is_dir() else top / _read_text(git).removeprefix("gitdir:").strip()
        common = own / "commondir"
        return top, own, own / _read_text(common).strip() if common.exists() else own
    return None


def _commit(own: Path, shared: Path) -> str | None:
    head = _read_text(own / "HEAD").strip()
    if COMMIT.fullmatch(head):
        return head
    name = head.removeprefix("ref:").strip()
    if not REF.fullmatch(name) or ".." in name:
        return None
    with suppress(OSError):
        found = _read_text(shared / name).strip()
        return found if COMMIT.fullmatch(found) else None
    for line in _read_text(shared / "packed-refs").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name and COMMIT.fullmatch(commit):
            return commit
    return None


def _is_dirty(top: Path, own: Path, shared: Path, commit: str) -> bool | None:
    git = shutil.which("git")
    if git is None:
        return None
    with tempfile.TemporaryDirectory(prefix="qfleet-git-") as temp:
        private = Path(temp)
        try:
            _copy_index(own, private, commit)
            command = [git, f"--git-dir={private}", f"--work-tree={top}", *STATUS]
            environment = _git_environment(shared)
            status = subprocess.run(  # noqa: S603
                command, capture_output=True, timeout=GIT_LIMIT_SECONDS, check=True, cwd=private, env=environment
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        return bool(status.stdout)


def _copy_index(own: Path, private: Path, commit: str) -> None:
    """Make a git folder at the same commit and with the same index, but without its settings, hooks and attributes."""
    (private / "refs").mkdir()
    (private / "HEAD").write_text(commit + "\n")
    kind = "\n[extensions]\n\tobjectformat = sha256" if len(commit) == 64 else ""
    (private / "config").write_text(f"[core]\n\trepositoryformatversion = {1 if kind else 0}{kind}\n")
    data, times = _read_file(own / "index", MOST_INDEX_BYTES)
    (private / "index").write_bytes(data)
    os.utime(private / "index", ns=times)  # git compares file times with the index's


def _git_environment(shared: Path) -> dict[str, str]:
    """This process's variables without git's own, and variables that keep other settings out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    ours = {"GIT_CONFIG_GLOBAL": NO_FILE, "GIT_CONFIG_SYSTEM": NO_FILE, "GIT_ATTR_NOSYSTEM": "1"}
    ours |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
    # The user's attributes are in a folder that XDG_CONFIG_HOME or HOME names.
    return {**kept, **ours, "GIT_OBJECT_DIRECTORY": str((shared / "objects").resolve()), "XDG_CONFIG_HOME": NO_FILE}


def _read_text(path: Path) -> str:
    return _read_file(path, MOST_TEXT_BYTES)[0].decode()


def _read_file(path: Path, limit: int) -> tuple[bytes, tuple[int, int]]:
    """The contents and times of a regular file that is no link; ValueError if it is larger than `limit`."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > limit:
            raise ValueError(f"{path} is no file of at most {limit} bytes")
        return file.read(limit), (about.st_atime_ns, about.st_mtime_ns)
