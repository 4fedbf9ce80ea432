"""Data sets: batches from a cached set, recording, and preparing, each beside a limit measured in the same round.

The modules data_batches, data_collect and data_prepare measure; each round has rows of ours beside the limit.
"""

import argparse
import importlib
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import report

MODULES = ("data_batches", "data_collect", "data_prepare")
PAGE = report.ROOT / "docs" / "datasets.md"
Row = dict[str, Any]


def measure(names: Sequence[str], rounds: int) -> list[list[Row]]:
    """The rows of every round, of those modules that exist."""
    found: list[list[Row]] = [[] for _ in range(rounds)]
    for name in names:
        if importlib.util.find_spec(f"benchmarks.{name}") is None:
            continue
        measured = importlib.import_module(f"benchmarks.{name}").measure(rounds)
        for rows, more in zip(found, measured, strict=True):
            rows += more
    return found


def medians(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """For each row the medians over the rounds, and whether the median ratio is on the right side of the bar."""
    names = list(dict.fromkeys(row["row"] for rows in rounds for row in rows))
    return [median([row for rows in rounds for row in rows if row["row"] == name]) for name in names]


def median(rows: Sequence[Row]) -> Row:
    """One row for all rounds; with `most` the ratio may be at most the bar."""
    ratios = [report.ratio(row["ours"], row["limit"]) for row in rows]
    middle = statistics.median(ratios)
    first = rows[0]
    met = middle <= first["bar"] if first.get("most") else middle >= first["bar"]
    values = {name: statistics.median(row[name] for row in rows) for name in ("ours", "limit")}
    return {**first, **values, "ratio": middle, "ratios": ratios, "met": met}


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    headers = ["what", "unit", "qfleet", "limit", "ratio", "all rounds", "bar", "met"]
    cells = []
    for row in rows:
        bar = f"{'at most' if row.get('most') else 'at least'} {row['bar']:g}"
        all_rounds = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        met = "yes" if row["met"] else "no"
        cells.append([row["row"], row["unit"], row["ours"], row["limit"], row["ratio"], all_rounds, bar, met])
    return report.table(headers, cells)


def main() -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the table has their medians (default 5)")
    parser.add_argument("--only", choices=MODULES, action="append", help="only this part, which is not saved")
    options = parser.parse_args()
    rows = medians(measure(options.only or MODULES, options.rounds))
    table = markdown(rows)
    print(table)
    if not options.only:
        report.save("data", {"rounds": options.rounds, "rows": rows}, f"`scripts/bench data`\n\n{table}")
        report.publish("data", "Speed", "scripts/bench data", page=PAGE)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
