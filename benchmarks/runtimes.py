"""CartPole on every runtime: as many updates, and learning that does not differ."""

from benchmarks.grid import Cell, Grid, main

FLEET = ("runtime.type=processes", "actors.num=2")
WAYS: dict[str, tuple[str, ...]] = {
    "inline": (),
    "processes": FLEET,
    "processes, replay too": (*FLEET, "runtime.replay_process=true"),
    "processes, central": (*FLEET, "runtime.inference=central"),
}
# The whole budget, so that steps and updates compare; what is judged is the best checkpoint.
WHOLE = ("until.score=none", "until.steps=20000")
GRID = Grid(
    "runtimes",
    "The same plan on every runtime",
    tuple(
        Cell("CartPole-v1", "cartpole", 475.0, (*WHOLE, *settings), title=f"CartPole-v1, {name}")
        for name, settings in WAYS.items()
    ),
    seeds=5,
    columns=4,
    notes="20,000 steps allow (20,000 - 1,000) / 4 = 4,750 updates; a run ends with the row that reaches the last.",
)

if __name__ == "__main__":
    main(GRID, __doc__)
