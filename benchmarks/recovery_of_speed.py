"""How soon a run is as fast as before when another process has given its core back.

One run of Pong (84x84) learns; a burner keeps one core busy for a stretch in its middle. Speeds are environment steps
per second in windows of two seconds. A run is back when a window that lies after the burner reaches 0.95 of the speed
before; the time until then is counted from the end of the burner to the end of that window.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import burner, command, processor, report, speed_results
from benchmarks.contestants import ours
from benchmarks.contests import PACING, SAME_RULE
from benchmarks.pace import PONG, WARM_UPDATES

BACK, BAR_SECONDS = 0.95, 10.0
WINDOW_SECONDS = 2.0
BEFORE_SECONDS, BUSY_SECONDS, AFTER_SECONDS = 10.0, 12.0, 18.0
ROUNDS, START_SECONDS = 3, 120.0
LOG = "log.every_steps=40"  # about ten rows a second
COMMAND = "scripts/bench recovery_of_speed"
Point = tuple[float, int]  # moment, environment steps


@dataclass(frozen=True)
class Round:
    """One run: its speeds, how long it took to be back (None: it was not), and the burner's share of a core."""

    before: float | None
    during: float | None
    after: float | None
    back_seconds: float | None
    burner_share: float
    curve: list[tuple[float, float]]  # moments from the start of the burner, steps per second
    settings: dict[str, Any]


def speed(points: Sequence[Point], begin: float, end: float) -> float | None:
    """Steps per second between two moments; None if fewer than half of them were seen."""
    inside = [point for point in points if begin <= point[0] <= end]
    if len(inside) < 2 or inside[-1][0] - inside[0][0] < (end - begin) / 2:
        return None
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def windows(points: Sequence[Point], begin: float, end: float) -> list[tuple[float, float]]:
    """The end of each window, a quarter of a window apart, and its speed."""
    found = []
    moment = begin + WINDOW_SECONDS
    while moment <= end:
        value = speed(points, moment - WINDOW_SECONDS, moment)
        if value is not None:
            found.append((moment, value))
        moment += WINDOW_SECONDS / 4
    return found


def judge_round(points: Sequence[Point], burning: tuple[float, float], share: float, settings: dict[str, Any]) -> Round:
    """What the rows of one run say; `burning` is when the burner began and ended."""
    begin, end = burning
    last = points[-1][0] if points else end
    before = speed(points, begin - BEFORE_SECONDS, begin)
    after = windows(points, end, last)
    fast = [moment for moment, value in after if before is not None and value >= BACK * before]
    back = fast[0] - end if fast else None
    since = speed(points, fast[0] if fast else end, last)
    curve = [(round(moment - begin, 2), round(value, 1)) for moment, value in windows(points, begin - 8.0, last)]
    return Round(before, speed(points, begin, end), since, back, share, curve, settings)


def measure() -> Round:
    """One run and one burner."""
    rows: command.Rows = []
    ended: list[command.Finished] = []
    seconds = BEFORE_SECONDS + BUSY_SECONDS + AFTER_SECONDS
    words = [*ours(PONG, *SAME_RULE, *PACING, LOG).command(seconds), "--every-row"]
    cache = speed_results.own_cache()
    begin = time.monotonic()
    run = threading.Thread(
        target=lambda: ended.append(command.run(words, seconds + START_SECONDS, cache, rows=rows)), daemon=True
    )
    run.start()
    wait(lambda: learning(rows) or bool(ended), START_SECONDS)
    time.sleep(BEFORE_SECONDS)
    with burner.Burner(BUSY_SECONDS + burner.START_SECONDS) as burning:
        lit = time.monotonic() - begin
        time.sleep(BUSY_SECONDS)
        share = burning.share()
    out = time.monotonic() - begin
    run.join(seconds + START_SECONDS)
    if not ended or ended[0].exit_code:
        raise SystemExit(f"the run failed:\n{ended[0].errors if ended else ''}")
    _, settings = ended[0].last("settings") or (0.0, {})
    points = [(moment, int(row["env_steps"])) for moment, row in rows if row["kind"] == "row"]
    return judge_round(points, (lit, out), share, {name: settings.get(name) for name in ("threads", "precision")})


def learning(rows: command.Rows) -> bool:
    """Has it begun to learn?"""
    return any(row.get("updates", 0) >= WARM_UPDATES for _, row in list(rows))


def wait(until: Callable[[], bool], seconds: float) -> None:
    """Until it is so, not for ever."""
    end = time.monotonic() + seconds
    while not until():
        if time.monotonic() > end:
            raise SystemExit(f"the run did not learn within {seconds:.0f} s")
        time.sleep(0.05)


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians, and whether the bar was met; a run that was not back counts as never."""
    never = float("inf")
    back = statistics.median(never if each.back_seconds is None else each.back_seconds for each in rounds)
    hollow = any(each.burner_share < burner.LEAST_SHARE for each in rounds)
    return {
        "before": middle([each.before for each in rounds]),
        "during": middle([each.during for each in rounds]),
        "after": middle([each.after for each in rounds]),
        "back_seconds": None if back == never else back,
        "met": None if hollow else back <= BAR_SECONDS,
    }


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what there is."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def markdown(found: dict[str, Any], rounds: Sequence[Round]) -> str:
    """The table."""
    heads = ("env steps/s before", "while busy", "after", "back after, s", "each round, s", "burner's share")
    each = ", ".join(report.shown(one.back_seconds) for one in rounds)
    shares = ", ".join(f"{one.burner_share:.2f}" for one in rounds)
    cells = (found["before"], found["during"], found["after"], found["back_seconds"], each, shares)
    verdict = {True: "yes", False: "**no**", None: None}[found["met"]]
    return report.table((*heads, "bar", "met"), [(*cells, f"<= {BAR_SECONDS:g} s", verdict)])


def main() -> None:
    """Measure, print the table; save and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="about 50 seconds each")
    parser.add_argument("--out", type=Path, help="folder for results that are not to be shown")
    given = parser.parse_args()
    rounds = []
    for number in range(given.rounds):
        rounds.append(measure())
        print(f"round {number + 1}: back after {report.shown(rounds[-1].back_seconds)} s", flush=True)
    found = summary(rounds)
    text = markdown(found, rounds)
    print(f"\n{text}")
    name = f"recovery_of_speed-{processor.kind()}"
    if given.out or given.rounds >= ROUNDS:
        record = {"command": COMMAND, "summary": found, "rounds": [asdict(each) for each in rounds]}
        report.save(name, record, text, given.out or report.RESULTS)
    if given.rounds >= ROUNDS and not given.out:
        title = f"When a core is free again: {processor.kind()}"
        report.publish(name, title, COMMAND, page=speed_results.PAGE)


if __name__ == "__main__":
    main()
