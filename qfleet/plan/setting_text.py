"""Settings in messages: values as they are typed, what a setting accepts, the nearest valid name, what is wrong."""

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import inspect as kinds

from qfleet.errors import UsageError
from qfleet.plan import paths
from qfleet.plan.paths import Setting, VariantSetting

if TYPE_CHECKING:
    from qfleet.plan.draft import Assignment

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


# --- accepted values ---


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
            return paths.NONE
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


# --- the nearest valid name ---


def nearest(name: str, names: list[str], cutoff: float = 0.6) -> str | None:
    """The name the user most likely meant."""
    found = difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return found[0] if found else None


def _depth(path: str) -> int:
    return path.count(".")


def nearest_path(path: str) -> str | None:
    """The plan path the user most likely meant: by its last name, by another library's name, or by spelling."""
    known = paths.index().paths()
    last = path.rsplit(".", 1)[-1].lower()
    ending = [each for each in known if each.rsplit(".", 1)[-1] == last]
    # algo.discount rather than algo.anneal.discount.
    same = [each for each in ending if _depth(each) == min(map(_depth, ending))]
    if len(same) == 1 or (same and "." not in path and last != "type"):
        return same[0]
    if last in OTHER_LIBRARIES:
        return OTHER_LIBRARIES[last]
    if near := nearest(path, known):
        return near
    ends = {each.rsplit(".", 1)[-1]: each for each in reversed(known) if not each.endswith(".type")}
    # Last names are short and many: a low cutoff would find a match for any input.
    end = nearest(last, list(ends), cutoff=0.76)
    return ends[end] if end else None


# --- errors ---


def given_twice(first: "Assignment", entry: "Assignment") -> UsageError:
    """One layer sets a path twice."""
    both = f"{format_value(first.value)} and {format_value(entry.value)}"
    return UsageError(
        f"{entry.path} is given twice: {both} ({entry.origin})",
        "Which of the two is meant cannot be known.",
        "Leave one of them out.",
    )


def unknown_path(entry: "Assignment") -> UsageError:
    """The plan has no setting of this path."""
    index = paths.index()
    if entry.path in index.choices:
        names = index.choices[entry.path].names
        tag = str(entry.value) if str(entry.value) in names else names[0]
        why = f"The variant of {entry.path} is chosen by {entry.path}.type ({', '.join(names)})."
        return UsageError(
            f"{entry} is not a setting but a section ({entry.origin})", why, f"Write {entry.path}.type={tag}"
        )
    if entry.path in index.sections:
        why = f"{entry.path} has {', '.join(index.sections[entry.path])}."
        fix = f"Set what is inside it: {entry.path}.NAME=VALUE"
        return UsageError(f"{entry} is not a setting but a section ({entry.origin})", why, fix)
    parent = entry.path
    while parent not in index.sections:
        parent = parent.rpartition(".")[0]
    near = nearest_path(entry.path)
    return UsageError(
        f"{entry} is not a setting of a plan ({entry.origin})",
        f"{parent or 'A plan'} has {', '.join(index.sections[parent])}.",
        f"Did you mean {near}?" if near else "See every setting with: qfleet plan show CartPole-v1",
    )


def invalid_value(entry: "Assignment", leaf: Setting, current: object, limit: str) -> UsageError:
    """The setting does not accept this value; `limit` is what its type does not say."""
    accepted = accepted_values(leaf.hint) + limit
    choices = accepted.removeprefix("one of ").split(", ") if accepted.startswith("one of ") else []
    near = nearest(str(entry.value), choices)
    example = f"{entry.path}.NAME=VALUE" if leaf.open else f"{entry.path}={format_value(current)}"
    return UsageError(
        f"{entry} is not valid ({entry.origin})",
        f"{entry.path} must be {accepted}.",
        f"Did you mean {entry.path}={near}?" if near else f"Write for example {example}",
    )


def invalid_type(entry: "Assignment", names: list[str]) -> UsageError:
    """The section has no variant of this name."""
    near = nearest(str(entry.value), names)
    return UsageError(
        f"{entry} is not valid ({entry.origin})",
        f"{entry.path} must be one of {', '.join(names)}.",
        f"Did you mean {entry.path}={near}?" if near else f"Write for example {entry.path}={names[0]}",
    )


def no_effect(
    entry: "Assignment",
    leaves: Sequence[Setting | VariantSetting],
    values: Mapping[str, Any],
    origins: Mapping[str, str],
) -> UsageError:
    """Other variants have this setting, but not the chosen one."""
    section, _ = next(need for need in leaves[0].needs if values.get(f"{need[0]}.type") != need[1])
    tags = [tag for leaf in leaves for place, tag in leaf.needs if place == section]
    name = entry.path.removesuffix(".type").rpartition(".")[2]
    lacks = f", which has no {name}" if isinstance(leaves[0], VariantSetting) else ""
    return UsageError(
        f"{entry} has no effect ({entry.origin})",
        f"{section}.type is {values.get(f'{section}.type')} ({origins[f'{section}.type']}){lacks}; "
        f"{name} belongs to {' and '.join(tags)}.",
        f"Add {section}.type={tags[0]}, or leave {entry.path} out.",
    )


def replaced(
    entry: "Assignment", lost: list[str], values: Mapping[str, Any], origin: str, *, keeps: bool
) -> UsageError:
    """The chosen variant replaces one whose settings the user gave; `keeps`: it shares those that both have."""
    section = entry.path.removesuffix(".type")
    old = values[entry.path]
    shown = ", ".join(f"{path}={format_value(values[path])}" for path in lost)
    names = ", ".join(path.removeprefix(f"{section}.") for path in lost)
    return UsageError(
        f"{shown} {'has' if len(lost) == 1 else 'have'} no effect ({origin})",
        f"{entry} ({entry.origin}) replaces {old} and " + (f"has no {names}." if keeps else "resets its settings."),
        f"Leave {', '.join(lost)} out of {origin}, or keep {entry.path}={old}.",
    )
