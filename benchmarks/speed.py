"""Speed on one machine beside peers and beside what bare torch allows: one run, taking turns, ratios.

Contestants take turns (there and back, so that a machine that slows down favours nobody); a ratio is taken within a
round, and the median over rounds counts. Training is real: checkpoints as the plan says, only evaluation is off.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import command, peers, report
from benchmarks.contests import CEILING, MANY_STEPS, OURS, Contest, Contestant, contests

SECONDS, ROUNDS = 10.0, 3
SPARE_SECONDS = 240.0  # for imports, filling and leaving
NOTHING = "nothing was measured within the limit"
PAGE = report.ROOT / "docs" / "speed.md"
COMMAND = "scripts/bench speed --peers"

Run = Callable[[list[str], float], command.Finished]
Figures = dict[str, list[float | None]]


@dataclass
class Measured:
    """What a contest gave: a figure per contestant and round, and why some have none."""

    contest: Contest
    figures: Figures = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def hold(contest: Contest, with_peers: bool, seconds: float, rounds: int, run: Run = command.run) -> Measured:
    """All rounds of a contest; whoever fails once does not start again."""
    field, found = contest.field(with_peers), Measured(contest)
    if contest.warm:
        play(contest.ours, seconds, run)
    for number in range(contest.rounds or rounds):
        for contestant in field if number % 2 == 0 else reversed(field):
            if contestant.name in found.errors:
                continue
            figure, error = play(contestant, seconds, run)
            found.figures.setdefault(contestant.name, []).append(figure)
            if figure is None:
                found.errors[contestant.name] = error
            print(f"{contest.name} {number + 1}  {contestant.name}: {report.shown(figure)} {contest.unit}", flush=True)
    return found


def play(contestant: Contestant, seconds: float, run: Run) -> tuple[float | None, str]:
    """One contestant's turn: its figure, or the last line that it said."""
    done = run(contestant.command(seconds), seconds + SPARE_SECONDS)
    figure = contestant.read(done)
    if figure is not None:
        return figure * contestant.times, ""
    said = [line.strip() for line in done.errors.splitlines() if line.strip()]
    return None, said[-1] if said and done.exit_code else NOTHING


def middle(figures: Sequence[float | None]) -> float | None:
    """The median of what there is."""
    there = [figure for figure in figures if figure is not None]
    return statistics.median(there) if there else None


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """The median over rounds of ours over theirs."""
    pairs = zip(ours, theirs, strict=False)
    return middle([report.ratio(mine, other) for mine, other in pairs if mine is not None and other])


def judge(found: Measured) -> dict[str, Any]:
    """The contest's line: figures, the best peer, ratios, and whether every bar was met."""
    contest, figures = found.contest, found.figures
    mine = figures.get(OURS, [])
    ratios = {name: ratio(mine, theirs) for name, theirs in figures.items() if name != OURS}
    beside = {name: value for name, value in ratios.items() if name != CEILING and value is not None}
    best = min(beside, key=lambda name: beside[name]) if beside else None
    medians = {name: middle(values) for name, values in figures.items()}
    held = [
        (contest.peer_bar, beside[best] if best else None),
        (contest.ceiling_bar, ratios.get(CEILING)),
        (contest.limit, medians.get(OURS)),
    ]
    return {
        "name": contest.name,
        "what": contest.what,
        "unit": contest.unit,
        "medians": medians,
        "ratios": ratios,
        "best_peer": best,
        "bars": {"peer": contest.peer_bar, "ceiling": contest.ceiling_bar, "limit": contest.limit},
        "met": met([pair for pair in held if pair[0] is not None], less=contest.less),
        "rounds": figures,
        "errors": found.errors,
    }


def met(held: Sequence[tuple[float | None, float | None]], *, less: bool) -> bool | None:
    """Were all bars reached? None when one of them has nothing to be compared with, and none was missed."""
    verdicts = [
        None if bar is None or value is None else (value <= bar if less else value >= bar) for bar, value in held
    ]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def markdown(lines: Sequence[dict[str, Any]], named: dict[str, Contest]) -> str:
    """The verdicts as a table, and below it every peer that took part."""
    heads = ("what", "qfleet", "best peer", "qfleet / it", "ceiling", "qfleet / it", "bar", "met")
    text = report.table(heads, [cells(line, named[line["name"]]) for line in lines])
    peers_seen = [
        (line["what"], name, line["medians"][name], line["ratios"][name])
        for line in lines
        for name in line["medians"]
        if name not in (OURS, CEILING)
    ]
    if peers_seen:
        text += "\nEvery peer:\n\n" + report.table(("what", "peer", "its figure", "qfleet / it"), peers_seen)
    failed = [f"- {line['name']}, {name}: {why}" for line in lines for name, why in line["errors"].items()]
    return text + ("\nNot measured:\n\n" + "\n".join(failed) + "\n" if failed else "")


def versions(installed: dict[str, str]) -> str:
    """Which peers these were."""
    named = ", ".join(f"{name} {version}" for name, version in installed.items())
    return f"\nPeers: {named}.\n" if named else ""


def cells(line: dict[str, Any], contest: Contest) -> tuple[Any, ...]:
    """One line of the table."""
    medians, ratios, best = line["medians"], line["ratios"], line["best_peer"]
    sign = "<=" if contest.less else ">="
    names = (("peer", "x peer"), ("ceiling", "x ceiling"), ("limit", contest.unit))
    bars = [f"{sign} {line['bars'][key]:g} {unit}" for key, unit in names if line["bars"][key] is not None]
    top = medians.get(CEILING)
    return (
        contest.what,
        None if medians.get(OURS) is None else f"{report.shown(medians[OURS])} {contest.unit}",
        None if best is None else f"{report.shown(medians[best])} ({best})",
        None if best is None else ratios[best],
        None if top is None else f"{report.shown(top)} ({contest.ceiling_is})",
        ratios.get(CEILING),
        ", ".join(bars),
        {True: "yes", False: "**no**", None: None}[line["met"]],
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="measure other libraries too, from .venv-peers")
    names = [contest.name for contest in contests("")]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=f"only these of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long everybody is measured in each round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--memory-steps", type=int, default=MANY_STEPS, help="Pong steps that memory is filled with")
    parser.add_argument("--out", type=Path, help="folder for the results of a run that is not the whole one")
    return parser.parse_args(words)


def whole(given: argparse.Namespace) -> bool:
    """Is this the run whose results are shown?"""
    usual = given.seconds >= SECONDS and given.rounds >= ROUNDS and given.memory_steps >= MANY_STEPS
    return bool(given.peers and not given.rows and not given.out and usual)


def main() -> None:
    """Hold the contests, print the table; save and show a whole run."""
    given = parse()
    if given.peers:
        peers.ensure()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        named = {each.name: each for each in contests(folder, given.memory_steps)}
        chosen = [named[name] for name in given.rows or named]
        lines = [judge(hold(contest, given.peers, given.seconds, given.rounds)) for contest in chosen]
    installed = peers.versions() if given.peers else None
    text = markdown(lines, named) + versions(installed or {})
    print(f"\n{text}")
    if whole(given) or given.out:
        settings = {name: value for name, value in vars(given).items() if name != "out"}
        record = {"command": COMMAND, "settings": settings, "peers": installed}
        path = report.save("speed", {**record, "rows": lines}, text, given.out or report.RESULTS)
        print(f"saved {path.name}")
    if whole(given):
        publish(report.RESULTS, PAGE)


def publish(results: Path, page: Path) -> None:
    """The table on its own page."""
    report.publish("speed", "One machine", COMMAND, results=results, page=page)


if __name__ == "__main__":
    main()
