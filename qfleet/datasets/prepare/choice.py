"""What becomes of every episode: its split, its shard, or nothing. It follows from the index alone.

Every engine and every attempt makes the same choice.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from qfleet.datasets.format import IndexRow, Split
from qfleet.datasets.prepare.splits import SplitRule
from qfleet.errors import UsageError

GROUPS = ("", "seed", "world", "behaviour")  # of the index; "" stands for the episode itself
_CAPACITY = re.compile(r"\d{1,6}(?:\.\d{1,6})?")


@dataclass(frozen=True, slots=True)
class Choice:
    """The split of every episode that is kept, and the shard of those for training."""

    splits: dict[str, Split] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    num_dropped: int = 0


def choose(
    index: Sequence[IndexRow], rule: SplitRule, group: str = "", capacities: Sequence[float] = (), *, unique: bool
) -> Choice:
    """The choice for a data set; with `unique` the first of episodes with equal content is kept."""
    kept = first_of_each(index) if unique else list(index)
    splits = {row.id: rule.split_of(group_key(row, group)) for row in kept}
    training = [row for row in kept if splits[row.id] == "train"]
    shards = balance(training, capacities, rule.salt) if capacities else {}
    return Choice(splits, shards, len(index) - len(kept))


def first_of_each(index: Sequence[IndexRow]) -> list[IndexRow]:
    """The episodes without those whose content was there before."""
    found: dict[str, IndexRow] = {}
    for row in index:
        found.setdefault(row.hash, row)
    return list(found.values())


def group_key(row: IndexRow, group: str) -> str:
    """What decides the split: episodes with the same key are in the same one."""
    return row.id if not group else f"{group} {getattr(row, group)}"


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
