"""The directory of a new run, and its name."""

import re
from pathlib import Path

from qfleet.errors import StorageError, UsageError
from qfleet.files import sync_folder
from qfleet.plan.local_paths import local_path

NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
LATEST = "latest"  # means the run that was active last
NEXT = "-#"  # at the end of a name: replaced by the next free number
MOST_TRIES = 1000


def next_name(env_id: str, algorithm: str = "dqn") -> str:
    """The default name of a new run: cartpole-rainbow-#."""
    return f"{_slug(env_id)}-{_slug(algorithm)}{NEXT}"


def new_run_dir(out: Path | str, env_id: str, name: str | None = None) -> Path:
    """Make the directory of a new run, named as given; cartpole-dqn-# gets the next free number: cartpole-dqn-0007."""
    parent = local_path(out)
    name = next_name(env_id) if name is None else name
    check_name(name)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = _make_numbered(parent, name.removesuffix(NEXT)) if name.endswith(NEXT) else _make_named(parent, name)
        sync_folder(parent)  # else a power cut could lose the run with its checkpoints
        return path
    except OSError as error:
        raise StorageError(
            f"cannot make a run directory in {parent}",
            f"the system said: {error.strerror or error}",
            "choose another folder with --out",
        ) from error


def _make_named(parent: Path, name: str) -> Path:
    try:
        (parent / name).mkdir()
    except FileExistsError:
        raise _taken_error(parent, name) from None
    return parent / name


def require_free(out: Path, name: str) -> None:
    """Refuse a name that is invalid or taken."""
    check_name(name)
    if (out / name).exists():
        raise _taken_error(out, name)


def _taken_error(parent: Path, name: str) -> UsageError:
    return UsageError(
        f"there is already a run called {name!r} in {parent}",
        "a new run never writes into the directory of an old one",
        f"choose another --name, or go on with it: qfleet resume {parent / name}",
    )


def _make_numbered(parent: Path, stem: str) -> Path:
    numbered = re.compile(re.escape(stem) + r"-([0-9]{1,9})")
    taken = [int(found[1]) for path in parent.iterdir() if (found := numbered.fullmatch(path.name))]
    first = max(taken, default=0) + 1
    for number in range(first, first + MOST_TRIES):
        path = parent / f"{stem}-{number:04}"
        try:
            path.mkdir()
        except FileExistsError:  # another run took this number a moment ago
            continue
        return path
    raise StorageError(f"no free run number after {stem}-{first:04} in {parent}", "", "choose a name with --name")


def _slug(text: str) -> str:
    """CartPole-v1 becomes cartpole, ALE/Pong-v5 pong, maze.py:Maze maze."""
    text = re.sub(r"-v\d+$", "", text.rpartition(":")[2])
    text = re.sub(r"[^a-z0-9]+", "-", text.removeprefix("ALE/").lower()).strip("-")
    return text[:40].strip("-") or "run"


def check_name(name: str) -> None:
    """Refuse a run name that could escape its folder or be mistaken for an option or `latest`."""
    plain = f"{name.removesuffix(NEXT)}-0001" if name.endswith(NEXT) else name
    if NAME.fullmatch(plain) is None or plain[0] in ".-" or plain == LATEST:
        raise UsageError(
            f"{name!r} cannot be the name of a run",
            "a name has 1 to 100 of the characters A-Z a-z 0-9 . _ -, starts with a letter or digit or _,"
            f" and is not {LATEST!r}",
            "choose another --name, for example cartpole-first-try",
        )
