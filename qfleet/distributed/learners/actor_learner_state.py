"""State of actor-learners in a checkpoint, read and written by the driver: a request and a reply for each file.

They lie in `bundles/NUMBER-INSTANCE/`. The instance is named anew at every start of an actor-learner, so that a file's
name determines its content for good. The state comes last: a set of files without it is not complete.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from qfleet.distributed.learners.actor_learner import FILE_LIST, STATE_FILES
from qfleet.distributed.learners.messages import FileContent, FilesLoaded, LoadFiles, ReadFile, Reseed, WriteFile
from qfleet.distributed.learners.pool import LearnerPool
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.messages import Done
from qfleet.system.worker_errors import WorkerLost

LOAD_SECONDS = 600.0  # episodes are driven again, step by step
LOAD_TRIES = 2
FILE = re.compile(r"bundles/(\d+)-[0-9a-f]+/(.+)")


class ActorLearnerStates:
    """The state of all actor-learners of a pool."""

    def __init__(self, pool: LearnerPool) -> None:
        self.pool = pool

    def files(self) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """Names in a checkpoint, and functions that read their content; None once that actor-learner is lost."""
        self.pool.drain(list(self.pool.handles.values()))
        for handle in list(self.pool.handles.values()):
            if handle.ready:
                yield from ActorLearnerFiles(handle, self.pool).files()

    def load(self, names: Sequence[str], read: Callable[[str], bytes]) -> None:
        """Restore each actor-learner from its files; one without a complete set keeps its state."""
        self.pool.drain(list(self.pool.handles.values()))
        for number in list(self.pool.handles):
            for _ in range(LOAD_TRIES):  # one that is lost meanwhile is restarted
                self.pool.await_ready()
                handle = self.pool.handles.get(number)
                if handle is None or self.load_one(handle, names, read):
                    break

    def load_one(self, handle: WorkerHandle, names: Sequence[str], read: Callable[[str], bytes]) -> bool:
        """Restore one actor-learner from its files; False if it is lost."""
        if not (files := complete_files(names, handle.number)):
            self.pool.log_inexact(handle, "the checkpoint holds nothing of its replay")
            return True
        if lanes := ActorLearnerFiles(handle, self.pool).write(files, read):
            self.pool.log_inexact(handle, f"{lanes} of its environments could not be re-driven and began new episodes")
        return self.pool.handles.get(handle.number) is handle

    def reseed(self, number: int) -> None:
        """Let actor-learners sample other batches; one that is still starting has a seed of its own."""
        for handle in self.pool.ready():
            try:
                handle.request(Reseed(number), Done, self.pool.reply_timeout_seconds)
            except WorkerLost as cause:
                self.pool.lose(handle, cause)


class ActorLearnerFiles:
    """The files of one actor-learner. If it is lost meanwhile that is reported once, and there are no more files."""

    def __init__(self, handle: WorkerHandle, pool: LearnerPool) -> None:
        self.handle = handle
        self.pool = pool
        self.timeout_seconds = pool.reply_timeout_seconds
        self.lost = False

    def files(self) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """Names in a checkpoint, and functions that read their content."""
        if (listed := self.read(FILE_LIST)) is None:
            return
        instance_id, *names = msgspec.json.decode(listed, type=list[str])
        for name in names:
            yield f"bundles/{self.handle.number}-{instance_id}/{name}", partial(self.read, name)

    def read(self, name: str) -> bytes | None:
        """A whole file, unless the actor-learner is lost."""
        if self.lost:
            return None
        try:
            _, arrays = self.handle.request(ReadFile(name), FileContent, self.timeout_seconds)
        except WorkerLost as cause:
            self.lose(cause)
            return None
        return arrays["bytes"].tobytes()

    def write(self, files: dict[str, str], read: Callable[[str], bytes]) -> int:
        """Restore from these files, by their names there and in the checkpoint; the number of lanes not re-driven."""
        try:
            self.write_file(FILE_LIST, b"")
            for name, path in files.items():
                self.write_file(name, read(path))
            loaded, _ = self.handle.request(LoadFiles(), FilesLoaded, LOAD_SECONDS)
        except WorkerLost as cause:
            self.lose(cause)
            return 0
        self.pool.env_reports.restore(loaded.report)
        return int(loaded.lost_lanes)

    def write_file(self, name: str, content: bytes) -> None:
        """Send one file."""
        self.handle.request(WriteFile(name), Done, self.timeout_seconds, {"bytes": np.frombuffer(content, np.uint8)})

    def lose(self, cause: WorkerLost) -> None:
        """Report once that the actor-learner is lost."""
        if not self.lost:
            self.lost = True
            self.pool.lose(self.handle, cause)


def complete_files(names: Sequence[str], number: int) -> dict[str, str]:
    """The files of one actor-learner by their names there; empty if the set is not complete."""
    matches = [match for name in names if (match := FILE.fullmatch(name)) and int(match[1]) == number]
    found = {match[2]: match[0] for match in matches}
    return found if set(STATE_FILES) <= set(found) else {}
