"""Finding the calls of the user's own code in the text of a traceback."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

_CALL = r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+),? in (?P<name>[^\n]+)'
_FRAME = re.compile(_CALL + r"(?:\n +(?P<source>[^\n]+))?")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
MAX_FRAMES = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """One call in a traceback."""

    file: str
    line: int
    name: str
    source: str = ""

    def __str__(self) -> str:
        """`my_env.py:12 in step`, with the file as seen from the current folder if it is in there."""
        relative = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        file = self.file if relative.startswith(os.pardir) else relative
        return f"{file}:{self.line} in {self.name}"


def traceback_text(error: BaseException) -> str:
    """A traceback as text; an error from another process has the traceback as its message."""
    return "".join(traceback.format_exception(error)) if error.__traceback__ is not None else str(error)


def user_frames(text: str, max_frames: int = MAX_FRAMES) -> list[Frame]:
    """The last calls of the user's own code in a traceback, otherwise the last call of a library; never qfleet's."""
    frames = list[Frame]()
    for block in re.split(r"(?m)^(?=\s*File \")", text):
        if match := _FRAME.match(block):
            parts = match.groupdict(default="")
            frames.append(Frame(parts["file"], int(parts["line"]), parts["name"].strip(), parts["source"].strip()))
    if "most recent call first" in text:  # as faulthandler writes it
        frames.reverse()
    frames = [frame for frame in frames if not _is_in(frame.file, (_PACKAGE,))]
    user = [frame for frame in frames if not _is_in(frame.file, _LIBRARIES)]
    return user[-max_frames:] or frames[-1:]


def user_location(error: BaseException) -> str:
    """` at my_env.py:12 in step`: the last call of the user's own code; empty if there is none."""
    frames = user_frames(traceback_text(error), 1)
    return f" at {frames[0]}" if frames else ""


def _is_in(file: str, folders: Iterable[str]) -> bool:
    return file.startswith("<") or any(file.startswith(folder + os.sep) for folder in folders)
