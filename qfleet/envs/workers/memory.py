"""What a world and one of its workers say to each other, in memory that both see. L lanes, A actions.

The world writes commands, then a byte into the worker's socket; the worker writes answers, then a byte back. System
calls lie between every write and its read, so that no order of memory has to be relied upon.
"""

import math
from typing import Final

import numpy as np

from qfleet.data import Array, Spec, Step
from qfleet.system.shared_memory import SharedMemory

IDLE: Final = 0
RESET: Final = 1  # the argument is the episode's seed
STEP: Final = 2  # the argument is the joint action

DONE: Final = 1
RAISED: Final = 2
WRONG: Final = 3  # outside its own spaces, or not finite

TEXT_BYTES = 4_096
_ALIGNMENT = 64


class EnvWorkerMemory:
    """Arrays over a region: what each lane is to do, how that ended, and the `step` that came of it."""

    def __init__(self, spec: Spec, lanes: int, region: SharedMemory | None = None) -> None:
        layout, size = _layout(spec, lanes)
        self.region = region or SharedMemory(size)
        parts = {
            name: np.ndarray(shape, dtype, self.region.view, offset) for name, (dtype, shape, offset) in layout.items()
        }
        self.command = parts["command"]
        self.argument = parts["argument"]
        self.outcome = parts["outcome"]
        self._at = parts["at"]
        self._beat = parts["beat"]
        self._text = parts["text"]
        mask = parts["mask"] if spec.masked else None
        self.step = Step(parts["obs"], parts["reward"], parts["terminated"], parts["truncated"], mask)

    def begin(self, lane: int, now: float, *, making: bool = False) -> None:
        """The worker turns to a lane, or makes its environment first."""
        self._at[:] = lane, making
        self._beat[0] = now

    def end(self) -> None:
        """The worker has done what it was told."""
        self._at[0] = -1

    @property
    def at(self) -> int | None:
        """The lane that the worker is busy with."""
        lane = int(self._at[0])
        return lane if 0 <= lane < len(self.command) else None

    @property
    def making(self) -> bool:
        """Is an environment being made there?"""
        return bool(self._at[1])

    @property
    def beat(self) -> float:
        """When the worker turned to it, on the clock that all processes share."""
        return float(self._beat[0])

    def say(self, lane: int, text: str) -> None:
        """Leave a text about a lane; of a long one the end is kept, where a traceback says most."""
        head, _, rest = text.partition("\n")
        short = head.encode()[: TEXT_BYTES // 4] + b"\n"
        data = short + rest.encode()[-(TEXT_BYTES - len(short)) :]
        self._text[lane, : len(data)] = np.frombuffer(data, np.uint8)
        self._text[lane, len(data) :] = 0

    def said(self, lane: int) -> str:
        """The text about a lane."""
        return bytes(self._text[lane]).rstrip(b"\0").decode(errors="replace")

    def flags(self) -> tuple[Array, Array]:
        """Which lanes are terminated, and which truncated; any byte but 0 is True."""
        return self.step.terminated.view(np.uint8) != 0, self.step.truncated.view(np.uint8) != 0


def _layout(spec: Spec, lanes: int) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], int]:
    """Name -> (dtype, shape, offset), and the bytes of all."""
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "at": ("int64", (2,)),
        "beat": ("float64", (1,)),
        "command": ("int8", (lanes,)),
        "argument": ("int64", (lanes,)),
        "outcome": ("int8", (lanes,)),
        "reward": ("float32", (lanes,)),
        "terminated": ("bool", (lanes,)),
        "truncated": ("bool", (lanes,)),
        "obs": (spec.dtype, (lanes, *spec.obs)),
        "mask": ("bool", (lanes, spec.num_actions if spec.masked else 0)),
        "text": ("uint8", (lanes, TEXT_BYTES)),
    }
    layout = {}
    offset = 0
    for name, (dtype, shape) in parts.items():
        layout[name] = (dtype, shape, offset)
        offset += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return layout, offset
