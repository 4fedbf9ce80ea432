"""Speed on one machine beside peers and beside what bare torch allows: taking turns, ratios, quiet and busy.

Contestants take turns (there and back, so that a machine that slows down favours nobody); a ratio is taken within a
round, and the median over rounds counts. After the first round only the two best peers go on, each with its best
number of threads. On a busy machine another process keeps one core busy. Training is real: checkpoints as the plan
says, only evaluation is off. Lines are saved as they come; a run that was cut short goes on with those that miss.
"""

import argparse
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, peers, processor, report, speed_results, speed_table
from benchmarks.contestants import BUSY, LOADS, QUIET, Contest, Contestant, busy
from benchmarks.contests import MANY_STEPS, contests
from benchmarks.turns import NUM_FINALISTS, Run, hold
from benchmarks.verdicts import judge

SECONDS, ROUNDS = 5.0, 5
BUSY_START = 1.3  # how much longer a start takes beside a burner, more or less


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="measure other libraries too, from .venv-peers")
    names = [contest.name for contest in contests("")]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=f"only these of {', '.join(names)}")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS), help="only quiet, or only busy")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long everybody is measured in each round")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of contests that have no number of their own")
    parser.add_argument("--memory-steps", type=int, default=MANY_STEPS, help="Pong steps that memory is filled with")
    parser.add_argument("--again", action="store_true", help="measure anew what is saved already")
    parser.add_argument("--out", type=Path, help="folder for results that are not to be shown")
    return parser.parse_args(words)


def usual(given: argparse.Namespace) -> bool:
    """Are these the settings of the results that are shown?"""
    long = given.seconds >= SECONDS and given.rounds >= ROUNDS and given.memory_steps >= MANY_STEPS
    return bool(given.peers and not given.out and long)


def chosen(given: argparse.Namespace, known: Sequence[Contest]) -> list[Contest]:
    """The contests that were asked for: of each row the quiet one, then the busy one."""
    wanted = [contest for contest in known if not given.rows or contest.name in given.rows]
    return [
        busy(contest) if load == BUSY else contest
        for contest in wanted
        for load in LOADS
        if load in given.load and (load == QUIET or contest.can_be_busy)
    ]


def expected_seconds(contest: Contest, with_peers: bool, seconds: float, rounds: int) -> float:
    """How long a contest takes, more or less."""
    field = contest.field(with_peers)
    first = sum(turn_seconds(contest, each, seconds) for each in field)
    quickest = sorted(turn_seconds(contest, each, seconds) for each in contest.peers if with_peers)[:NUM_FINALISTS]
    others = [each for each in field if each not in contest.peers]
    later = sum(turn_seconds(contest, each, seconds) for each in others) + sum(quickest)
    warm = turn_seconds(contest, contest.warm, seconds) if contest.warm else 0.0
    return warm + first + (contest.num_rounds(rounds) - 1) * later


def turn_seconds(contest: Contest, contestant: Contestant, seconds: float) -> float:
    """How long a turn takes, more or less."""
    slower = BUSY_START if contest.load == BUSY and not contestant.always_quiet else 1.0
    return contestant.start_seconds * slower + (seconds if contest.timed else 0.0)


def runner() -> Run:
    """Runs commands with a cache of this code's own, so that no earlier run has left its measurements there."""
    return functools.partial(command.run, env=speed_results.own_cache())


def announce(todo: Sequence[Contest], kept: int, given: argparse.Namespace) -> None:
    """Say what is going to happen and how long it will take."""
    seconds = sum(expected_seconds(contest, given.peers, given.seconds, given.rounds) for contest in todo)
    there = f"; {kept} are there already" if kept else ""
    print(f"{processor.kind()}: {len(todo)} contests, about {max(1.0, seconds / 60):.0f} min{there}", flush=True)


def measure(given: argparse.Namespace, known: Sequence[Contest]) -> dict[speed_results.Key, dict[str, Any]]:
    """Hold the contests that are missing, saving after each; every line that was asked for."""
    asked = {name: getattr(given, name) for name in ("peers", "seconds", "rounds", "memory_steps")}
    saves = usual(given) or given.out is not None
    folder = given.out or report.RESULTS
    saved = speed_results.read(folder, processor.kind()) if saves else {}
    wanted = chosen(given, known)
    todo = [each for each in wanted if given.again or not speed_results.is_kept(saved.get(each.key), asked)]
    announce(todo, len(wanted) - len(todo), given)
    installed = peers.versions() if given.peers else None
    run = runner()
    for contest in todo:
        found = judge(hold(contest, given.peers, given.seconds, given.rounds, run))
        saved[contest.key] = speed_results.stamped(found, asked)
        if saves:
            speed_results.save(saved, [each.name for each in known], folder, installed)
        if usual(given):
            speed_results.publish(processor.kind())
    return {each.key: saved[each.key] for each in wanted}


def main() -> None:
    """Hold the contests and print the tables."""
    given = parse()
    if given.peers:
        peers.ensure()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        lines = measure(given, contests(folder, given.memory_steps))
    print(f"\n{speed_table.markdown(list(lines.values()))}")


if __name__ == "__main__":
    main()
