"""The speed of an older commit and of this one in turn, by the same rows as `benchmarks.speed` and some more.

Each turn runs the code of one commit, its own benchmarks too. A ratio is taken within a round, and the median over
rounds counts. Above 1, this commit is faster.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import command, report
from benchmarks.contestants import Contest, Contestant, ours
from benchmarks.contests import contests
from benchmarks.speed import ROUNDS, SECONDS
from benchmarks.turns import play
from benchmarks.verdicts import middle, ratio

BAR = 0.97
THIS = "this commit"
ACTING = ("runtime.type=processes", "log.every_steps=1000")


def more_contests() -> tuple[Contest, ...]:
    """Runtimes that the other table does not have."""
    small = "CartPole, as the preset says"
    return (
        Contest("processes", f"{small}, actors in a process", "env steps/s", ours("CartPole-v1", *ACTING)),
        Contest(
            "replay",
            f"{small}, actors and replay in processes",
            "env steps/s",
            ours("CartPole-v1", *ACTING, "runtime.replay_process=true"),
        ),
        Contest(
            "learners",
            f"{small}, two learners",
            "env steps/s",
            ours("CartPole-v1", "learners.num=2", "log.every_steps=1000"),
        ),
        Contest(
            "ray",
            f"{small}, on Ray",
            "env steps/s",
            ours("CartPole-v1", "runtime.type=ray", "log.every_steps=1000"),
        ),
    )


def without_script(contest: Contest) -> Contest:
    """The contest with `python -m qfleet` in place of the script, which would set up an environment of its own."""
    script = command.qfleet()[0]
    words = contest.ours.words
    if words[0] != script:
        return contest
    module = (sys.executable, "-m", "qfleet", *words[1:])
    return replace(contest, ours=replace(contest.ours, words=module))


def checkout(commit: str, folder: Path) -> Path:
    """The files of a commit in a new folder."""
    folder.mkdir()
    packed = subprocess.run(["git", "archive", commit], cwd=report.ROOT, check=True, capture_output=True)  # noqa: S603, S607
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)  # noqa: S603, S607
    return folder


def hold(contest: Contest, roots: dict[str, Path], seconds: float, rounds: int) -> dict[str, Any]:
    """All rounds of a contest, there and back."""
    figures: dict[str, list[float | None]] = {name: [] for name in roots}
    names = list(roots)
    for number in range(contest.num_rounds(rounds)):
        for name in names if number % 2 == 0 else reversed(names):
            figure = turn(contest.ours, roots[name], seconds)
            figures[name].append(figure)
            print(f"{contest.name} {number + 1}  {name}: {report.shown(figure)} {contest.unit}", flush=True)
    old, new = (figures[name] for name in names)
    # A time or a size is better when it is smaller.
    found = ratio(old, new) if contest.less else ratio(new, old)
    return {"name": contest.name, "what": contest.what, "unit": contest.unit, "rounds": figures, "ratio": found}


def turn(contestant: Contestant, root: Path, seconds: float) -> float | None:
    """One commit's turn; a row that cannot be measured is reported with its last words."""

    def run(words: list[str], limit: float) -> command.Finished:
        return command.run(words, limit, root=root)

    found = play(contestant, seconds, run)
    if found.figure is None:
        print(f"  {found.error}", file=sys.stderr)
    return found.figure


def line(found: dict[str, Any]) -> tuple[Any, ...]:
    """A row of the table."""
    old, new = (middle(values) for values in found["rounds"].values())
    value = found["ratio"]
    met = None if value is None else "yes" if value >= BAR else "**no**"
    return found["what"], found["unit"], old, new, value, met


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older commit")
    parser.add_argument("--rows", nargs="+", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        known = {each.name: without_script(each) for each in (*contests(f"{folder}/runs"), *more_contests())}
        unknown = [name for name in given.rows or () if name not in known]
        if unknown:
            parser.error(f"there is no row {', '.join(unknown)}; there are {', '.join(known)}")
        roots = {given.commit: checkout(given.commit, Path(folder) / "older"), THIS: report.ROOT}
        found = [hold(known[name], roots, given.seconds, given.rounds) for name in given.rows or known]
    heads = ("what", "unit", given.commit, THIS, "ratio, above 1 is faster now", f"at least {BAR:g}")
    text = report.table(heads, [line(each) for each in found])
    print(f"\n{text}")
    if given.save:
        name = "scripts/bench before " + given.commit
        report.save("before", {"command": name, "rows": found}, f"`{name}`\n\n{text}")


if __name__ == "__main__":
    main()
