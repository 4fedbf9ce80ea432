"""Relays a run's rows and events to the driver's process; items are kept until the driver has received them."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from qfleet.distributed.ray.messages import ItemKind, News, RelayedItem
from qfleet.training.callbacks import RowCallback
from qfleet.training.log.run_status import Row
from qfleet.watch import Watcher, json_line


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it would be read from metrics.jsonl."""
    return msgspec.json.decode(json_line(row), type=dict[str, Any])


class WatcherRelay:
    """A watcher and a callback in the trainer's process, which keep items for the driver."""

    def __init__(self) -> None:
        self.first = 0
        self.items = list[RelayedItem]()
        self.snapshot = dict[str, Any]()
        self.stop_requested = False
        self.callback_error = ""  # of a callback in the driver
        self.lock = threading.Lock()

    def append(self, kind: ItemKind, row: Mapping[str, Any]) -> None:
        """Add an item."""
        item = RelayedItem(kind, plain(row))
        with self.lock:
            self.items.append(item)

    def start(self, info: Mapping[str, Any]) -> None:
        """The run begins."""
        self.append("start", info)

    def row(self, row: Mapping[str, Any]) -> None:
        """A row was written."""
        self.append("row", row)

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """Keep the newest snapshot."""
        self.snapshot = plain(snapshot)

    def stop(self, status: Mapping[str, Any]) -> None:
        """The run has ended."""
        self.append("stop", status)

    def call(self, row: Row) -> bool:
        """Keep a row for callbacks; True if a callback of the driver wants to stop. Raises if one has failed."""
        if self.callback_error:
            raise RuntimeError(self.callback_error)
        self.append("call", row)
        return self.stop_requested

    def news_since(self, num_received: int) -> News:
        """The items that the driver has not received yet; drops those before."""
        with self.lock:
            done = max(0, num_received - self.first)
            self.items = self.items[done:]
            self.first = self.first + done
            return News(self.first, list(self.items), self.snapshot or None)


class RelayReader:
    """The driver's end: delivers each item once."""

    def __init__(self, watcher: Watcher | None, callbacks: list[RowCallback], notes: Sequence[str] = ()) -> None:
        self.watcher = watcher
        self.callbacks = callbacks
        self.notes = list(notes)  # from before the trainer's start
        self.num_received = 0
        self.run = ""
        self.ended = False

    def receive(self, news: News) -> bool:
        """Deliver new items; True if a callback wants the run to end."""
        new_items = news.items[max(0, self.num_received - news.first) :]
        self.num_received = max(self.num_received, news.first + len(news.items))
        if self.watcher is not None and news.live is not None and not self.ended:
            self.watcher.live(news.live)
        stops = [self.deliver(item) for item in new_items]  # a list: deliver all, also after the first True
        return any(stops)

    def deliver(self, item: RelayedItem) -> bool:
        """Deliver one item to the watcher or the callbacks; True if a callback wants the run to end."""
        if item.kind == "call":
            answers = [callback(item.row) for callback in self.callbacks]
            return any(isinstance(answer, bool | np.bool_) and bool(answer) for answer in answers)
        if item.kind == "start":
            self.run = str(item.row.get("run", ""))
            item.row["notes"] = [*self.notes, *item.row.get("notes", ())]
        self.ended = self.ended or item.kind == "stop"
        if self.watcher is not None:
            {"start": self.watcher.start, "row": self.watcher.row, "stop": self.watcher.stop}[item.kind](item.row)
        return False

    def close(self) -> None:
        """Close callbacks that hold files."""
        for callback in self.callbacks:
            getattr(callback, "close", lambda: None)()
