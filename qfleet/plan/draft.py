"""A plan while layers are applied: values by path, and the origin of each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qfleet.plan import paths, setting_text
from qfleet.plan.paths import Setting
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
        return f"{self.path}={quote}{setting_text.format_value(self.value)}{quote}"


class Draft:
    """Values by path, complete from the start; each applied layer replaces some."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = paths.defaults()
        self.origins: dict[str, str] = dict.fromkeys(self.values, DEFAULT)
        self._explicit: set[str] = set()

    def apply_layer(self, entries: Iterable[Assignment]) -> None:
        """Apply one layer; its choices of `type` are applied first."""
        normal: dict[str, Assignment] = {}
        for entry in map(_normal, entries):
            if entry.path in normal:
                raise setting_text.given_twice(normal[entry.path], entry)
            normal[entry.path] = entry
        # Outer types before inner ones: replay.type decides whether there is a replay.sampler.type.
        for entry in sorted(normal.values(), key=lambda entry: (not _is_type_path(entry.path), entry.path.count("."))):
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
            raise setting_text.invalid_value(entry, leaf, self.values[entry.path], limit) from error
        self._store(entry.path, value, entry)

    def _leaf(self, entry: Assignment) -> Setting:
        leaves = paths.index().leaves.get(entry.path)
        if leaves is None:
            raise setting_text.unknown_path(entry)
        fitting = [leaf for leaf in leaves if all(self.values.get(f"{at}.type") == tag for at, tag in leaf.needs)]
        if not fitting:
            raise setting_text.no_effect(entry, leaves, self.values, self.origins)
        return fitting[0]

    def _choose(self, entry: Assignment) -> None:
        section = entry.path.removesuffix(".type")
        choice = paths.index().choices[section]
        if entry.path not in self.values:
            raise setting_text.no_effect(entry, [choice], self.values, self.origins)
        tag = paths.NONE if entry.value is None else entry.value
        tag = tag.strip().lower() if isinstance(tag, str) else tag
        if tag not in choice.names:
            raise setting_text.invalid_type(entry, choice.names)
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
            keeps = section in KEEPS_SETTINGS
            raise setting_text.replaced(entry, lost, self.values, self.origins[lost[0]], keeps=keeps)
        for path in dropped:
            del self.values[path], self.origins[path]
            self._explicit.discard(path)
        new = {path: value for path, value in new_defaults.items() if path not in kept}
        self.values.update(new)
        self.origins.update(dict.fromkeys(new, DEFAULT))


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


def _is_open(path: str) -> bool:
    return any(leaf.open for leaf in paths.index().leaves.get(path, []))
