"""Contestants of `benchmarks.speed` take turns: there and back, quiet or beside a burner, the best peers to the end."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import burner, command, processor, report
from benchmarks.contestants import BUSY, CEILING, OURS, Contest, Contestant
from benchmarks.pace import newest_settings

SPARE_SECONDS = 240.0  # for imports, filling and leaving
NUM_FINALISTS = 2  # peers that take part after the first round
NOTHING = "nothing was measured within the limit"


class Burning(Protocol):
    """A burner at work."""

    def share(self) -> float:
        """The part of a core that it has had so far."""


Run = Callable[[list[str], float], command.Finished]
Burn = Callable[[float], AbstractContextManager[Burning]]


@dataclass(frozen=True)
class Turn:
    """What one turn gave, and under which conditions."""

    figure: float | None
    error: str = ""
    load_average: float | None = None  # before it
    burner_share: float | None = None  # None: nothing burned
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hollow(self) -> bool:
        """Was the machine not busy although it should have been? Then the figure does not count."""
        return self.burner_share is not None and self.burner_share < burner.LEAST_SHARE


@dataclass
class Measured:
    """What a contest gave: a turn per contestant and round, and why some have none."""

    contest: Contest
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, list[float | None]]:
        """A figure per contestant and round; None where there is none that counts."""
        return {name: [None if turn.hollow else turn.figure for turn in turns] for name, turns in self.turns.items()}


def hold(
    contest: Contest,
    with_peers: bool,
    seconds: float,
    rounds: int,
    run: Run = command.run,
    burn: Burn = burner.Burner,
) -> Measured:
    """All rounds of a contest; whoever fails once does not start again, and after a round only the best peers do."""
    found = Measured(contest)
    beside = burn if contest.load == BUSY else None
    if contest.warm is not None:
        play(contest.warm, seconds, run)
    there = contest.field(with_peers)
    for number in range(contest.num_rounds(rounds)):
        for contestant in there if number % 2 == 0 else reversed(there):
            if contestant.name in found.errors:
                continue
            turn = play(contestant, seconds, run, beside)
            found.turns.setdefault(contestant.name, []).append(turn)
            if turn.figure is None:
                found.errors[contestant.name] = turn.error
            print(f"{contest.name} {contest.load} {number + 1}  {line(contestant, turn)} {contest.unit}", flush=True)
        there = [each for each in there if each.name in (OURS, CEILING, *finalists(found))]
    return found


def line(contestant: Contestant, turn: Turn) -> str:
    """A turn in a few words."""
    note = "" if turn.burner_share is None else f" (burner {turn.burner_share:.2f})"
    return f"{contestant.name}{note}: {report.shown(turn.figure)}"


def finalists(found: Measured) -> list[str]:
    """The best peers of the first round: of each first its best number of threads."""
    first = {
        each: found.turns[each.name][0].figure or 0.0
        for each in found.contest.peers
        if each.name in found.turns and each.name not in found.errors
    }
    ranked = sorted(first, key=lambda each: first[each], reverse=not found.contest.less)
    heads = {each.family: each.name for each in reversed(ranked)}
    best = [each.name for each in ranked if heads[each.family] == each.name]
    return [*best, *(each.name for each in ranked if each.name not in best)][:NUM_FINALISTS]


def play(contestant: Contestant, seconds: float, run: Run, burn: Burn | None = None) -> Turn:
    """One contestant's turn: its figure, or the last line that it said."""
    load = processor.load_average()
    limit = seconds + SPARE_SECONDS
    share = None
    if burn is None or contestant.always_quiet:
        done = run(contestant.command(seconds), limit)
    else:
        with burn(limit + burner.START_SECONDS) as burning:
            done = run(contestant.command(seconds), limit)
            share = round(burning.share(), 3)
    figure = contestant.read(done)
    if figure is not None:
        return Turn(figure * contestant.times, "", load, share, settings(contestant, done))
    said = [text.strip() for text in done.errors.splitlines() if text.strip()]
    return Turn(None, said[-1] if said and done.exit_code else NOTHING, load, share)


def settings(contestant: Contestant, done: command.Finished) -> dict[str, Any]:
    """Threads and precision: what it said of itself, what its run.toml has, or what it was told."""
    _, said = done.last("settings") or (0.0, {})
    known = said or (newest_settings(Path(contestant.runs)) if contestant.runs else {})
    told = {"threads": contestant.threads, "precision": contestant.precision}
    return told | {name: value for name, value in known.items() if name != "kind"}
