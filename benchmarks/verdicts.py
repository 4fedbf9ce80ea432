"""What a contest of `benchmarks.speed` comes to: medians, ratios within a round, and whether its bars were met."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.contestants import CEILING, OURS
from benchmarks.turns import Measured, Turn

Figures = Mapping[str, Sequence[float | None]]


def middle(figures: Sequence[float | None]) -> float | None:
    """The median of what there is."""
    there = [figure for figure in figures if figure is not None]
    return statistics.median(there) if there else None


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """The median over rounds of ours over theirs."""
    pairs = zip(ours, theirs, strict=False)
    return middle([report.ratio(mine, other) for mine, other in pairs if mine is not None and other])


def best_peer(figures: Figures, ratios: Mapping[str, float | None], *, less: bool) -> str | None:
    """The peer that is nearest to us, of those that took part to the end."""
    beside = {name: value for name, value in ratios.items() if name != CEILING and value is not None}
    if not beside:
        return None
    rounds = max(len(figures[name]) for name in beside)
    to_the_end = [name for name in beside if len(figures[name]) == rounds]
    return (max if less else min)(to_the_end, key=lambda name: beside[name])


def judge(found: Measured) -> dict[str, Any]:
    """The contest's line: figures, the best peer, ratios, conditions, and whether every bar was met."""
    contest = found.contest
    figures = found.figures
    mine = figures.get(OURS, [])
    ratios = {name: ratio(mine, theirs) for name, theirs in figures.items() if name != OURS}
    best = best_peer(figures, ratios, less=contest.less)
    medians = {name: middle(values) for name, values in figures.items()}
    held = [
        (contest.peer_bar, ratios[best] if best else None),
        (contest.ceiling_bar, ratios.get(CEILING)),
        (contest.limit, medians.get(OURS)),
    ]
    return {
        "name": contest.name,
        "load": contest.load,
        "what": contest.what,
        "unit": contest.unit,
        "less": contest.less,
        "ceiling_is": contest.ceiling_is,
        "medians": medians,
        "ratios": ratios,
        "best_peer": best,
        "bars": {"peer": contest.peer_bar, "ceiling": contest.ceiling_bar, "limit": contest.limit},
        "met": met([pair for pair in held if pair[0] is not None], less=contest.less),
        "rounds": figures,
        "conditions": {name: conditions(turns) for name, turns in found.turns.items()},
        "errors": found.errors,
    }


def conditions(turns: Sequence[Turn]) -> dict[str, Any]:
    """Under which conditions a contestant ran: its settings, and turn by turn the load and the burner's share."""
    settings = next((dict(turn.settings) for turn in reversed(turns) if turn.settings), {})
    return {
        **settings,
        "load_average": [turn.load_average for turn in turns],
        "burner_share": [turn.burner_share for turn in turns],
        "hollow": sum(turn.hollow for turn in turns),
    }


def met(held: Sequence[tuple[float | None, float | None]], *, less: bool) -> bool | None:
    """Were all bars reached? None without bars, or if one has nothing to be compared with and none was missed."""
    verdicts = [
        None if bar is None or value is None else (value <= bar if less else value >= bar) for bar, value in held
    ]
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True
