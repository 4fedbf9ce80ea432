"""The memory that a world shares with one of its workers. L lanes, A actions.

The world writes commands and then sends a byte through the worker's socket; the worker writes results and sends a byte
back. System calls lie between every write and the matching read, so memory ordering does not matter.
"""

import math
from typing import Final

import numpy as np

from qfleet.data import Array, Spec, Step
from qfleet.system.shared_memory import SharedMemory, round_to_cache_lines

IDLE: Final = 0
RESET: Final = 1  # the argument is the episode's seed
STEP: Final = 2  # the argument is the joint action

DONE: Final = 1
RAISED: Final = 2
OUTSIDE_SPACE: Final = 3  # or not finite

MESSAGE_BYTES = 4_096


class EnvWorkerMemory:
    """Arrays in shared memory: each lane's command, the command's outcome, and the resulting `step`."""

    def __init__(self, spec: Spec, lanes: int, region: SharedMemory | None = None, *, num_info: int = 0) -> None:
        layout, size = _layout(spec, lanes, num_info)
        self.region = region or SharedMemory(size)
        arrays = {
            name: np.ndarray(shape, dtype, self.region.view, offset) for name, (dtype, shape, offset) in layout.items()
        }
        self.command = arrays["command"]
        self.argument = arrays["argument"]
        self.outcome = arrays["outcome"]
        self._current = arrays["current"]
        self._started_at = arrays["started_at"]
        self._message = arrays["message"]
        mask = arrays["mask"] if spec.masked else None
        self.step = Step(arrays["obs"], arrays["reward"], arrays["terminated"], arrays["truncated"], mask)
        self.step.info = arrays["info"] if num_info else None

    def start_lane(self, lane: int, now: float, *, making: bool = False) -> None:
        """Mark the lane that the worker executes now; `making` while it makes the lane's environment."""
        self._current[:] = lane, making
        self._started_at[0] = now

    def clear_lane(self) -> None:
        """Mark that the worker executes no lane."""
        self._current[0] = -1

    @property
    def current_lane(self) -> int | None:
        """The lane that the worker executes."""
        lane = int(self._current[0])
        return lane if 0 <= lane < len(self.command) else None

    @property
    def making(self) -> bool:
        """Is the worker making an environment?"""
        return bool(self._current[1])

    @property
    def started_at(self) -> float:
        """When the worker started the current lane, on the monotonic clock of the machine."""
        return float(self._started_at[0])

    def set_message(self, lane: int, text: str) -> None:
        """Store an error message of a lane; of a long traceback the end is kept, which has the error itself."""
        head, _, rest = text.partition("\n")
        short = head.encode()[: MESSAGE_BYTES // 4] + b"\n"
        data = short + rest.encode()[-(MESSAGE_BYTES - len(short)) :]
        self._message[lane, : len(data)] = np.frombuffer(data, np.uint8)
        self._message[lane, len(data) :] = 0

    def message(self, lane: int) -> str:
        """The error message of a lane."""
        return bytes(self._message[lane]).rstrip(b"\0").decode(errors="replace")

    def end_flags(self) -> tuple[Array, Array]:
        """Which lanes are terminated, and which truncated; any byte but 0 is True."""
        return self.step.terminated.view(np.uint8) != 0, self.step.truncated.view(np.uint8) != 0


def _layout(spec: Spec, lanes: int, num_info: int) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], int]:
    """Name -> (dtype, shape, offset) of each array, and the size of all."""
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {
        "current": ("int64", (2,)),
        "started_at": ("float64", (1,)),
        "command": ("int8", (lanes,)),
        "argument": ("int64", (lanes,)),
        "outcome": ("int8", (lanes,)),
        "reward": ("float32", (lanes,)),
        "terminated": ("bool", (lanes,)),
        "truncated": ("bool", (lanes,)),
        "obs": (spec.dtype, (lanes, *spec.obs)),
        "mask": ("bool", (lanes, spec.num_actions if spec.masked else 0)),
        "info": ("float64", (lanes, num_info)),
        "message": ("uint8", (lanes, MESSAGE_BYTES)),
    }
    layout = {}
    offset = 0
    for name, (dtype, shape) in arrays.items():
        layout[name] = (dtype, shape, offset)
        offset += round_to_cache_lines(math.prod(shape) * np.dtype(dtype).itemsize)
    return layout, offset
