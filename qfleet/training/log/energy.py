"""Energy counters of the processors, where they exist and are readable (Intel and AMD RAPL on Linux)."""

from pathlib import Path

COUNTERS = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules that all processors have used since it was made. Read it regularly: counters wrap around."""

    def __init__(self, folder: Path = COUNTERS) -> None:
        self.used = 0  # microjoules
        # Whole packages only: core, uncore and dram are parts of them, and psys is the sum of all.
        zones = sorted(folder.glob("intel-rapl:*"))
        packages = [zone for zone in zones if text_in(zone / "name").startswith("package")]
        found = {zone: read(zone / "energy_uj") for zone in packages}
        self.last = {zone: value for zone, value in found.items() if value is not None}

    def joules(self) -> float | None:
        """Joules so far; None without counters."""
        for zone, before in self.last.items():
            now = read(zone / "energy_uj")
            if now is None:
                continue
            wrapped = (read(zone / "max_energy_range_uj") or 0) if now < before else 0
            self.used += max(0, now - before + wrapped)
            self.last[zone] = now
        return self.used / 1e6 if self.last else None


def text_in(path: Path) -> str:
    """The text of a short file; empty if it cannot be read: often only the superuser may read counters."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def read(path: Path) -> int | None:
    """The integer in a file, if there is one."""
    text = text_in(path)
    return int(text) if text.isdigit() else None
