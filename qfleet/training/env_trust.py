"""Which runs may name code, and places to connect to: those that a command of this user wrote.

The proof is a keyed hash in the run directory; the key never leaves the user's own state folder.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qfleet.envs import absolute_id, absolute_wrappers, module_file, wrapper_files
from qfleet.errors import StorageError, UsageError
from qfleet.files import sync_folder
from qfleet.plan import names_code, needs_trust, trusted_settings
from qfleet.plan.schema import Env, Plan
from qfleet.plan.setting_text import format_value
from qfleet.watch import read_json, write_json
from qfleet.watch.run_files import open_plain

FILE = "trust.json"
KEY_BYTES = 32


def key() -> bytes:
    """This user's key, made on first use, readable by this user only."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "qfleet"
    path = home / "trust.key"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            return read_key(path)
        make_key(path)
        return read_key(path)
    except OSError as error:
        raise StorageError(
            f"the key {path} cannot be read or made",
            f"The system said: {error.strerror or error}.",
            "Mend the folder's permissions, or name another state folder with XDG_STATE_HOME.",
        ) from error


def read_key(path: Path) -> bytes:
    """Read the key from a file; refuse one of another length."""
    with os.fdopen(open_plain(path), "rb") as file:
        found = file.read(KEY_BYTES + 1)
    if len(found) != KEY_BYTES:
        raise StorageError(
            f"the key {path} is damaged",
            f"A key has {KEY_BYTES} bytes; this file has {'fewer' if len(found) < KEY_BYTES else 'more'}.",
            "Delete it; runs that name code will ask for --trust-env once more.",
        )
    return found


def make_key(path: Path) -> None:
    """Make a new key, linked to its name only when complete; of two made at once the first one stays."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(open_plain(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
        sync_folder(path.parent)
    finally:
        draft.unlink()


def proof(run_dir: Path, env: Env) -> str:
    """A hash that only this user can make of this run and the code it names."""
    facts: dict[str, Any] = {"run": str(run_dir.resolve()), "env": absolute_id(env.id), "options": env.options}
    if env.secrets:
        facts["secrets"] = env.secrets
    if file := module_file(env.id):
        facts["file"] = file  # in another folder the same name may lead to another module
    if env.wrappers:
        facts |= {"wrappers": absolute_wrappers(env), "wrapper_files": wrapper_files(env)}
    return keyed_hash(facts)


def places_proof(run_dir: Path, settings: Mapping[str, Any]) -> str:
    """A hash that only this user can make of this run and the places it names."""
    return keyed_hash({"run": str(run_dir.resolve()), "settings": dict(settings)})


def keyed_hash(facts: Mapping[str, Any]) -> str:
    """A hash of facts with this user's key."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hmac.new(key(), text.encode(), hashlib.sha256).hexdigest()


def sign(run_dir: Path, env: Env, settings: Mapping[str, Any] | None = None) -> None:
    """Write the proof that a command of this user named this environment, its options, and these places."""
    facts: dict[str, Any] = {}
    if needs_trust(env):
        facts |= {"env": env.id, "proof": proof(run_dir, env)}
    if settings:
        facts |= {"settings": dict(settings), "settings_proof": places_proof(run_dir, settings)}
    if facts:
        write_json(run_dir / FILE, facts)


def require_trust(run_dir: Path, env: Env, trust_env: bool) -> None:
    """Refuse to import code that a run directory names, unless this user wrote or trusts it."""
    if not needs_trust(env) or trust_env:
        return
    if not _has(run_dir, "proof", proof(run_dir, env)):
        raise _refused(run_dir, env)


def require_places(run_dir: Path, plan: Plan, trust_run: bool) -> None:
    """Refuse to connect where a run directory says, unless this user wrote or trusts it."""
    settings = trusted_settings(plan)
    if not settings or trust_run or _has(run_dir, "settings_proof", places_proof(run_dir, settings)):
        return
    named = ", ".join(f"{path}={format_value(value)}" for path, value in settings.items())
    raise UsageError(
        f"{run_dir.name} says where to connect, or whom to trust: {named}",
        "This run was not created by a command of yours at this place; a server there can run code here.",
        "If you trust it, add --trust-run (from Python: trust_run=True).",
    )


def _has(run_dir: Path, name: str, expected: str) -> bool:
    found = str(read_json(run_dir / FILE).get(name, ""))
    # As bytes: compare_digest takes no text beyond ASCII.
    return hmac.compare_digest(found.encode(errors="replace"), expected.encode())


def _refused(run_dir: Path, env: Env) -> UsageError:
    named = [f"env.id={env.id}"] if names_code(env.id) else []
    named += [f"env.wrappers={format_value(env.wrappers)}"] if env.wrappers else []
    what = f"{run_dir.name} names code to run: {', '.join(named)}"
    why = "This run was not created by a command of yours at this place, so its code is not imported."
    if not named:
        what = f"{run_dir.name} asks for your environment variables: {', '.join(env.secrets.values())}"
        why = "This run was not created by a command of yours at this place, so it is not given them."
    if file := module_file(env.id):
        here = f"Or its module was another file: from this folder the name leads to {file}."
        return UsageError(what, f"{why} {here}", "If you trust that file, add --trust-env.")
    return UsageError(what, why, "If you trust it, add --trust-env.")
