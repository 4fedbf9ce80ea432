"""What a bundle remembers, read and written by the driver: files in pieces, as orders and words.

In a checkpoint they lie in `bundles/NUMBER-LIFE/`. A life is named anew whenever a bundle is started, so that a file's
name says what is in it for ever. The state comes last: a set without it is not whole.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from qfleet.distributed.learners.actor_learner import LIST, PIECE_BYTES, STATE
from qfleet.distributed.learners.batch_scatter import LearnedItems
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.sync.comm import CommLost

ADOPT_SECONDS = 600.0  # episodes are driven again, step by step
FILE = re.compile(r"bundles/(\d+)-[0-9a-f]+/(.+)")
Lose = Callable[[LearnerHandle, str], None]


class ActorLearnerFiles:
    """One bundle's memory. A bundle that is lost on the way is told of once, and has no more files."""

    def __init__(self, mate: LearnerHandle, limit_seconds: float, lose: Lose) -> None:
        self.mate = mate
        self.limit_seconds = limit_seconds
        self.lose = lose
        self.lost = False

    def files(self) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """Names in a checkpoint, and what each holds, read when it is asked for."""
        if (listed := self.read(LIST)) is None:
            return
        life, *names = msgspec.json.decode(listed, type=list[str])
        for name in names:
            yield f"bundles/{self.mate.number}-{life}/{name}", partial(self.read, name)

    def read(self, name: str) -> bytes | None:
        """A whole file, unless the bundle is lost."""
        found = bytearray()
        more = not self.lost
        try:
            while more:
                self.mate.order({"kind": "read", "name": name, "at": len(found)})
                facts, arrays = self.mate.answer("piece", self.limit_seconds)
                found += arrays["bytes"].tobytes()
                more = bool(facts["more"])
        except CommLost as cause:
            self.give_up(cause)
        return None if self.lost else bytes(found)

    def write(self, files: dict[str, str], read: Callable[[str], bytes], tally: LearnedItems) -> str | None:
        """Give it these files, by their names there and in the checkpoint, to go on with. What was lost, if so."""
        try:
            self.hand(LIST, b"")
            for name, path in files.items():
                self.hand(name, read(path))
            self.mate.order({"kind": "adopt"})
            facts, _ = self.mate.answer("adopted", ADOPT_SECONDS)
        except CommLost as cause:
            self.give_up(cause)
            return None
        tally.begin(facts)
        lanes = int(facts["lost"])  # type: ignore[arg-type]
        return f"{lanes} of its environments could not be re-driven and began new episodes" if lanes else None

    def hand(self, name: str, data: bytes) -> None:
        """Give it one file."""
        whole = np.frombuffer(data, np.uint8)
        for at in range(0, max(1, len(whole)), PIECE_BYTES):
            self.mate.order({"kind": "write", "name": name, "at": at}, {"bytes": whole[at : at + PIECE_BYTES]})
            self.mate.answer("written", self.limit_seconds)

    def give_up(self, cause: CommLost) -> None:
        """It is lost."""
        if not self.lost:
            self.lost = True
            self.lose(self.mate, str(cause))


def bundle_files(names: Sequence[str], number: int) -> dict[str, str]:
    """The files of one bundle by their names there, if the set is whole."""
    matches = [match for name in names if (match := FILE.fullmatch(name)) and int(match[1]) == number]
    found = {match[2]: match[0] for match in matches}
    return found if set(STATE) <= set(found) else {}
