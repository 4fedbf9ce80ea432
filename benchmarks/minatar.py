"""MinAtar Breakout and Freeway: a million steps, one update per four, beside the published curves."""

from benchmarks.grid import Cell, Grid, main

# Young and Tian 2019, DQN, mean of 30 seeds, read off their curves (one update per frame, full action set).
PUBLISHED = {
    "MinAtar/Breakout-v0": ((500_000, 8.3), (1_000_000, 9.2)),
    "MinAtar/Freeway-v0": ((500_000, 35.0), (1_000_000, 48.0)),
}
BARS = {"MinAtar/Breakout-v0": 8.0, "MinAtar/Freeway-v0": 40.0}
GRID = Grid(
    "minatar",
    "MinAtar",
    tuple(
        Cell(env, preset, None if preset == "pqn" else BARS[env])
        for preset in ("dqn", "rainbow", "pqn")
        for env in BARS
    ),
    seeds=3,
    notes=(
        "Scores are of the best checkpoint by validation, greedy, 100 test episodes; the curves are validation means, "
        "the band spans the seeds. The published points are training returns with epsilon 0.1 and an update per frame. "
        "Seconds are of a machine that had other work too, and stood still at times."
    ),
    published=PUBLISHED,
)

if __name__ == "__main__":
    main(GRID, __doc__)
