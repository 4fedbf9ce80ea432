"""What a report of pip-audit means: `python audit.py REPORT.json`. Exit code 1 if a pinned package has a known hole."""

import json
import sys
from pathlib import Path
from typing import Any


def verdict(report: dict[str, Any]) -> tuple[int, list[str]]:
    """Exit code and lines to print. A package that was not looked up is not called sound."""
    packages = report.get("dependencies", [])
    asked = [each for each in packages if "skip_reason" not in each]
    holes = [(each, hole) for each in asked for hole in each.get("vulns", [])]
    if not asked:
        return 0, ["audit: skipped: no database of vulnerabilities can be reached"]
    lines = [
        f"audit: {each['name']} {each['version']}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or '-'}"
        for each, hole in holes
    ]
    unknown = f", {len(packages) - len(asked)} not known there" if len(asked) < len(packages) else ""
    return int(bool(holes)), [*lines, f"audit: {len(asked)} packages looked up{unknown}, {len(holes)} known holes"]


def read(file: Path) -> dict[str, Any]:
    """The report; an empty one if pip-audit could not write any."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    code, said = verdict(read(Path(sys.argv[1])))
    print("\n".join(said))
    sys.exit(code)
