"""Paths on this machine; addresses of remote storage are refused."""

import re
from pathlib import Path

from qfleet.errors import UsageError

# s3://bucket/runs, which Path turns into s3:/bucket/runs. A single letter is a Windows drive.
REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def local_path(path: str | Path) -> Path:
    """A path on this machine; UsageError for an address such as s3://bucket/runs."""
    found = REMOTE.match(str(path))
    if found is None:
        return Path(path)
    rest = str(path)[found.end() :]
    own = found[1].lower() == "file"
    raise UsageError(
        f"{found[1]}://{rest} is not a path on this machine",
        "Remote storage is not supported yet: runs are written to and read from local folders.",
        f"Leave file:// out: /{rest}" if own else "Give a local folder, and copy the run directory when it is done.",
    )
