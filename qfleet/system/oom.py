"""Has the kernel killed a process of ours for lack of memory?"""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
COUNTER = "oom_kill"


def oom_kills(groups: Path = Path("/proc/self/cgroup"), root: Path = ROOT) -> int:
    """How many processes of this control group were killed for lack of memory; 0 where the system does not say."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return 0
    return max((_count(file) for line in lines if (file := _counter_file(line, root)) is not None), default=0)


def _counter_file(line: str, root: Path) -> Path | None:
    """The file with the counter; a line is `number:controllers:/path` in version 1, `0::/path` in version 2."""
    _, controllers, path = line.split(":", 2)
    if controllers == "":
        return root / path.strip("/") / "memory.events"
    return root / "memory" / path.strip("/") / "memory.oom_control" if controllers == "memory" else None


def _count(file: Path) -> int:
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields.get(COUNTER, 0))
    except (OSError, ValueError):
        return 0
