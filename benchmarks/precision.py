"""MinAtar Breakout in bfloat16 and in float32: does half precision learn as well?"""

from benchmarks.grid import Cell, Grid, main

BREAKOUT, STEPS = "MinAtar/Breakout-v0", "until.steps=300_000"
SHARED = ("runtime.threads=1", "runtime.compile=false", STEPS)
GRID = Grid(
    "precision",
    "bfloat16 beside float32",
    (
        Cell(BREAKOUT, "dqn", None, (*SHARED, "runtime.precision=bfloat16"), "MinAtar Breakout, bfloat16"),
        Cell(BREAKOUT, "dqn", None, (*SHARED, "runtime.precision=float32"), "MinAtar Breakout, float32"),
    ),
    seeds=3,
    notes=(
        "Scores are of the best checkpoint by validation, greedy, 100 test episodes, after 300,000 steps. "
        "Pong in both precisions is in the section above."
    ),
)

if __name__ == "__main__":
    main(GRID, __doc__)
