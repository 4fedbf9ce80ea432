"""Data types that packages exchange. Shapes: T rows of time, B lanes (environments), N items in a batch, A actions."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from numpy.typing import NDArray

if TYPE_CHECKING:
    from qfleet.data.space_format import EnvSpaces

Array: TypeAlias = NDArray[Any]
# State to be saved: a tree of dicts whose leaves are JSON values or NumPy arrays.
State: TypeAlias = dict[str, Any]
# Return and length of an episode that ended, and the numbers of `log.info` at its last step: NaN where there was none,
# infinity where it was not a number.
Episode: TypeAlias = tuple[float, int, *tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Spec:
    """Shapes and dtypes of a world. `obs` is the shape stored per step; with `stack` > 1 a policy sees that many."""

    obs: tuple[int, ...]
    dtype: str
    actions: tuple[int, ...]
    stack: int = 1
    masked: bool = False
    state: tuple[int, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one observation as the network sees it."""
        return (self.stack, *self.obs) if self.stack > 1 else self.obs

    @property
    def num_actions(self) -> int:
        """The number of (joint) actions."""
        return math.prod(self.actions)


@dataclass(slots=True)
class Step:
    """The result of one step in all lanes. A lane that ended has its final observation; its next step is its reset."""

    obs: Array  # [B, *input_shape]
    reward: Array  # [B] float32
    terminated: Array  # [B] bool
    truncated: Array  # [B] bool
    mask: Array | None = None  # [B, A] bool, True = allowed
    # Lanes [B] whose step never happened, because their environment failed: the observation before was the episode's
    # last, and this one begins a new episode. None: no lane failed.
    lost: Array | None = None
    info: Array | None = None  # [B, I] float64, the numbers of `log.info`; NaN and infinity as in `Episode`


@dataclass(slots=True)
class Rollout:
    """Raw steps from one actor, time-major. A row whose `last` is set holds a final observation and is not a step."""

    obs: Array  # [T, B, *spec.obs]
    action: Array  # [T, B] int64
    reward: Array  # [T, B] float32, raw
    discount: Array  # [T, B] float32, the environment's own: 1 or 0
    last: Array  # [T, B] bool
    source: tuple[int, int, int]  # (worker, incarnation, sequence)
    version: int
    mask: Array | None = None  # [T, B, A] bool
    state: Array | None = None  # [T, B, S] float32, a recurrent policy's memory before each row
    value: Array | None = None  # [T, B, 2] float32, the policy's Q-values: of its action, of the best action
    probability: Array | None = None  # [T, B] float64, of the action, by the exploring policy
    finished: tuple[Episode, ...] = ()  # the episodes that ended
    ends: tuple[int, ...] = ()  # the row in which each of these ended


def count_steps(rollout: Rollout) -> int:
    """The number of rows that are steps, not final observations."""
    return int(rollout.last.size - rollout.last.sum())


@dataclass(slots=True)
class Batch:
    """A learner's batch of steps; reward and discount are those of n steps, gamma included.

    Stacks of frames before and after a single step share memory: `obs` and `next_obs` may be views that overlap.
    """

    obs: Array  # [N, *input_shape]
    action: Array  # [N] int64
    reward: Array  # [N] float32
    discount: Array  # [N] float32
    next_obs: Array  # [N, *input_shape]
    weight: Array  # [N] float32
    ids: Array  # [N] int64
    next_mask: Array | None = None  # [N, A] bool
    mask: Array | None = None  # [N, A] bool


@dataclass(slots=True)
class Sequences:
    """A recurrent learner's batch of windows of W rows, the first `burn_in` of which only warm the memory up.

    The L rows after these are learned from; `ahead` is the window's row that each of them bootstraps from. Rows with
    `last` hold final observations: they are not learned from, and the memory is blank after them.
    """

    obs: Array  # [W, N, *input_shape]
    action: Array  # [W, N] int64
    gain: Array  # [W, N] float32, the raw reward of each row
    last: Array  # [W, N] bool
    state: Array  # [N, S] float32, the memory before the first row
    reward: Array  # [L, N] float32, of n steps
    discount: Array  # [L, N] float32, of n steps
    ahead: Array  # [L, N] int64
    weight: Array  # [N] float32
    ids: Array  # [N] int64
    mask: Array | None = None  # [W, N, A] bool


@dataclass(slots=True)
class Report:
    """The result of one update."""

    loss: float
    priority: Array  # [N] float32; NaN where unknown
    stats: dict[str, Any] = field(default_factory=dict)
    late: list[tuple[Array, Array]] = field(default_factory=list)  # ids and priorities of earlier batches


@dataclass(slots=True)
class Tick:
    """One unit of a worker's work: whether it did anything, and its statistics."""

    busy: bool
    stats: dict[str, Any] = field(default_factory=dict)


class World(Protocol):
    """Several copies of one environment stepped together; ended lanes reset on their next step (NEXT_STEP)."""

    spec: Spec
    num: int

    @property
    def spaces(self) -> "EnvSpaces | None":
        """The environment's own spaces; None if its process cannot write them as text."""

    def reset(self) -> Step:
        """Begin the first episode in every lane."""

    def send(self, action: Array) -> None:
        """Start one step in every lane; the action of a lane that just ended is ignored."""

    def receive(self) -> Step:
        """Finish the step that `send` started."""

    def abandon(self, lanes: Array) -> None:
        """Abandon these lanes' episodes (bool [B]): their next step begins a new one, as after a truncation."""

    def state_dict(self) -> State:
        """The state needed for an exact restore."""

    def load_state_dict(self, state: State) -> Step:
        """Restore the state, directly or by replaying actions; returns the observations reached."""

    def close(self) -> None:
        """Release processes, threads and memory."""


class Channel(Protocol):
    """A queue of rollouts that never blocks."""

    def put(self, rollout: Rollout) -> bool:
        """Add a rollout; False when the channel is full."""

    def get(self) -> Rollout | None:
        """Take the oldest rollout, if there is one."""


class WeightsBoard(Protocol):
    """Holds the newest weights; never blocks."""

    def publish(self, version: int, weights: Any) -> None:
        """Replace the weights."""

    def read(self, newer_than: int) -> tuple[int, Any] | None:
        """The newest weights, if they are newer."""
