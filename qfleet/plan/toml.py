"""Plans on disk: TOML in, TOML out, a JSON Schema for editors, a hash and a difference."""

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from qfleet.errors import StorageError, UsageError
from qfleet.files import TooLarge, read_inside, replace_inside
from qfleet.plan import paths
from qfleet.plan.draft import Draft, entries_of
from qfleet.plan.schema import Plan

LARGEST_FILE_BYTES = 1_000_000
DEEPEST_TABLES = 20
HEADER = """\
# The whole run as data. Start a new run from it with: qfleet train --plan run.toml
# Code of your own is named again: qfleet train my_env.py:MyEnv --plan run.toml; objects are passed again from Python.
"""


def read_toml(file: str | Path, kind: str = "plan") -> dict[str, Any]:
    """The tables of a TOML file that the user named; every failure is a UsageError. `kind`: what it should hold."""
    path = Path(file)
    try:
        if not path.is_file():
            raise _missing(file, kind)
        with path.open("rb") as stream:
            data = stream.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read {file}", f"The system says: {error.strerror}.", "Check its permissions."
        ) from error
    if len(data) > LARGEST_FILE_BYTES:
        raise _too_large(file)
    return _parse(data, file)


def _missing(file: str | Path, kind: str = "plan") -> UsageError:
    return UsageError(f"there is no {kind} file {file}", "The path is missing or not a file.", "Check the path given.")


def _too_large(file: str | Path) -> UsageError:
    why = "A plan has a few kilobytes; this is something else."
    return UsageError(f"{file} is larger than 1 MB", why, "Check the path given.")


def read_tables_in(folder: Path, name: str) -> dict[str, Any]:
    """The tables of a TOML file in a run's folder, without following links: the folder may come from a stranger."""
    file = folder / name
    try:
        return _parse(read_inside(folder, name, LARGEST_FILE_BYTES), file)
    except TooLarge:
        raise _too_large(file) from None
    except FileNotFoundError:
        raise _missing(file) from None
    except OSError as error:
        raise UsageError(
            f"cannot read {file}",
            f"The system says: {error.strerror}.",
            "Put back the file that qfleet wrote, and check its permissions.",
        ) from error


def _parse(data: bytes, file: str | Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not text", f"Byte {error.start} is not UTF-8.", "Give a TOML file saved as UTF-8."
        ) from error
    except ValueError as error:  # TOMLDecodeError is one; a number of thousands of digits is another
        raise UsageError(
            f"{file} is not TOML", f"{error}.", 'Write sections and settings like: [algo] and, below, loss = "huber"'
        ) from error
    except RecursionError as error:
        raise UsageError(
            f"{file} is not a plan", "Its values are nested hundreds of levels deep.", "Check the path given."
        ) from error
    if _is_deep(tables):
        why = f"Its tables are nested more than {DEEPEST_TABLES} levels deep."
        raise UsageError(f"{file} is not a plan", why, "Check the path given.")
    return tables


def _is_deep(tables: dict[str, Any]) -> bool:
    """Are tables nested deeper than in any plan? Checked without recursion."""
    level: list[Any] = [tables]
    for _ in range(DEEPEST_TABLES):
        level = [value for table in level for value in table.values() if isinstance(value, dict)]
    return bool(level)


def read_plan(file: Path) -> Plan:
    """A complete plan that `write_plan` wrote into a run's folder; the caller decides whether to trust it."""
    draft = Draft()
    draft.apply_layer(entries_of(read_tables_in(file.parent, file.name), str(file)))
    if not draft.values["env.id"]:
        raise UsageError(
            f"{file} names no environment", "A complete plan has env.id.", 'Add below [env]: id = "CartPole-v1"'
        )
    return draft.plan()


def to_toml(plan: Plan) -> str:
    """The plan as TOML that reads back equal; None is written as "none", because TOML has no null."""
    import tomli_w

    return HEADER + "\n" + tomli_w.dumps(to_tables(plan))


def to_tables(plan: Plan) -> dict[str, Any]:
    """The plan as tables of plain values, with "none" for None."""
    return cast(dict[str, Any], _none_to_text(msgspec.to_builtins(plan)))


def _none_to_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _none_to_text(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_none_to_text(each) for each in value]
    return paths.NONE if value is None else value


def write_plan(plan: Plan, file: Path, mode: int = 0o666) -> None:
    """Write the plan atomically."""
    try:
        replace_inside(file.parent, file.name, to_toml(plan).encode(), mode)
    except OSError as error:
        raise StorageError(
            f"cannot write {file}", f"The system says: {error.strerror}.", "Check free space and permissions."
        ) from error


def json_schema() -> dict[str, Any]:
    """JSON Schema of a plan file, for editors."""
    made = msgspec.json.schema(Plan)
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for name in ("Plan", "Env"):
        made["$defs"][name].pop("required", None)  # the environment may come from the command line
    return cast(dict[str, Any], _for_toml(made))


def _for_toml(part: Any) -> Any:
    if isinstance(part, dict):
        if part == {"type": "null"}:
            return {"const": paths.NONE}
        return {key: paths.NONE if key == "default" and each is None else _for_toml(each) for key, each in part.items()}
    return [_for_toml(each) for each in part] if isinstance(part, list) else part


def plan_hash(plan: Plan) -> str:
    """SHA-256 of the plan's canonical JSON: equal plans, equal hashes, on every machine."""
    return hashlib.sha256(msgspec.json.encode(plan, order="deterministic")).hexdigest()


def diff(a: Plan, b: Plan) -> list[tuple[str, Any, Any]]:
    """Settings that differ between two plans, as (path, in a, in b); None where a plan does not have one."""
    left = paths.flatten(a)
    right = paths.flatten(b)
    keys = list(left) + [path for path in right if path not in left]
    return [(path, left.get(path), right.get(path)) for path in keys if left.get(path) != right.get(path)]
