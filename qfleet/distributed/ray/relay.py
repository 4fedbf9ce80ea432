"""What a course tells, passed on to a driver in another process: kept until the driver says that it has heard it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from qfleet.training.log.run_log import LIVE_SECONDS, Callback, Row
from qfleet.watch import Watcher, json_line


class RelayedItem(msgspec.Struct):
    """One thing that was told: to a watcher (`start`, `row`, `stop`) or to callbacks (`call`)."""

    kind: str
    row: dict[str, Any]


class RelayedNews(msgspec.Struct):
    """Items from number `first` on, and how things stand."""

    first: int
    items: list[RelayedItem]
    live: dict[str, Any] | None = None


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it would be read from metrics.jsonl."""
    return msgspec.json.decode(json_line(row), type=dict[str, Any])


class WatcherRelay:
    """A watcher and a callback beside the course; the driver's thread takes what they keep."""

    def __init__(self) -> None:
        self.every_seconds = LIVE_SECONDS
        self.first = 0
        self.items = list[RelayedItem]()
        self.snapshot = dict[str, Any]()
        self.stop_asked = False
        self.failure = ""  # of a callback, in the driver
        self.lock = threading.Lock()

    def keep(self, kind: str, row: Mapping[str, Any]) -> None:
        """One more."""
        item = RelayedItem(kind, plain(row))
        with self.lock:
            self.items.append(item)

    def start(self, info: Mapping[str, Any]) -> None:
        """The run begins."""
        self.keep("start", info)

    def row(self, row: Mapping[str, Any]) -> None:
        """A row was written."""
        self.keep("row", row)

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """How things stand; only the newest is worth keeping."""
        self.snapshot = plain(snapshot)

    def stop(self, status: Mapping[str, Any]) -> None:
        """The run has ended."""
        self.keep("stop", status)

    def call(self, row: Row) -> bool:
        """A row for callbacks; the answer is what the driver's had to say to an earlier one, or its failure."""
        if self.failure:
            raise RuntimeError(self.failure)
        self.keep("call", row)
        return self.stop_asked

    def since(self, heard: int) -> bytes:
        """What was told since; what was heard before can be forgotten."""
        with self.lock:
            done = max(0, heard - self.first)
            self.items = self.items[done:]
            self.first = self.first + done
            return msgspec.json.encode(RelayedNews(self.first, self.items, self.snapshot or None))


class RelayReader:
    """The driver's side: shows each item once."""

    def __init__(self, watcher: Watcher | None, callbacks: list[Callback], notes: Sequence[str] = ()) -> None:
        self.watcher = watcher
        self.callbacks = callbacks
        self.notes = list(notes)  # what was told before there was a course
        self.heard = 0
        self.run = ""
        self.ended = False

    def take(self, message: bytes) -> bool:
        """Pass news on; True if a callback wants the run to end."""
        news = msgspec.json.decode(message, type=RelayedNews)
        fresh = news.items[max(0, self.heard - news.first) :]
        self.heard = max(self.heard, news.first + len(news.items))
        if self.watcher is not None and news.live is not None and not self.ended:
            self.watcher.live(news.live)
        answers = [self.pass_on(item) for item in fresh]  # every one of them, also after a first yes
        return any(answers)

    def pass_on(self, item: RelayedItem) -> bool:
        """One item to whom it is for."""
        if item.kind == "call":
            answers = [callback(item.row) for callback in self.callbacks]
            return any(isinstance(answer, bool | np.bool_) and bool(answer) for answer in answers)
        if item.kind == "start":
            self.run = str(item.row.get("run", ""))
            item.row["notes"] = [*self.notes, *item.row.get("notes", ())]
        self.ended = self.ended or item.kind == "stop"
        if self.watcher is not None:
            tell: dict[str, Callable[[Mapping[str, Any]], None]] = {
                "start": self.watcher.start,
                "row": self.watcher.row,
                "stop": self.watcher.stop,
            }
            tell[item.kind](item.row)
        return False

    def close(self) -> None:
        """Let go of callbacks that hold files."""
        for callback in self.callbacks:
            getattr(callback, "close", lambda: None)()
