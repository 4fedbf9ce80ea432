"""Strata: each split gets its share of every kind of episode, still decided by salted hashes.

In a stratum, episodes (or groups of them) are in the order of their hashes, and the splits take their shares of that
order one after the other. When data grow, an episode's place in the order changes little, because the hashes of the new
ones are spread evenly: only those near a border may move to the other side of it.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qfleet.datasets.format import IndexRow, Split
from qfleet.datasets.prepare.splits import SplitRule
from qfleet.errors import UsageError

RETURN = "return"
MAX_QUANTILES = 100
INDEX_KEYS = ("world", "behaviour", "seed")


@dataclass(frozen=True, slots=True)
class StrataRule:
    """What makes the strata: a key, or a number of quantiles of the return. Empty: there are none."""

    key: str = ""
    quantiles: int = 0

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.key}:{self.quantiles}" if self.quantiles else self.key


def parse_strata(text: str) -> StrataRule:
    """The rule of a text such as return:4, world or key."""
    name, _, count = text.partition(":")
    if name == RETURN and count.isascii() and count.isdecimal() and 2 <= int(count[:6]) <= MAX_QUANTILES:
        return StrataRule(name, int(count))
    if text in ("", "key", *INDEX_KEYS):
        return StrataRule(text)
    raise UsageError(
        f"--strata {text} is not valid",
        f"It is return:N with N from 2 to {MAX_QUANTILES} (quantiles of the return), {', '.join(INDEX_KEYS)}, or key.",
        "Example: --strata return:4, or --strata key --keys FILE.csv",
    )


def strata_of(rows: Sequence[IndexRow], rule: StrataRule, keys: Mapping[str, str]) -> list[str]:
    """The stratum of each episode; `keys` are the user's own, by id."""
    if rule.key == "key":
        return [keys[row.id] for row in rows]
    if rule.key != RETURN:
        return [str(getattr(row, rule.key)) for row in rows]
    ordered = sorted(row.undiscounted_return for row in rows)
    borders = [ordered[len(ordered) * at // rule.quantiles] for at in range(1, rule.quantiles)] if ordered else []
    return [str(bisect_right(borders, row.undiscounted_return)) for row in rows]


def split_by_strata(names: Sequence[str], strata: Sequence[str], rule: SplitRule) -> dict[str, Split]:
    """The split of each name (an episode's or a group's), of which there may be several in the same stratum."""
    sizes = _sizes(names, strata)
    found: dict[str, Split] = {}
    for stratum in sorted(sizes):
        members = sizes[stratum]
        total = sum(members.values())
        before = 0.0
        # Shares of small strata are rounded in another place each, so that the shares of all come out right.
        offset = _fraction(rule.salt, f"stratum {stratum}")
        for name in sorted(members, key=lambda each: _digest(rule.salt, each)):
            place = (before + offset * members[name]) / total
            found[name] = rule.split_at(min(99, int(place * 100)))
            before += members[name]
    return found


def _sizes(names: Sequence[str], strata: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many episodes each name has, by stratum; refuses a name that is in two."""
    stratum_of: dict[str, str] = {}
    sizes: dict[str, dict[str, int]] = {}
    for name, stratum in zip(names, strata, strict=True):
        if stratum_of.setdefault(name, stratum) != stratum:
            raise UsageError(
                f"the group {name!r} has episodes of two strata: {stratum_of[name]!r} and {stratum!r}",
                "A group stays in one split as a whole, so the splits cannot have their shares of both strata.",
                "Leave out --group or --strata, or choose strata that never divide a group.",
            )
        members = sizes.setdefault(stratum, {})
        members[name] = members.get(name, 0) + 1
    return sizes


def _digest(salt: str, text: str) -> bytes:
    return hashlib.sha256(f"{salt}\n{text}".encode()).digest()


def _fraction(salt: str, text: str) -> float:
    return int.from_bytes(_digest(salt, text)[:8]) / 2**64
