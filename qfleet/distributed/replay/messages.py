"""The messages of a replay in another process. Rollouts, batches and state travel as arrays beside them."""

from typing import Annotated, TypeAlias

import numpy as np
from msgspec import Meta

from qfleet.data import State
from qfleet.data.array_messages import BatchForm, RolloutHeader
from qfleet.data.wire_format import Arrays, Count, Message
from qfleet.distributed.worker.messages import Done
from qfleet.replay import CompressionSavings, NStepReturn
from qfleet.save import pack_state, unpack_state

LaneSpan: TypeAlias = tuple[Count, Count, Count, Count]  # lanes [first, stop), rows [begin, end)

# Messages without a reply


class Add(Message):
    """Store a rollout in lanes [first, stop); arrays: the rollout's, and `gain` if raw rewards are stored."""

    header: RolloutHeader
    first: Count
    stop: Count


class SetPriorities(Message):
    """Update priorities; arrays: `ids` and `priority`."""


class SetNStep(Message):
    """Change how rewards are summed over n steps."""

    n_step: NStepReturn


# Requests; each has one reply


class Draw(Message):
    """Cut a batch. Reply: BatchReply, or NoBatch if the replay is empty."""

    size: Annotated[int, Meta(ge=1)]


class Counts(Message):
    """Reply: CountsReply."""


class ReadBatch(Message):
    """The items with the serial numbers in `serials`, weighted by `weight`. Reply: BatchReply."""


class Spans(Message):
    """The rows that are needed. Reply: SpansReply."""


class Seal(Message):
    """End the episodes of lanes [first, stop). Reply: Sealed."""

    first: Count
    stop: Count


class ReadState(Message):
    """All but the rows. Reply: StateReply."""


class LoadState(Message):
    """Restore all but the rows; arrays: a state. Reply: Done."""


class ReadRows(Message):
    """Rows [begin, end) of lanes [first, stop). Reply: StateReply."""

    begin: Count
    end: Count
    first: Count
    stop: Count


class RestoreRows(Message):
    """Write rows [begin, end) of lanes [first, stop) back; arrays: a state. Reply: Done."""

    begin: Count
    end: Count
    first: Count
    stop: Count


class ReadSavings(Message):
    """What the compression of rows saves. Reply: SavingsReply."""


class Clear(Message):
    """Remove all items. Reply: Done."""


class SetGenerator(Message):
    """Replace the state of the random generator; arrays: a state. Reply: Done."""


class SetHistoryFile(Message):
    """Record operations in this file. Reply: Done."""

    file: str


OneWay: TypeAlias = Add | SetPriorities | SetNStep
Read: TypeAlias = Draw | Counts | ReadBatch | Spans | Seal | ReadState | ReadRows | ReadSavings
Change: TypeAlias = LoadState | RestoreRows | Clear | SetGenerator | SetHistoryFile  # their reply is Done
ReplayRequest: TypeAlias = OneWay | Read | Change

# Replies


class BatchReply(Message):
    """A batch, whose arrays are those of the message."""

    form: BatchForm


class NoBatch(Message):
    """The replay is empty."""


class CountsReply(Message):
    """Serial numbers and item counts, and the share of items that was filtered out."""

    head: Count
    tail: Count
    items_added: Count
    filtered: float


class SpansReply(Message):
    """The rows that are needed, by lanes."""

    spans: list[LaneSpan]


class Sealed(Message):
    """How many steps are now the last of an episode."""

    steps: Count


class StateReply(Message):
    """A state, in the arrays."""


class SavingsReply(Message):
    """None if rows are not compressed."""

    savings: CompressionSavings | None


ReplayReply: TypeAlias = BatchReply | NoBatch | CountsReply | SpansReply | Sealed | StateReply | SavingsReply | Done


def state_arrays(state: State) -> Arrays:
    """A state as arrays of a message."""
    return {name: np.frombuffer(file, np.uint8) for name, file in pack_state(state).items()}


def state_in(arrays: Arrays) -> State:
    """The state in a message's arrays."""
    return unpack_state({name: array.tobytes() for name, array in arrays.items()})
