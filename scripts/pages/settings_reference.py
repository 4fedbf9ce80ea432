"""The settings of a plan and the presets, from the schema and the catalog."""

import inspect
import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec

from qfleet.plan.paths import flatten, index, join, structs_in, tag_of
from qfleet.plan.presets.catalog import algorithm_presets, describe, environment_presets, settings_of
from qfleet.plan.schema import Env, Plan
from qfleet.plan.setting_text import accepted_values, format_value
from scripts.pages.markdown import table
from scripts.pages.stage import ROOT

INTRODUCTION = """# Settings of a plan

Every setting, as `path=value` on the command line, as `overrides={"path": value}` in Python, or as `name = value` in
the table of its section in a plan file. `none` as a default means: chosen automatically, or not used. Defaults are
those of the schema; an environment's own defaults and a [preset](presets.md) come on top
(`qfleet plan show ENV --origin`).

"""


def meanings() -> dict[str, str]:
    """docs/settings.toml as {path: meaning}."""
    tree = tomllib.loads((ROOT / "docs/settings.toml").read_text("utf-8"))
    plan = tree.pop("plan")
    return {**dict(_leaves(tree)), **plan}


def _leaves(tree: dict[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, join(section, name))
        else:
            yield join(section, name), value


def settings_page() -> str:
    """All settings, section by section."""
    explained = meanings()
    parts = [INTRODUCTION, *_section(Plan, "", explained)]
    return "\n".join(parts)


def _section(kind: type[msgspec.Struct], section: str, explained: dict[str, str]) -> Iterator[str]:
    """One struct: its own settings first, then the sections inside it."""
    fields = {each.name: each for each in msgspec.structs.fields(kind)}
    inside = {name: structs_in(field.type) for name, field in fields.items()}
    plain = [(fields[name], "") for name, structs in inside.items() if not structs]
    if plain:
        yield _table(section, plain, explained)
    for name, structs in inside.items():
        path = join(section, name)
        if structs:
            yield f"{'#' * (path.count('.') + 2)} {path}\n"
        if structs and tag_of(structs[0]) is None:
            yield f"{inspect.getdoc(structs[0])}\n"
            yield from _section(structs[0], path, explained)
        elif structs:
            yield from _variants(path, structs, fields[name].default, explained)


def _variants(path: str, structs: list[type[msgspec.Struct]], default: Any, explained: dict[str, str]) -> Iterator[str]:
    """A section with a `type`: the variants, and the settings of each."""
    chosen = None if default is None else tag_of(type(default))
    rows = []
    for struct in structs:
        tag = tag_of(struct)
        mark = " (default)" if tag == chosen else ""
        rows.append((f"`{path}.type={tag}`{mark}", inspect.getdoc(struct) or ""))
    if default is None:
        rows.append((f"`{path}.type=none` (default)", "Chosen automatically, by the observations."))
    yield table(("variant", "what it is"), rows)
    found = [(field, tag_of(struct) or "") for struct in structs for field in msgspec.structs.fields(struct)]
    plain = [(field, tag) for field, tag in found if not structs_in(field.type)]
    if plain:
        yield _table(path, plain, explained)
    nested = {field.name: field for field, _ in found if structs_in(field.type)}
    for name, field in nested.items():
        yield f"{'#' * (path.count('.') + 3)} {join(path, name)}\n"
        yield from _variants(join(path, name), structs_in(field.type), field.default, explained)


def _table(section: str, fields: list[tuple[Any, str]], explained: dict[str, str]) -> str:
    """Rows of settings; variants that share a setting with the same default share its row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for field, tag in fields:
        key = (join(section, field.name), accepted_values(field.type), default_text(field))
        rows.setdefault(key, []).append(tag)
    with_types = any(tag for _, tag in fields)
    head = ("setting", *(["for"] if with_types else []), "accepts", "default", "meaning")
    lines: list[tuple[str, ...]] = []
    for (path, accepts, default), tags in rows.items():
        types = [", ".join(f"`{tag}`" for tag in tags)] if with_types else []
        lines.append((f"`{path}`", *types, accepts, default, explained.get(path, "")))
    return table(head, lines)


def default_text(field: Any) -> str:
    """A default as it is typed."""
    if field.default_factory is not msgspec.NODEFAULT:
        return "empty"
    return "" if field.default is msgspec.NODEFAULT else f"`{format_value(field.default)}`"


def missing_meanings() -> list[str]:
    """Settings that docs/settings.toml does not explain, and explanations of settings that do not exist."""
    return sorted(set(index().leaves) ^ set(meanings()))


# --- presets ---

WORLDS = {
    "most environments": "some/Environment-v0",
    "CartPole": "CartPole-v1",
    "MinAtar": "MinAtar/Breakout-v1",
    "Atari": "ALE/Pong-v5",
}


def preset_settings(name: str) -> str:
    """The settings of a preset, with those that depend on the environment."""
    found = {world: settings_of(name, env_id) for world, env_id in WORLDS.items()}
    first = found["most environments"]
    others = [world for world in found if world == "most environments" or found[world] != first]
    paths = dict.fromkeys(path for settings in found.values() for path in settings)
    rows = [(f"`{path}`", *(_value(found[world], path) for world in others)) for path in paths]
    return table(("setting", *(others if len(others) > 1 else ["value"])), rows)


def _value(settings: dict[str, Any], path: str) -> str:
    return f"`{format_value(settings[path])}`" if path in settings else ""


def presets_page() -> str:
    """All presets: what each is, where it comes from, and what it sets."""
    parts = [
        "# Presets\n",
        "A preset is a list of settings over the environment's defaults: `--preset NAME`, `Plan.of(ENV, preset=NAME)`. "
        "`qfleet presets NAME` prints one. The algorithms are explained on [pages of their own](../algorithms.md).\n",
        "An empty cell: the environment's own default stays.\n",
    ]
    for title, names in (("Algorithms", algorithm_presets()), ("Environments", environment_presets())):
        parts.append(f"## {title}\n")
        for name in names:
            about = describe(name)
            parts += [f"### {name}\n", f"{about.title} Source: {about.source} {about.advice}\n", preset_settings(name)]
    return "\n".join(parts)


def plan_defaults() -> dict[str, Any]:
    """Every path of the schema's own plan."""
    return flatten(Plan(env=Env(id="")))
