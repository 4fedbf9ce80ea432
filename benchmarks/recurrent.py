"""CartPole with its velocities hidden: a recurrent network must remember what a feed-forward one cannot see."""

from benchmarks.grid import Cell, Grid, main

ENV = "examples/hidden_cartpole.py:HiddenCartPole"
TITLE = "CartPole, velocities hidden"
GRID = Grid(
    "recurrent",
    "CartPole with hidden velocities",
    (
        Cell(ENV, "r2d2-small", 400.0, title=TITLE, settings=("until.steps=200_000", "until.score=450")),
        Cell(ENV, "nstep-small", title=TITLE, settings=("until.steps=200_000", "until.score=450")),
    ),
    seeds=3,
    columns=1,
)

if __name__ == "__main__":
    main(GRID, __doc__)
