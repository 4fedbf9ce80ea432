"""What becomes of every episode: its split, its shard, or nothing. It follows from the index alone.

Every engine and every attempt makes the same choice.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qfleet.datasets.format import IndexRow, Split
from qfleet.datasets.prepare.keys import require_keys
from qfleet.datasets.prepare.splits import SplitRule
from qfleet.datasets.prepare.strata import StrataRule, split_by_strata, strata_of
from qfleet.errors import UsageError

GROUPS = ("", "seed", "world", "behaviour", "key")  # of the index, or the user's own; "" is the episode itself
_CAPACITY = re.compile(r"\d{1,6}(?:\.\d{1,6})?")


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """How episodes are chosen for splits and shards."""

    splits: SplitRule = field(default_factory=SplitRule)
    group: str = ""  # what decides the split in place of the id
    unique: bool = False  # leave out episodes whose content was there before: the first of them is kept
    capacities: tuple[float, ...] = ()  # of the nodes that learn: a shard of the training split for each
    strata: StrataRule = field(default_factory=StrataRule)
    keys: Mapping[str, str] = field(default_factory=dict)  # the user's own, by id

    @property
    def needs_keys(self) -> bool:
        """Do the user's own keys decide anything?"""
        return "key" in (self.group, self.strata.key)


@dataclass(frozen=True, slots=True)
class Choice:
    """The split of every episode that is kept, and the shard of those for training."""

    splits: dict[str, Split] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    num_dropped: int = 0


def choose(index: Sequence[IndexRow], rule: ChoiceRule) -> Choice:
    """The choice for a data set."""
    kept = first_of_each(index) if rule.unique else list(index)
    if rule.needs_keys:
        require_keys(rule.keys, kept)
    names = [group_key(row, rule.group, rule.keys) for row in kept]
    if rule.strata.key:
        split_of = split_by_strata(names, strata_of(kept, rule.strata, rule.keys), rule.splits)
        splits = {row.id: split_of[name] for row, name in zip(kept, names, strict=True)}
    else:
        splits = {row.id: rule.splits.split_of(name) for row, name in zip(kept, names, strict=True)}
    training = [row for row in kept if splits[row.id] == "train"]
    shards = balance(training, rule.capacities, rule.splits.salt) if rule.capacities else {}
    return Choice(splits, shards, len(index) - len(kept))


def first_of_each(index: Sequence[IndexRow]) -> list[IndexRow]:
    """The episodes without those whose content was there before."""
    found: dict[str, IndexRow] = {}
    for row in index:
        found.setdefault(row.hash, row)
    return list(found.values())


def group_key(row: IndexRow, group: str, keys: Mapping[str, str]) -> str:
    """What decides the split: episodes with the same key are in the same one."""
    if not group:
        return row.id
    return f"{group} {keys[row.id] if group == 'key' else getattr(row, group)}"


def balance(rows: Sequence[IndexRow], capacities: Sequence[float], salt: str) -> dict[str, int]:
    """The shard of each episode: longest first, to the shard that would be done with it first (Graham 1969)."""
    ordered = sorted(rows, key=lambda row: (-row.length, hashlib.sha256(f"{salt}\n{row.id}".encode()).digest()))
    steps = [0] * len(capacities)
    found = {}
    for row in ordered:
        times = [(num + row.length) / capacity for num, capacity in zip(steps, capacities, strict=True)]
        chosen = times.index(min(times))
        steps[chosen] += row.length
        found[row.id] = chosen
    return found


def parse_capacities(shards: int | None, text: str | None) -> tuple[float, ...]:
    """The capacities of a text such as 1,1,0.5; without one all shards are equal. Empty: no shards."""
    if text is None:
        return (1.0,) * (shards or 0)
    parts = text.split(",")
    found = [float(part) if _CAPACITY.fullmatch(part) else math.nan for part in parts]
    if not all(each > 0 for each in found) or shards not in (None, len(found)) or len(found) > 1_000:
        raise UsageError(
            f"--capacity {text} is not valid",
            "It has one number above 0 for each shard, at most 1,000: how fast its node is beside the others.",
            "Example: --shards 4 --capacity 1,1,1,0.5",
        )
    return tuple(found)


def require_group(group: str) -> str:
    """Refuse a group key that the index does not have."""
    if group not in GROUPS:
        raise UsageError(
            f"--group {group} is not valid",
            f"Episodes can be kept together by {', '.join(GROUPS[1:])}.",
            "Example: --group behaviour",
        )
    return group
