"""Messages between the driver of a run on Ray and its trainer."""

from typing import Any, Literal, TypeAlias

import msgspec

from qfleet.data.wire_format import Count, Message
from qfleet.plan.schema import Plan


class TrainTask(Message):
    """The run to train or resume; the user's own objects go beside it."""

    plan: Plan
    path: str  # the run to resume, or the directory for a new one
    fresh: bool
    name: str | None = None
    weights_from: str | None = None
    command: list[str] | None = None
    notes: tuple[str, ...] = ()  # changes to the plan of a resumed run
    changed_parts: tuple[str, ...] = ()  # the user's own parts that are not those of the beginning
    strict: bool = False


# From the driver


class GetNews(Message):
    """Asks for the items after the first `num_received`; the reply comes after a moment, or when the run is over."""

    num_received: Count


class RequestStop(Message):
    """The driver received a signal."""

    signal: str


class StopByCallback(Message):
    """A callback of the driver returned True."""


class FailByCallback(Message):
    """A callback of the driver raised."""

    what: str


TrainerRequest: TypeAlias = GetNews | RequestStop | StopByCallback | FailByCallback


# From the trainer


ItemKind: TypeAlias = Literal["start", "row", "stop", "call"]


class RelayedItem(msgspec.Struct, frozen=True):
    """One item for the watcher (`start`, `row`, `stop`) or for callbacks (`call`)."""

    kind: ItemKind
    row: dict[str, Any]


class RunDone(Message):
    """The run came to its end, or was stopped."""

    path: str  # the run directory


class RunFailed(Message):
    """The run ended with an error."""

    error: str  # the name of a class of qfleet's errors; empty for any other error
    what: str
    why: str = ""
    fix: str = ""
    trace: str = ""
    errno: int = 0  # of an error of the system, such as a full disk
    file: str | None = None


RunResult: TypeAlias = RunDone | RunFailed


class News(Message):
    """Items from number `first` on, the newest snapshot, and the result if the run is over."""

    first: Count
    items: list[RelayedItem]
    live: dict[str, Any] | None = None
    result: RunResult | None = None
