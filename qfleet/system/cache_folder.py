"""Where this user's measurements and compiled code are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qfleet"
