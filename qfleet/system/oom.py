"""How often the kernel killed one of our processes because memory ran out."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
COUNTER = "oom_kill"


def oom_kills(groups: Path = Path("/proc/self/cgroup"), root: Path = ROOT) -> int:
    """How many processes of this control group the kernel killed; 0 if the system does not count them."""
    try:
        entries = groups.read_text().splitlines()
    except OSError:
        return 0
    files = [_counter_file(entry, root) for entry in entries]
    return max((_count(file) for file in files if file is not None), default=0)


def _counter_file(entry: str, root: Path) -> Path | None:
    """The file with the counter; an entry is `number:controllers:/path` in version 1, `0::/path` in version 2."""
    _, controllers, path = entry.split(":", 2)
    if controllers == "":
        return root / path.strip("/") / "memory.events"
    return root / "memory" / path.strip("/") / "memory.oom_control" if controllers == "memory" else None


def _count(file: Path) -> int:
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields.get(COUNTER, 0))
    except (OSError, ValueError):
        return 0
