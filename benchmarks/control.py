"""Continuous actions by decoupled bins: Pendulum and a MuJoCo robot."""

from benchmarks.grid import Cell, Grid, main

GRID = Grid(
    "control",
    "Continuous control by decoupled bins",
    (
        Cell("Pendulum-v1", "decqn-small", -200.0, settings=("env.bins=5", "until.steps=50_000")),
        Cell("HalfCheetah-v5", "decqn-small", 500.0, settings=("env.bins=3", "until.steps=200_000")),
    ),
    seeds=3,
    notes="HalfCheetah scores below zero with random actions, as its curves do where they begin.",
)

if __name__ == "__main__":
    main(GRID, __doc__)
