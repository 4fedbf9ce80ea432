"""Which lines of the user's own code an error came from, out of a traceback's text."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

_CALL = r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+),? in (?P<name>[^\n]+)'
_FRAME = re.compile(_CALL + r"(?:\n +(?P<source>[^\n]+))?")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = os.path.dirname(os.path.abspath(__file__))
MOST_FRAMES = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """One call in a traceback."""

    file: str
    line: int
    name: str
    source: str = ""

    def __str__(self) -> str:
        """`my_env.py:12 in step`, with the file as seen from the current folder if it is in there."""
        near = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        shown = self.file if near.startswith(os.pardir) else near
        return f"{shown}:{self.line} in {self.name}"


def text_of(error: BaseException) -> str:
    """A traceback as text; an error that came from another process has brought it along as its message."""
    return "".join(traceback.format_exception(error)) if error.__traceback__ is not None else str(error)


def own_frames(text: str, most: int = MOST_FRAMES) -> list[Frame]:
    """The last calls in a traceback that are the user's own code, or just the last of a library; none of qfleet's."""
    found = list[Frame]()
    for block in re.split(r"(?m)^(?=\s*File \")", text):
        if match := _FRAME.match(block):
            parts = match.groupdict(default="")
            found.append(Frame(parts["file"], int(parts["line"]), parts["name"].strip(), parts["source"].strip()))
    if "most recent call first" in text:  # as faulthandler writes it
        found.reverse()
    found = [frame for frame in found if not _is_in(frame.file, (_OURS,))]
    own = [frame for frame in found if not _is_in(frame.file, _LIBRARIES)]
    return own[-most:] or found[-1:]


def place(error: BaseException) -> str:
    """` at my_env.py:12 in step`: where in the user's own code an error came from, if that is known."""
    frames = own_frames(text_of(error), 1)
    return f" at {frames[0]}" if frames else ""


def _is_in(file: str, folders: Iterable[str]) -> bool:
    return file.startswith("<") or any(file.startswith(folder + os.sep) for folder in folders)
