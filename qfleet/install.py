"""How this copy of qfleet was installed, and so how one of its extras is added to it."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

PACKAGE = "qfleet"
SETUP = "scripts/setup"


def install_command(extra: str) -> str:
    """The command that adds an extra to this copy: by the checkout's own scripts, from its path, or from an index."""
    url = _direct_url()
    address = str(url.get("url") or "")
    path = _local_path(address)
    if path is not None and path.exists():
        return _from_path(path, extra, bool((url.get("dir_info") or {}).get("editable")))
    vcs = url.get("vcs_info")
    if path is None and isinstance(vcs, dict):
        commit = f"@{vcs['commit_id']}" if vcs.get("commit_id") else ""
        return _pip(f"{PACKAGE}[{extra}] @ {vcs.get('vcs', 'git')}+{address}{commit}")
    return _pip(f"{PACKAGE}[{extra}]" if path is not None or not address else f"{PACKAGE}[{extra}] @ {address}")


def _from_path(path: Path, extra: str, editable: bool) -> str:
    """From a checkout or a wheel on this machine."""
    setup = path / SETUP
    if not setup.is_file() or Path(sys.prefix) != path / ".venv":
        return _pip(f"{path}[{extra}]", "--editable " if editable else "")
    shown = SETUP if Path.cwd() == path else str(setup)
    return f"{shlex.quote(shown)} {extra}"


def _pip(requirement: str, option: str = "") -> str:
    """A call of pip; double quotes, as they are known from documentation, unless the text needs others."""
    plain = requirement.isprintable() and not set(requirement) & set('"$`\\!')
    return f"pip install {option}" + (f'"{requirement}"' if plain else shlex.quote(requirement))


def _direct_url() -> dict[str, Any]:
    """What pip has recorded about the place that this copy came from; empty if that was an index."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import, and only errors need it

    try:
        found = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # it is not installed but runs from its source
        return {"url": Path(__file__).parents[1].as_uri()}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _local_path(address: str) -> Path | None:
    """The path of a file address."""
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(address)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
