"""Messages between the driver and a learner worker. Every request has one reply; `PeerLost` may take its place."""

from typing import Any

import msgspec

from qfleet.data.array_messages import BatchForm
from qfleet.data.wire_format import Count, Message
from qfleet.distributed.worker.messages import Done
from qfleet.plan.sync_schema import Sync as SyncPlan

# Requests


class FormGroup(Message):
    """Join a process group; how depends on the backend: shared memory is sent as descriptors after this message."""

    number: Count  # of the group
    size: Count
    sync: SyncPlan
    updates: Count  # made so far
    steps: Count  # of all actor-learners
    rank: Count = 0
    # where gloo or NCCL meet
    address: str = ""
    port: Count = 0
    slot_bytes: Count = 0  # of the shared memory
    ranks: tuple[Count, ...] = ()  # of MPI
    shards: tuple[str, ...] = ()  # names of a parameter server's shards on Ray


class ReadHashes(Message):
    """Hash the state."""


class LearnShare(Message):
    """Learn from the batch in the arrays; its gradient counts `share` times."""

    updates: Count
    rate: float
    form: BatchForm
    share: float


class LearnPositions(Message):
    """Learn from the transitions of the data set at the positions in the arrays; the gradient counts `share` times."""

    updates: Count
    rate: float
    share: float


class LearnOwn(Message):
    """An actor-learner learns from a batch of its own replay; the rest are totals over all replays."""

    updates: Count
    rate: float
    learners: Count
    items: Count
    mass: float
    top: float
    steps: Count  # of all actor-learners


class ReadFile(Message):
    """Read a file of the actor-learner's state; the list of files has an empty name."""

    name: str


class WriteFile(Message):
    """Keep a saved file, whose content is in the arrays; the list of files comes first, and clears all others."""

    name: str


class LoadFiles(Message):
    """Restore the state from the files that were written."""


class Reseed(Message):
    """Sample other batches from here on."""

    number: Count


LearnerRequest = (
    FormGroup | ReadHashes | LearnShare | LearnPositions | LearnOwn | ReadFile | WriteFile | LoadFiles | Reseed
)

# Replies


class ReplayTotals(msgspec.Struct, frozen=True):
    """An actor-learner's replay at its last draw, its steps until then, and whether it acted too slowly for it."""

    items: Count
    mass: float
    beta: float
    top: float
    steps: Count
    behind: bool


class EnvReport(msgspec.Struct, frozen=True):
    """What an actor-learner reports of its environments and its replay."""

    instance_id: str
    episodes: list[tuple[float, int]] = []
    faults: list[dict[str, Any]] = []
    totals: ReplayTotals | None = None  # before its first draw there are none
    info: list[tuple[float, ...]] = []  # the numbers of `log.info` for each of the episodes


class GroupJoined(Message):
    """The learner has joined the group, with this state and these parameters of the network."""

    number: Count
    state_hash: str
    parameters: str  # their hash
    report: EnvReport | None = None


class Hashes(Message):
    """Hashes of the whole state, of weights and target networks, and of the weights."""

    all: str
    targets: str
    weights: str


class Learned(Message):
    """The update was made; priorities of a share are in the arrays. `given_up`: the cosine that turned a codec off."""

    finite: bool
    seconds: float
    given_up: float | None = None
    report: EnvReport | None = None


class FileContent(Message):
    """A file, whose content is in the arrays."""


class FilesLoaded(Message):
    """The state was restored; environments that could not be driven again began new episodes."""

    lost_lanes: Count
    report: EnvReport


LearnerReply = GroupJoined | Hashes | Learned | FileContent | Done | FilesLoaded
