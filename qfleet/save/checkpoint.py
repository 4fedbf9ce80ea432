"""Checkpoints: whole or absent. The newest whole one is used; a damaged one is renamed and reported."""

import errno
import hashlib
import itertools
import os
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from qfleet.errors import NoCheckpointError, QfleetError, StorageError
from qfleet.files import is_folder
from qfleet.save.commit import Blob, Link, delete_checkpoint, discard, fill, make_root, publish, recover, temporary_name
from qfleet.save.damage import Damaged, NewerFormat
from qfleet.save.files import RealFiles
from qfleet.save.manifest import FileEntry, Manifest, parse_manifest, step_name, write_manifest
from qfleet.save.verify import hash_problem, open_saved, read_manifest, require_folder, step_folders, tree_problems

__all__ = ["Checkpoint", "CheckpointWarning", "Checkpoints", "Link"]

T = TypeVar("T")
SPARE = 1.3  # free space required, as a multiple of the last save's size
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed step. Every byte read from it is checked."""

    step: int
    path: Path
    meta: dict[str, Any]
    files: dict[str, FileEntry]
    _verified: set[str] = field(default_factory=set, repr=False, compare=False)

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """The bytes of one file, if they are the ones that were committed and at most `max_bytes`."""
        entry = self._entry(name)
        if max_bytes is not None and entry.bytes > max_bytes:
            raise Damaged(self.path.name, f"{name} has {entry.bytes} bytes where at most {max_bytes} are expected")
        with open_saved(self.path, name) as file:
            data = file.read(entry.bytes + 1)
        if len(data) != entry.bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise Damaged(self.path.name, f"{name} is not what the manifest says")
        self._verified.add(name)
        return data

    def link(self, name: str) -> Link:
        """A link to this file for the next commit, which then does not write it again."""
        entry = self._entry(name)
        return Link(self.path / name, entry.sha256, entry.bytes)

    def verify_unread(self) -> None:
        """Check the files that were not checked yet."""
        for name in sorted(self.files.keys() - self._verified):
            if problem := hash_problem(self.path, name, self.files[name]):
                raise Damaged(self.path.name, problem)
            self._verified.add(name)

    def _entry(self, name: str) -> FileEntry:
        if name not in self.files:
            raise Damaged(self.path.name, f"it has no file {name}")
        return self.files[name]


class _DamagedCheckpoint(NamedTuple):
    path: Path
    renamed: Path | None
    damage: Damaged


class Checkpoints:
    """The checkpoints of one run. A writer must hold the run's lock; `writer=False` promises to change nothing."""

    def __init__(
        self,
        root: Path,
        *,
        keep: int = 2,
        log_event: Callable[..., object] | None = None,
        warn: Callable[[str], object] | None = None,
        files: RealFiles | None = None,
        writer: bool = True,
    ) -> None:
        if keep < 2:
            raise ValueError(f"keep={keep}: at least 2 checkpoints must be kept, or one bad file would end the run")
        self.root = Path(root)
        self.keep = keep
        self.writer = writer
        self._log_event = log_event or (lambda kind, **fields: None)
        self.warn = warn or _warn
        self._files = files or RealFiles(self.root.parent)
        require_folder(self.root)
        self._whole: set[int] = set()  # steps whose every byte this object has written or checked
        self._last_bytes: int | None = None
        if writer and (removed := recover(self._files, self.root)):
            self._log_event("checkpoint_leftovers_removed", count=removed)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first; whether it is whole shows when it is opened."""
        return [step for step, _ in step_folders(self.root)]

    def newest(self, strict: bool = False) -> Checkpoint:
        """The newest whole checkpoint, every byte checked; `restore` does not hash again what it reads."""
        return self.restore(lambda checkpoint: checkpoint, strict=strict)

    def restore(self, load: Callable[[Checkpoint], T], *, strict: bool = False, whole: bool = True) -> T:
        """The result of `load` for the newest whole checkpoint, each byte hashed once.

        `load` is called again with an older one when damage shows, so it must overwrite all that it set before.
        With `whole=False` the files that `load` does not read are not checked.
        """
        damaged: list[_DamagedCheckpoint] = []
        for step, path in reversed(step_folders(self.root)):
            try:
                result = self._load(step, path, load, whole)
            except Damaged as damage:
                if strict:
                    raise _strict_error(path, damage) from None
                damaged.append(_DamagedCheckpoint(path, self._rename_damaged(step, path), damage))
                continue
            self._report(damaged, path)
            return result
        self._report(damaged, None)
        raise _no_checkpoint_error(self.root, damaged)

    def load(self, step: int, *, whole: bool = True) -> Checkpoint:
        """The checkpoint of one step; with `whole=False` its files are checked only as they are read."""
        path = self.root / step_name(step)
        if not is_folder(self.root, path.name):
            raise NoCheckpointError(
                f"There is no checkpoint {path}.",
                "That step was never saved, or it was deleted to make room for newer ones.",
                f"Choose one of the steps {self.steps()}.",
            )
        return self._load(step, path, lambda checkpoint: checkpoint, whole)

    def commit(self, step: int, blobs: Iterable[tuple[str, Blob]], meta: dict[str, Any]) -> Checkpoint:
        """Save one step or change nothing; an earlier save of the same step is replaced. Blobs are taken one by one.

        Readers that are too old for this format recommend to install the version `meta["versions"]["qfleet"]`.
        """
        path = self.root / step_name(step)
        blank = parse_manifest(write_manifest(Manifest(step, {}, meta)))  # raises now if `meta` cannot be written
        earlier = self.steps()[-1:]
        self.require_space()
        temporary = temporary_name(self.root)
        try:
            make_root(self._files, self.root)
            manifest, self._last_bytes = fill(self._files, temporary, blobs, blank)
            publish(self._files, temporary, path)
        except BaseException as error:
            discard(self._files, temporary)
            if isinstance(error, OSError):
                raise self._failed(path, earlier, error) from error
            raise
        self._whole.add(step)
        self._log_event("checkpoint_committed", step=step, bytes=_total_bytes(manifest))
        return Checkpoint(step, path, manifest.meta, manifest.files)

    def prune(self, best_steps: Collection[int] = ()) -> list[int]:
        """Delete all but the `keep` newest whole checkpoints and the best ones; returns the deleted steps."""
        whole = [step for step, path in reversed(step_folders(self.root)) if self._is_whole(step, path)]
        pruned = []
        refused = None
        for step in sorted(set(whole[self.keep :]) - set(best_steps)):
            try:
                delete_checkpoint(self._files, self.root / step_name(step))
                pruned.append(step)
            except OSError as error:  # delete the others all the same
                refused = error
        if pruned:
            self._log_event("checkpoint_pruned", steps=pruned)
        if refused is not None:
            what = f"An old checkpoint in {self.root} could not be deleted"
            raise _storage_error(what, "The newer ones are whole; this one only takes space.", refused) from refused
        return pruned

    def require_space(self, need_bytes: int | None = None) -> None:
        """Refuse to begin a save that the disk cannot hold: 1.3 times `need_bytes`, or of what the last save took."""
        last = self._last_size() if need_bytes is None else need_bytes
        need = int(last * SPARE)
        place = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.is_dir())
        free = self._files.free_bytes(place)
        if free < need:
            raise StorageError(
                f"There are {free} bytes free for checkpoints in {self.root}, and {need} are needed.",
                f"A checkpoint takes {last} bytes, and a save asks for {SPARE} times that.",
                "Free some space on that disk, or save less with save.replay=none or a smaller replay.capacity.",
            )

    def _last_size(self) -> int:
        if self._last_bytes is None:
            folders = step_folders(self.root)
            try:
                self._last_bytes = _total_bytes(read_manifest(folders[-1][1])) if folders else 0
            except QfleetError:
                return 0
        return self._last_bytes

    def _load(self, step: int, path: Path, load: Callable[[Checkpoint], T], whole: bool) -> T:
        manifest = read_manifest(path)
        if problems := tree_problems(path, manifest.files):
            raise Damaged(path.name, *problems)
        checkpoint = Checkpoint(step, path, manifest.meta, manifest.files)
        result = load(checkpoint)
        if whole:
            checkpoint.verify_unread()
            self._whole.add(step)
        return result

    def _is_whole(self, step: int, path: Path) -> bool:
        """Whether a checkpoint is whole; hashes are computed once, presence and sizes checked every time."""
        try:
            self._load(step, path, lambda checkpoint: checkpoint, whole=step not in self._whole)
        except NewerFormat:
            return False
        except Damaged as damage:
            self._report([_DamagedCheckpoint(path, self._rename_damaged(step, path), damage)], None)
            return False
        return True

    def _rename_damaged(self, step: int, path: Path) -> Path | None:
        """Rename a damaged checkpoint so that it is no longer read; returns its new path, or None if it stays."""
        self._whole.discard(step)
        if not self.writer:
            return None
        suffixes = itertools.chain([""], (f".{number}" for number in itertools.count(1)))
        names = (path.with_name(f"{path.name}.corrupt{suffix}") for suffix in suffixes)
        renamed = next(name for name in names if not os.path.lexists(name))
        try:
            self._files.rename(path, renamed)
            self._files.fsync_dir(self.root)
        except OSError:
            return None
        return renamed

    def _report(self, damaged: list[_DamagedCheckpoint], used: Path | None) -> None:
        for path, renamed, damage in damaged:
            kept = renamed.name if renamed else None
            names = {"bad": path.name, "aside": kept, "used": used.name if used else None}
            self._log_event("checkpoint_corrupt", **names, problems=damage.problems)
            instead = f"; going on from {used.name}" if used else ""
            text = f"The checkpoint {path.name} is damaged ({'; '.join(damage.problems)})"
            self.warn(f"{text}, kept as {kept or path.name}{instead}.")

    def _failed(self, path: Path, earlier: list[int], error: OSError) -> StorageError:
        self._log_event("checkpoint_failed", checkpoint=path.name, reason=error.strerror or str(error))
        kept = f"The last one, {step_name(earlier[0])}, is still there." if earlier else "There is no earlier one."
        return _storage_error(f"The checkpoint {path} could not be saved", kept, error)


def _warn(text: str) -> None:
    warnings.warn(text, CheckpointWarning, stacklevel=4)


def _total_bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files.values())


def _storage_error(what: str, why: str, error: OSError) -> StorageError:
    full = error.errno in _FULL
    fix = "Free some space on that disk" if full else "Check the disk and the permissions of the run directory"
    return StorageError(f"{what}: {error.strerror or error}.", why, f"{fix}, then resume.")


def _strict_error(path: Path, damage: Damaged) -> NoCheckpointError:
    return NoCheckpointError(
        f"The newest checkpoint {path} is damaged: {'; '.join(damage.problems)}.",
        "With --strict only the newest checkpoint is good enough.",
        "Resume without --strict to go on from the newest whole one.",
    )


def _no_checkpoint_error(root: Path, damaged: list[_DamagedCheckpoint]) -> NoCheckpointError:
    found = "; ".join(f"{path.name}: {', '.join(damage.problems)}" for path, _, damage in damaged)
    return NoCheckpointError(
        f"There is no usable checkpoint in {root}.",
        f"Each one there is damaged ({found})." if found else "Nothing was saved there yet.",
        "Restore the directory from a copy, or start a new run; qfleet never starts over by itself.",
    )
