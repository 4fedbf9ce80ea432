"""A plan while layers are applied: values by path, the origin of each, and the errors of invalid settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from qfleet.errors import UsageError
from qfleet.plan import paths
from qfleet.plan.paths import Setting, VariantSetting
from qfleet.plan.schema import Plan

DEFAULT = "default"
# Sections whose variants share the meaning of their settings: a higher layer that changes the type keeps them.
# Elsewhere a new type starts from its defaults: a learning rate tuned for rmsprop does not suit sgd.
KEEPS_SETTINGS = ("runtime",)
# Where actions are chosen, which a run's plan file holds as measured. "local" is the behaviour of every runtime, so a
# runtime without this setting drops it. Any other value is refused there, like every setting without effect.
MEASURED = ("runtime.inference", "runtime.inference_device")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One setting of one layer. `text`: its value is parsed by the field's type; `explicit`: the user wrote it."""

    path: str
    value: object
    origin: str
    text: bool = False
    explicit: bool = False

    def __str__(self) -> str:
        quote = '"' if isinstance(self.value, str) and not self.text else ""  # as it is written in TOML
        return f"{self.path}={quote}{format_value(self.value)}{quote}"


def format_value(value: object) -> str:
    """A value as it is typed on the command line."""
    match value:
        case None:
            return paths.NONE
        case bool():
            return str(value).lower()
        case list() | tuple():
            return "[" + ", ".join(map(format_value, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{key} = {format_value(each)}" for key, each in value.items()) + "}"
    text = str(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 80 else text[:77] + "..."


class Draft:
    """Values by path, complete from the start; each applied layer replaces some."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = paths.defaults()
        self.origins: dict[str, str] = dict.fromkeys(self.values, DEFAULT)
        self._explicit: set[str] = set()

    def apply_layer(self, entries: Iterable[Assignment]) -> None:
        """Apply one layer; its choices of `type` are applied first."""
        normal = [_normal(entry) for entry in entries]
        _refuse_twice(normal)
        # Outer types before inner ones: replay.type decides whether there is a replay.sampler.type.
        for entry in sorted(normal, key=lambda entry: (not _is_type_path(entry.path), entry.path.count("."))):
            if _is_type_path(entry.path):
                self._choose(entry)
            else:
                self._set(entry)

    def plan(self) -> Plan:
        """The finished plan."""
        return paths.unflatten(self.values)

    def _store(self, path: str, value: object, entry: Assignment) -> None:
        self.values[path] = value
        self.origins[path] = entry.origin
        (self._explicit.add if entry.explicit else self._explicit.discard)(path)

    def _set(self, entry: Assignment) -> None:
        table, _, key = entry.path.rpartition(".")
        if _is_open(table):
            value = paths.parse_scalar(entry.value) if entry.text and isinstance(entry.value, str) else entry.value
            entry = Assignment(table, {**self.values[table], key: value}, entry.origin, explicit=entry.explicit)
        leaf = self._leaf(entry)
        try:
            if entry.text and isinstance(entry.value, str):
                value = paths.parse(entry.value, leaf.hint)
            else:
                value = paths.convert(entry.value, leaf.hint)
        except ValueError as error:
            limit = str(error) if isinstance(error, paths.OutOfRange) else ""
            _refuse_value(entry, leaf.hint, self.values[entry.path], limit)
        self._store(entry.path, value, entry)

    def _leaf(self, entry: Assignment) -> Setting:
        leaves = paths.index().leaves.get(entry.path)
        if leaves is None:
            _refuse_path(entry)
        fitting = [leaf for leaf in leaves if all(self.values.get(f"{at}.type") == tag for at, tag in leaf.needs)]
        if not fitting:
            self._refuse_no_effect(entry, leaves)
        return fitting[0]

    def _choose(self, entry: Assignment) -> None:
        section = entry.path.removesuffix(".type")
        choice = paths.index().choices[section]
        if entry.path not in self.values:
            self._refuse_no_effect(entry, [choice])
        tag = paths.NONE if entry.value is None else entry.value
        tag = tag.strip().lower() if isinstance(tag, str) else tag
        if tag not in choice.names:
            _refuse_choice(entry, choice.names)
        if tag != self.values[entry.path]:
            self._reset(section, str(tag), entry)
        self._store(entry.path, tag, entry)

    def _reset(self, section: str, tag: str, entry: Assignment) -> None:
        old_defaults = _variant(section, self.values[entry.path])
        new_defaults = _variant(section, tag)
        kept = set[str]()
        if section in KEEPS_SETTINGS:
            kept = {path for path in new_defaults if self.origins.get(path, DEFAULT) != DEFAULT}
        dropped = [path for path in self.values if path.startswith(f"{section}.") and path not in {*kept, entry.path}]
        usual = MEASURED if self.values.get(MEASURED[0]) == "local" else ()
        explicit = [path for path in dropped if path in self._explicit and path not in usual]
        if lost := [path for path in explicit if self.values[path] != old_defaults.get(path)]:
            self._refuse_replaced(lost, section, entry)
        for path in dropped:
            del self.values[path], self.origins[path]
            self._explicit.discard(path)
        new = {path: value for path, value in new_defaults.items() if path not in kept}
        self.values.update(new)
        self.origins.update(dict.fromkeys(new, DEFAULT))

    def _refuse_no_effect(self, entry: Assignment, leaves: Sequence[Setting | VariantSetting]) -> NoReturn:
        section, _ = next(need for need in leaves[0].needs if self.values.get(f"{need[0]}.type") != need[1])
        tags = [tag for leaf in leaves for place, tag in leaf.needs if place == section]
        chosen = self.values.get(f"{section}.type")
        name = entry.path.removesuffix(".type").rpartition(".")[2]
        lacks = f", which has no {name}" if isinstance(leaves[0], VariantSetting) else ""
        raise UsageError(
            f"{entry} has no effect ({entry.origin})",
            f"{section}.type is {chosen} ({self.origins[f'{section}.type']}){lacks}; "
            f"{name} belongs to {' and '.join(tags)}.",
            f"Add {section}.type={tags[0]}, or leave {entry.path} out.",
        )

    def _refuse_replaced(self, lost: list[str], section: str, entry: Assignment) -> NoReturn:
        old = self.values[entry.path]
        origin = self.origins[lost[0]]
        shown = ", ".join(f"{path}={format_value(self.values[path])}" for path in lost)
        names = ", ".join(path.removeprefix(f"{section}.") for path in lost)
        raise UsageError(
            f"{shown} {'has' if len(lost) == 1 else 'have'} no effect ({origin})",
            f"{entry} ({entry.origin}) replaces {old} and "
            + (f"has no {names}." if section in KEEPS_SETTINGS else "resets its settings."),
            f"Leave {', '.join(lost)} out of {origin}, or keep {entry.path}={old}.",
        )


def entries_of(tree: Mapping[str, Any], origin: str, section: str = "") -> list[Assignment]:
    """The settings in a tree of tables, such as a TOML file."""
    found: list[Assignment] = []
    for name, value in tree.items():
        path = paths.join(section, name)
        if isinstance(value, dict) and value and not _is_open(path):
            found += entries_of(value, origin, path)
        elif value != {} or path not in paths.index().sections:  # an empty section sets nothing
            found.append(Assignment(path, value, origin, explicit=True))
    return found


def _normal(entry: Assignment) -> Assignment:
    # `net.torso=none` means `net.torso.type=none`.
    choice = paths.index().choices.get(entry.path)
    if choice and choice.optional and (entry.value is None or str(entry.value).lower() == paths.NONE):
        return Assignment(f"{entry.path}.type", paths.NONE, entry.origin, entry.text, entry.explicit)
    return entry


def _variant(section: str, tag: str) -> dict[str, Any]:
    variants = paths.index().choices[section].variants
    return paths.flatten(variants[tag](), section) if tag in variants else {}


def _is_type_path(path: str) -> bool:
    return path.endswith(".type") and path.removesuffix(".type") in paths.index().choices


def _refuse_twice(entries: list[Assignment]) -> None:
    seen: dict[str, Assignment] = {}
    for entry in entries:
        first = seen.setdefault(entry.path, entry)
        if first is not entry:
            both = f"{format_value(first.value)} and {format_value(entry.value)}"
            raise UsageError(
                f"{entry.path} is given twice: {both} ({entry.origin})",
                "Which of the two is meant cannot be known.",
                "Leave one of them out.",
            )


def _is_open(path: str) -> bool:
    return any(leaf.open for leaf in paths.index().leaves.get(path, []))


def _refuse_path(entry: Assignment) -> NoReturn:
    if entry.path in paths.index().choices:
        _refuse_choice_section(entry)
    if entry.path in paths.index().sections:
        _refuse_section(entry)
    sections = paths.index().sections
    parent = next(each for each in _parents(entry.path) if each in sections)
    near = paths.nearest_path(entry.path)
    raise UsageError(
        f"{entry} is not a setting of a plan ({entry.origin})",
        f"{parent or 'A plan'} has {', '.join(sections[parent])}.",
        f"Did you mean {near}?" if near else "See every setting with: qfleet plan show CartPole-v1",
    )


def _refuse_choice_section(entry: Assignment) -> NoReturn:
    names = paths.index().choices[entry.path].names
    tag = str(entry.value) if str(entry.value) in names else names[0]
    raise UsageError(
        f"{entry} is not a setting but a section ({entry.origin})",
        f"The variant of {entry.path} is chosen by {entry.path}.type ({', '.join(names)}).",
        f"Write {entry.path}.type={tag}",
    )


def _refuse_section(entry: Assignment) -> NoReturn:
    names = paths.index().sections[entry.path]
    raise UsageError(
        f"{entry} is not a setting but a section ({entry.origin})",
        f"{entry.path} has {', '.join(names)}.",
        f"Set what is inside it: {entry.path}.NAME=VALUE",
    )


def _parents(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:count]) for count in range(len(names) - 1, -1, -1)]


def _refuse_value(entry: Assignment, hint: Any, current: object, limit: str) -> NoReturn:
    accepted = paths.accepted_values(hint) + limit
    choices = accepted.removeprefix("one of ").split(", ") if accepted.startswith("one of ") else []
    near = paths.nearest(str(entry.value), choices)
    example = f"{entry.path}.NAME=VALUE" if _is_open(entry.path) else f"{entry.path}={format_value(current)}"
    raise UsageError(
        f"{entry} is not valid ({entry.origin})",
        f"{entry.path} must be {accepted}.",
        f"Did you mean {entry.path}={near}?" if near else f"Write for example {example}",
    )


def _refuse_choice(entry: Assignment, names: list[str]) -> NoReturn:
    near = paths.nearest(str(entry.value), names)
    raise UsageError(
        f"{entry} is not valid ({entry.origin})",
        f"{entry.path} must be one of {', '.join(names)}.",
        f"Did you mean {entry.path}={near}?" if near else f"Write for example {entry.path}={names[0]}",
    )
