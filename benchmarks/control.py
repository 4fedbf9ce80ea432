"""Continuous actions by decoupled bins: Pendulum and a MuJoCo robot, beside what random actions score."""

from benchmarks.grid import Cell, Grid, main

GRID = Grid(
    "control",
    "Continuous control by decoupled bins",
    (
        Cell("Pendulum-v1", "decqn-small", -200.0, settings=("env.bins=5", "until.steps=50_000")),
        Cell("HalfCheetah-v5", "decqn-small", 500.0, settings=("env.bins=3", "until.steps=200_000")),
    ),
    seeds=3,
    notes="Random actions score about -1,200 on Pendulum-v1 and -280 on HalfCheetah-v5.",
)

if __name__ == "__main__":
    main(GRID, __doc__)
