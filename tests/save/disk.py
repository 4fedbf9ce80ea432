"""Disks that fail: one loses its power between two operations, one returns errors, one is small."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from qfleet.save.files import Data, RealFiles


class PowerCut(BaseException):
    """The machine lost power: no clean-up code may run on its disk."""


@dataclass(eq=False)
class File:
    data: bytes
    safe: bytes = b""  # what an fsync has made safe


@dataclass(eq=False)
class Folder:
    """Current names, names made safe by an fsync, and the changes since; a power cut keeps any subset of those."""

    names: dict[str, "File | Folder"] = field(default_factory=dict)
    safe: dict[str, "File | Folder"] = field(default_factory=dict)
    pending: list[dict[str, "File | Folder | None"]] = field(default_factory=list)

    def change(self, **names: "File | Folder | None") -> None:
        self.pending.append(names)
        _apply(self.names, names)


def _apply(names: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, node in change.items():
        names.pop(name, None)
        if node is not None:
            names[name] = node


class LossyDisk(RealFiles):
    """Real files under `base`, with a model beside them of what would survive a power cut at operation `cut_at`."""

    def __init__(self, base: Path, cut_at: int | None = None) -> None:
        self.base, self.cut_at, self.operations = base, cut_at, 0
        self.model = Folder()

    def make_dir(self, path: Path) -> None:
        self._begin()
        super().make_dir(path)
        self._folder(path.parent).change(**{path.name: Folder()})

    def write(self, path: Path, data: Data) -> None:
        try:
            self._begin()
        except PowerCut:
            self._folder(path.parent).change(**{path.name: File(bytes(data)[: len(data) // 2])})
            raise
        super().write(path, data)
        self._folder(path.parent).change(**{path.name: File(bytes(data))})

    def fsync(self, path: Path) -> None:
        self._begin()
        node = self._node(path)
        assert isinstance(node, File)
        node.safe = node.data

    def fsync_dir(self, path: Path) -> None:
        self._begin()
        if path.is_relative_to(self.base):
            folder = self._folder(path)
            folder.safe, folder.pending = dict(folder.names), []

    def link(self, source: Path, path: Path) -> None:
        self._begin()
        super().link(source, path)
        self._folder(path.parent).change(**{path.name: self._node(source)})

    def rename(self, source: Path, path: Path) -> None:
        self._begin()
        super().rename(source, path)
        assert source.parent == path.parent
        self._folder(path.parent).change(**{source.name: None, path.name: self._node(source)})

    def remove(self, path: Path) -> None:
        self._begin()
        super().remove(path)
        node = self._node(path)
        _empty(node)
        self._folder(path.parent).change(**{path.name: None})

    def after_power_cut(self, target: Path, random: Random) -> None:
        """Write what one possible power cut leaves into `target`."""
        _survive(self.model, target, random, {})

    def _begin(self) -> None:
        self.operations += 1
        if self.cut_at is not None and self.operations >= self.cut_at:
            raise PowerCut

    def _node(self, path: Path) -> File | Folder:
        node: File | Folder = self.model
        for part in path.relative_to(self.base).parts:
            assert isinstance(node, Folder)
            node = node.names[part]
        return node

    def _folder(self, path: Path) -> Folder:
        node = self._node(path)
        assert isinstance(node, Folder)
        return node


def _empty(node: File | Folder) -> None:
    if isinstance(node, Folder):
        for name, child in list(node.names.items()):
            _empty(child)
            node.change(**{name: None})


def _survive(folder: Folder, target: Path, random: Random, contents: dict[File, bytes]) -> None:
    names = dict(folder.safe)
    kept = random.choice([0.0, 0.5, 1.0])
    for change in folder.pending:
        if random.random() < kept:
            _apply(names, change)
    target.mkdir(exist_ok=True)
    for name, node in names.items():
        if isinstance(node, Folder):
            _survive(node, target / name, random, contents)
        else:
            data = contents.setdefault(node, _leftover(node, random))
            (target / name).write_bytes(data)


def _leftover(file: File, random: Random) -> bytes:
    if file.safe == file.data:
        return file.data
    return random.choice([file.data, file.safe, file.data[: len(file.data) // 2], bytes(len(file.data))])


class FaultyDisk(RealFiles):
    """Every operation works but the one with this number, which returns an error."""

    def __init__(self, fail_at: int, code: int) -> None:
        self.fail_at, self.code, self.operations = fail_at, code, 0

    def make_dir(self, path: Path) -> None:
        self._try(super().make_dir, path)

    def write(self, path: Path, data: Data) -> None:
        self._try(super().write, path, data)

    def fsync(self, path: Path) -> None:
        self._try(super().fsync, path)

    def fsync_dir(self, path: Path) -> None:
        self._try(super().fsync_dir, path)

    def link(self, source: Path, path: Path) -> None:
        self._try(super().link, source, path)

    def rename(self, source: Path, path: Path) -> None:
        self._try(super().rename, source, path)

    def remove(self, path: Path) -> None:
        self._try(super().remove, path)

    def _try(self, operation: Callable[..., None], *arguments: object) -> None:
        self.operations += 1
        if self.operations == self.fail_at:
            raise OSError(self.code, os.strerror(self.code))
        operation(*arguments)


class SmallDisk(RealFiles):
    """A disk with room for `capacity` bytes; a write that does not fit stops half-way."""

    def __init__(self, root: Path, capacity: int) -> None:
        self.root, self.capacity = root, capacity
        self.blind = False  # whether the disk claims to be empty

    def write(self, path: Path, data: Data) -> None:
        room = self._room()
        super().write(path, bytes(data)[:room])
        if len(data) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def free_bytes(self, path: Path) -> int:
        return self.capacity if self.blind else self._room()

    def _room(self) -> int:
        files = {
            (info.st_dev, info.st_ino): info.st_size
            for info in (f.stat() for f in self.root.rglob("*.*") if f.is_file())
        }
        return max(0, self.capacity - sum(files.values()))


class NoLinks(RealFiles):
    """A filesystem without hard links."""

    def link(self, source: Path, path: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
