"""Hashes of the pinned packages for scripts/setup and scripts/audit: `.venv/bin/python scripts/lock.py` asks the index.

Run it after a change of constraints.txt or of audit.in. Each file in scripts/locked/ names every package that a set
needs with the SHA-256 of its files for Linux; pip installs nothing else from them. torch is left out: several indexes
serve builds of it that are different files (docs/decisions/0002-dependencies.md).
"""

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from pip._internal.index.collector import LinkCollector, parse_links
from pip._internal.models.link import Link
from pip._internal.models.search_scope import SearchScope
from pip._internal.network.session import PipSession

ROOT = Path(__file__).parents[1]
INDEX = "https://pypi.org/simple"
PYTHONS = ("11", "12", "13", "14")
PLATFORM = re.compile(r"any|manylinux.*_(x86_64|aarch64)")
LEFT_OUT = {"qfleet", "torch"}


def pins(file: Path) -> dict[str, str]:
    """Names in a file of pins, and what follows `==`: a version, perhaps a marker."""
    lines = re.findall(r"^([\w.-]+)==(.+)$", file.read_text(), re.MULTILINE)
    return {canonicalize_name(name): pin for name, pin in lines}


def needed(extra: str) -> set[str]:
    """All packages that a set of qfleet's needs, by what is installed here."""
    found: set[str] = set()
    todo = [("qfleet", extra)]
    while todo:
        name, wanted = todo.pop()
        for line in metadata.requires(name) or []:
            asked = Requirement(line)
            if asked.marker is not None and not asked.marker.evaluate({"extra": wanted}):
                continue
            key = canonicalize_name(asked.name)
            more = [(asked.name, each) for each in ("", *asked.extras) if f"{key}[{each}]" not in found]
            found |= {f"{key}[{each}]" for _, each in more} | {key}
            todo += more
    return {name for name in found if "[" not in name} - LEFT_OUT


def fits(name: str, python: str) -> bool:
    """Is it a file for this Python on Linux?"""
    tags = [tag for tag in parse_wheel_filename(name)[3] if PLATFORM.fullmatch(tag.platform)]
    exact = any(tag.interpreter in ("py3", f"cp3{python}") for tag in tags)
    return exact or any(tag.abi == "abi3" and int(tag.interpreter[3:]) <= int(python) for tag in tags)


def files(collector: LinkCollector, name: str, version: str) -> dict[str, str]:
    """Every file that the index has of a version, and its SHA-256."""
    page = collector.fetch_response(Link(f"{INDEX}/{name}/"))
    found = {}
    for link in parse_links(page) if page is not None else []:
        parse = parse_wheel_filename if link.filename.endswith(".whl") else parse_sdist_filename
        try:
            known = parse(link.filename)[1]
        except ValueError:
            continue
        if str(known) == version and link.hash_name == "sha256":
            found[link.filename] = str(link.hash)
    return found


def locked(name: str, pin: str, found: dict[str, str]) -> str:
    """The lines of one package; without a wheel for the newest Python it is not for that one."""
    wheels = {file: [each for each in PYTHONS if fits(file, each)] for file in found if file.endswith(".whl")}
    kept = [file for file, fitting in wheels.items() if fitting]
    kept += [file for file in found if file.endswith(".tar.gz")]
    newest = any(PYTHONS[-1] in fitting for fitting in wheels.values())
    if ";" not in pin and any(wheels.values()) and not newest:
        pin += '; python_version < "3.14"'
    hashes = [f"    --hash=sha256:{found[file]}" for file in sorted(kept)]
    return f"{name}=={pin} \\\n" + " \\\n".join(hashes) + "\n"


def main() -> None:
    session = PipSession(retries=2, index_urls=[INDEX])
    session.timeout = 20
    scope = SearchScope.create(find_links=[], index_urls=[INDEX], no_index=False)
    collector = LinkCollector(session=session, search_scope=scope)
    known = pins(ROOT / "constraints.txt")
    audit = pins(ROOT / "scripts/locked/audit.in")
    extras = ("all", "docs", "dev")
    sets = {extra: {name: known[name] for name in needed(extra) if name in known} for extra in extras}
    sets["audit"] = audit
    cache: dict[tuple[str, str], str] = {}
    for each, packages in sets.items():
        for name, pin in packages.items():
            if (name, pin) not in cache:
                cache[name, pin] = locked(name, pin, files(collector, name, pin.partition(";")[0]))
        lines = [cache[item] for item in sorted(packages.items())]
        head = "# Made by scripts/lock.py: the only files that scripts/ install of these packages, by SHA-256.\n"
        (ROOT / f"scripts/locked/{each}.txt").write_text(head + "".join(lines))
        print(f"{each}: {len(packages)} packages")


if __name__ == "__main__":
    main()
