"""Every setting of a plan by its dotted path: the variant that has it, its accepted values, parsing text."""

import difflib
import math
from collections.abc import Iterator
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

# Names of settings in other libraries.
OTHER_LIBRARIES = {
    "lr": "optim.learning_rate",
    "gamma": "algo.discount",
    "tau": "algo.target.tau",
    "epsilon": "algo.explore.start",
    "buffer_size": "replay.capacity",
    "memory_size": "replay.capacity",
    "learning_starts": "algo.learn_start_steps",
    "target_update_interval": "algo.target.every_updates",
    "train_freq": "replay.samples_per_insert",
    "total_timesteps": "until.steps",
    "num_envs": "env.num",
    "n_envs": "env.num",
    "env": "env.id",
    "device": "runtime.device",
    "hidden_sizes": "net.torso.sizes",
    "net_arch": "net.torso.sizes",
    "optimizer": "optim.type",
    "max_grad_norm": "optim.clip_norm",
    "alpha": "replay.sampler.alpha",
    "double": "algo.rule.type",
}


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
        if _is_absent(path, value):
            path = path.removesuffix(".type")
            value = None
        *sections, name = path.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return msgspec.convert(tree, Plan)


def _is_absent(path: str, value: object) -> bool:
    section = path.removesuffix(".type")
    return path.endswith(".type") and section in index().choices and index().choices[section].optional and value == NONE


# --- accepted values as text ---


def accepted_values(hint: Any) -> str:
    """The values that a setting accepts, as text that fits after "must be"."""
    return _describe_type(kinds.type_info(hint))


def _describe_type(kind: kinds.Type) -> str:
    match kind:
        case kinds.UnionType(types=types):
            return " or ".join(
                _describe_type(each) for each in sorted(types, key=lambda each: isinstance(each, kinds.NoneType))
            )
        case kinds.IntType() | kinds.FloatType():
            return ("an integer" if isinstance(kind, kinds.IntType) else "a number") + _range(kind)
        case kinds.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values))
        case kinds.VarTupleType(item_type=item):
            return f"a list ({_describe_type(item)} each), such as [128, 128]"
        case kinds.BoolType():
            return "true or false"
        case kinds.NoneType():
            return NONE
        case kinds.DictType():
            return "a table of numbers, texts, true or false"
    return "text"


def _range(kind: kinds.IntType | kinds.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {_bound(kind.ge)} to {_bound(kind.le)}"
    limits = ((" of at least", kind.ge), (" above", kind.gt), (" at most", kind.le), (" below", kind.lt))
    return " and".join(f"{relation} {limit:g}" for relation, limit in limits if limit is not None)


def _bound(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


# --- text and values ---


def convert(value: object, hint: Any) -> Any:
    """The value as the plan holds it; ValueError when it does not fit."""
    if isinstance(value, str) and value.lower() == NONE and _takes_none(hint):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        raise OutOfRange(", and finite")
    if isinstance(value, float) and value.is_integer() and isinstance(kinds.type_info(hint), kinds.IntType):
        value = int(value)
    if any(isinstance(number, int) and abs(number) > LARGEST_INT for number in _numbers(value)):
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


def _numbers(value: object) -> Iterator[object]:
    yield from value if isinstance(value, list | tuple) else [value]


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
            return [_read(each.strip(), item) for each in body.split(",")] if body else []
    return text


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


# --- the nearest valid name ---


def nearest(name: str, names: list[str], cutoff: float = 0.6) -> str | None:
    """The name the user most likely meant."""
    found = difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return found[0] if found else None


def _depth(path: str) -> int:
    return path.count(".")


def nearest_path(path: str) -> str | None:
    """The plan path the user most likely meant: by its last name, by another library's name, or by spelling."""
    paths = index().paths()
    last = path.rsplit(".", 1)[-1].lower()
    ending = [each for each in paths if each.rsplit(".", 1)[-1] == last]
    # algo.discount rather than algo.anneal.discount.
    same = [each for each in ending if _depth(each) == min(map(_depth, ending))]
    if len(same) == 1 or (same and "." not in path and last != "type"):
        return same[0]
    if last in OTHER_LIBRARIES:
        return OTHER_LIBRARIES[last]
    if near := nearest(path, paths):
        return near
    ends = {each.rsplit(".", 1)[-1]: each for each in reversed(paths) if not each.endswith(".type")}
    # Last names are short and many: a low cutoff would find a match for any input.
    end = nearest(last, list(ends), cutoff=0.76)
    return ends[end] if end else None
