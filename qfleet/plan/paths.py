"""Every setting of a plan by its dotted path: the variant that has it, and its value from text."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct
from msgspec import inspect as kinds

from qfleet.plan.part import Scalar
from qfleet.plan.schema import Env, Plan

NONE = "none"
LARGEST_INT = 2**63 - 1  # TOML and NumPy both stop here


class OutOfRange(ValueError):
    """A value outside the range of every setting of its type; the text fits after "must be a number"."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `needs` lists the (section, variant) choices under which it exists."""

    path: str
    hint: Any
    needs: tuple[tuple[str, str], ...] = ()

    @property
    def open(self) -> bool:
        """Whether the setting is a table with keys of the user's own choosing."""
        return isinstance(kinds.type_info(self.hint), kinds.DictType)


@dataclass(frozen=True, slots=True)
class VariantSetting:
    """The `type` of a section: its variants by name; `optional` adds none, "chosen for you"."""

    section: str
    variants: dict[str, type[Struct]]
    optional: bool
    needs: tuple[tuple[str, str], ...] = ()  # the choices under which there is this one

    @property
    def names(self) -> list[str]:
        """The values `type` may take."""
        return [*self.variants, *([NONE] if self.optional else [])]


@dataclass(frozen=True, slots=True)
class Index:
    """All paths of the plan."""

    leaves: dict[str, list[Setting]]
    choices: dict[str, VariantSetting]  # by section: "algo.rule", "optim", ...
    sections: dict[str, list[str]]  # section -> the names inside, "" is the plan itself

    def paths(self) -> list[str]:
        """Every path a user may set."""
        return sorted([*self.leaves, *(f"{section}.type" for section in self.choices)])


def tag_of(kind: type[Struct]) -> str | None:
    """The variant's name, if the struct is one."""
    tag = kind.__struct_config__.tag
    return tag if isinstance(tag, str) else None


def join(section: str, name: str) -> str:
    """A dotted path."""
    return f"{section}.{name}" if section else name


def structs_in(hint: Any) -> list[type[Struct]]:
    """The struct classes a field may hold; empty for a plain value."""
    return [kind for kind in (get_args(hint) or (hint,)) if isinstance(kind, type) and issubclass(kind, Struct)]


@cache
def hints(kind: type[Struct]) -> dict[str, Any]:
    """Field names and their types."""
    return get_type_hints(kind, include_extras=True)


@cache
def index() -> Index:
    """All paths of the plan, found once."""
    found = Index({}, {}, {})
    _visit(Plan, "", (), found)
    return found


def _visit(kind: type[Struct], section: str, needs: tuple[tuple[str, str], ...], found: Index) -> None:
    names = found.sections.setdefault(section, [])
    for name, hint in hints(kind).items():
        path = join(section, name)
        inside = structs_in(hint)
        if name not in names:
            names.append(name)
        if not inside:
            found.leaves.setdefault(path, []).append(Setting(path, hint, needs))
            continue
        tags = {tag: struct for struct in inside if (tag := tag_of(struct))}
        if tags:
            found.choices[path] = VariantSetting(path, tags, type(None) in get_args(hint), needs)
            found.sections[path] = ["type"]
        for struct in inside:
            tag = tag_of(struct)
            _visit(struct, path, (*needs, (path, tag)) if tag else needs, found)


def flatten(part: Struct, section: str = "") -> dict[str, Any]:
    """A plan, or a piece of one, as {path: value}; an absent optional section shows as `type` none."""
    flat: dict[str, Any] = {}
    for name, hint in hints(type(part)).items():
        path = join(section, name)
        value = getattr(part, name)
        if not structs_in(hint):
            flat[path] = value
        elif value is None:
            flat[f"{path}.type"] = NONE
        else:
            if tag := tag_of(type(value)):
                flat[f"{path}.type"] = tag
            flat.update(flatten(value, path))
    return flat


def defaults() -> dict[str, Any]:
    """The schema's own values for every path (the environment is still empty)."""
    return flatten(Plan(env=Env(id="")))


def unflatten(flat: dict[str, Any]) -> Plan:
    """The plan with these values."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        section = path.removesuffix(".type")
        if section != path and value == NONE and section in index().choices and index().choices[section].optional:
            path = section
            value = None
        *outer, name = path.split(".")
        inside = tree
        for table in outer:
            inside = inside.setdefault(table, {})
        inside[name] = value
    return msgspec.convert(tree, Plan)


# --- text and values ---


def convert(value: object, hint: Any) -> Any:
    """The value as the plan holds it; ValueError when it does not fit."""
    if isinstance(value, str) and value.lower() == NONE and _takes_none(hint):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        raise OutOfRange(", and finite")
    if isinstance(value, float) and value.is_integer() and isinstance(kinds.type_info(hint), kinds.IntType):
        value = int(value)
    numbers = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(number, int) and abs(number) > LARGEST_INT for number in numbers):
        raise OutOfRange(", and at most 2^63 - 1")
    return msgspec.convert(value, hint)


def parse(text: str, hint: Any) -> Any:
    """Text parsed as a value of the setting's type; ValueError when it does not fit."""
    if text.lower() == NONE and _takes_none(hint):
        return None
    return convert(_read(text.strip(), kinds.type_info(hint)), hint)


def parse_scalar(text: str) -> Scalar:
    """Text of a setting of unknown type: a number or true/false if it can be parsed as one, else text."""
    for kind in (kinds.IntType(), kinds.FloatType(), kinds.BoolType()):
        try:
            value: Scalar = _read(text, kind)
        except ValueError:
            continue
        if not isinstance(value, float) or math.isfinite(value):
            return value
    return text


def _takes_none(hint: Any) -> bool:
    kind = kinds.type_info(hint)
    return isinstance(kind, kinds.UnionType) and kind.includes_none


def _read(text: str, kind: kinds.Type) -> Any:
    match kind:
        case kinds.UnionType(types=types):
            return _read(text, next(each for each in types if not isinstance(each, kinds.NoneType)))
        case kinds.BoolType():
            return _read_bool(text)
        case kinds.IntType():
            return _read_int(text)
        case kinds.FloatType():
            return float(text)
        case kinds.VarTupleType(item_type=item):
            body = text.removeprefix("[").removesuffix("]").strip().removesuffix(",")
            parts = [each.strip() for each in _split_list(body)] if body else []
            return (
                list(map(_unquoted, parts))
                if isinstance(item, kinds.StrType)
                else [_read(each, item) for each in parts]
            )
    return text


def _split_list(body: str) -> list[str]:
    """The parts between commas; commas within parentheses, as in `Class(a=1, b=2)`, separate nothing."""
    parts = [""]
    depth = 0
    for mark in body:
        depth += (mark == "(") - (mark == ")")
        if mark == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += mark
    return parts


def _unquoted(text: str) -> str:
    """The text without the quotes around it, if it has some: they are as good on a command line as in a file."""
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _read_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():  # also false for nan and inf
            raise
        return int(number)
