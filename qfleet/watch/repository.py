"""The git commit of a folder, and whether files differ from it, without running anything that the repository names.

A repository that came from elsewhere may name programs in its own settings: filters, hooks, a file system monitor, and
git runs them for as little as `git status`. The commit is therefore read from git's files. For changed files git is
asked in a folder of ours, with settings of ours, that only borrows the repository's index and objects.
"""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

GIT_LIMIT_SECONDS = 2.0
MOST_TEXT_BYTES = 1 << 20
MOST_INDEX_BYTES = 64 << 20
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REF = re.compile(r"refs(/[\w+@#=-][\w.+@#=-]*)+")
STATUS = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all", "--no-renames")
NOBODY = os.devnull


def repository(folder: Path) -> dict[str, Any] | None:
    """The commit that a folder stands at, and whether tracked files differ from it (None: not known)."""
    with suppress(OSError, ValueError):
        if (found := _find(folder.absolute())) is not None:
            top, own, shared = found
            commit = _commit(own, shared)
            return None if commit is None else {"commit": commit, "dirty": _is_dirty(top, own, shared, commit)}
    return None


def _find(folder: Path) -> tuple[Path, Path, Path] | None:
    """The top folder, git's own folder for it, and the one that all work trees of a repository share."""
    for top in (folder, *folder.parents):
        git = top / ".git"
        if not git.exists():
            continue
        if git.lstat().st_uid != os.geteuid():
            return None  # somebody else's, as git itself sees it
        own = git if git.is_dir() else top / _text(git).removeprefix("gitdir:").strip()
        common = own / "commondir"
        return top, own, own / _text(common).strip() if common.exists() else own
    return None


def _commit(own: Path, shared: Path) -> str | None:
    head = _text(own / "HEAD").strip()
    if COMMIT.fullmatch(head):
        return head
    name = head.removeprefix("ref:").strip()
    if not REF.fullmatch(name) or ".." in name:
        return None
    with suppress(OSError):
        found = _text(shared / name).strip()
        return found if COMMIT.fullmatch(found) else None
    for line in _text(shared / "packed-refs").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name and COMMIT.fullmatch(commit):
            return commit
    return None


def _is_dirty(top: Path, own: Path, shared: Path, commit: str) -> bool | None:
    git = shutil.which("git")
    if git is None:
        return None
    with tempfile.TemporaryDirectory(prefix="qfleet-git-") as temp:
        mine = Path(temp)
        try:
            _borrow(own, mine, commit)
            line = [git, f"--git-dir={mine}", f"--work-tree={top}", *STATUS]
            answer = subprocess.run(  # noqa: S603
                line, capture_output=True, timeout=GIT_LIMIT_SECONDS, check=True, cwd=mine, env=_variables(shared)
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        return bool(answer.stdout)


def _borrow(own: Path, mine: Path, commit: str) -> None:
    """A git folder at the same commit and with the same index, but with no settings, hooks or attributes of theirs."""
    (mine / "refs").mkdir()
    (mine / "HEAD").write_text(commit + "\n")
    kind = "\n[extensions]\n\tobjectformat = sha256" if len(commit) == 64 else ""
    (mine / "config").write_text(f"[core]\n\trepositoryformatversion = {1 if kind else 0}{kind}\n")
    data, times = _read(own / "index", MOST_INDEX_BYTES)
    (mine / "index").write_bytes(data)
    os.utime(mine / "index", ns=times)  # by which git tells which files may have changed since


def _variables(shared: Path) -> dict[str, str]:
    """This process's variables without git's, and those that keep other settings out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    ours = {"GIT_CONFIG_GLOBAL": NOBODY, "GIT_CONFIG_SYSTEM": NOBODY, "GIT_ATTR_NOSYSTEM": "1"}
    ours |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
    # Attributes of the user are in a folder that XDG_CONFIG_HOME or HOME names.
    return {**kept, **ours, "GIT_OBJECT_DIRECTORY": str((shared / "objects").resolve()), "XDG_CONFIG_HOME": NOBODY}


def _text(path: Path) -> str:
    return _read(path, MOST_TEXT_BYTES)[0].decode()


def _read(path: Path, limit: int) -> tuple[bytes, tuple[int, int]]:
    """A regular file, which must not be a link, and its times; a larger one is a ValueError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > limit:
            raise ValueError(f"{path} is no file of at most {limit} bytes")
        return file.read(limit), (about.st_atime_ns, about.st_mtime_ns)
