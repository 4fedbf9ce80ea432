"""A stream that never raises into training: when its reader is gone it falls silent and remembers."""

import os
from typing import IO

STANDARD = (1, 2)
_SIMPLE = str.maketrans({"·": "|", "…": "...", "–": "-", "█": "#", "░": ".", "±": "+/-"})


def simplify(text: str) -> str:
    """The text for terminals that know ASCII only."""
    return text.translate(_SIMPLE)


class SafeStream:
    """Wraps a text stream. `broken` is set once its reader is gone; from then on everything is swallowed."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.broken = False

    @property
    def encoding(self) -> str:
        """How the stream turns text into bytes."""
        return getattr(self._file, "encoding", None) or "utf-8"

    @property
    def simple(self) -> bool:
        """Does the stream know ASCII only?"""
        return not self.encoding.lower().replace("_", "-").startswith("utf")

    def write(self, text: str) -> int:
        """Write, or swallow when nobody reads any more."""
        if self.broken:
            return len(text)
        try:
            self._file.write(self._known(text))
        except (OSError, ValueError):
            self._break()
        return len(text)

    def _known(self, text: str) -> str:
        """The text in characters the stream can encode."""
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return simplify(text).encode(self.encoding, "replace").decode(self.encoding)
        return text

    def flush(self) -> None:
        """Flush, or fall silent."""
        if self.broken:
            return
        try:
            self._file.flush()
        except (OSError, ValueError):
            self._break()

    def line(self, text: str) -> None:
        """Write one line and flush it."""
        self.write(text + "\n")
        self.flush()

    def isatty(self) -> bool:
        """Is a person watching?"""
        try:
            return self._file.isatty()
        except (OSError, ValueError, AttributeError):
            return False

    def fileno(self) -> int:
        """The descriptor below, for asking the terminal's size."""
        return self._file.fileno()

    def _break(self) -> None:
        self.broken = True
        try:
            if self._file.fileno() in STANDARD:
                _drain(self._file.fileno())
        except (OSError, ValueError, AttributeError):
            return


def _drain(descriptor: int) -> None:
    """Point a standard stream whose reader left at nothing: else Python complains at its own exit."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
