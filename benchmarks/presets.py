"""CartPole with every small preset: five seeds each, judged by 100 greedy episodes that training never saw."""

from benchmarks.grid import Cell, Grid, main
from qfleet.plan.presets.small import SMALL

NAMES = [preset.__name__.replace("_", "-") for preset in SMALL]
# A policy that fails one start in twenty often passes twenty; fifty tell better when to stop.
SETTINGS = ("until.steps=100_000", "eval.episodes=50")
GRID = Grid(
    "presets",
    "Every small preset on CartPole-v1",
    tuple(Cell("CartPole-v1", name, 475.0, SETTINGS, title=f"CartPole-v1, {name}") for name in NAMES),
    seeds=5,
    columns=4,
    notes=(
        "A run stops when the whole interval of a validation is at or above 475, which a lucky early policy may reach: "
        "what is tested, by 100 fresh episodes, is that policy. The curves are validation means; the band spans the "
        "seeds, and a seed that has stopped keeps its last value."
    ),
    pages=("results.md", "algorithms.md"),
)

if __name__ == "__main__":
    main(GRID, __doc__)
