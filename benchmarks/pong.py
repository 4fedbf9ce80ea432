"""Pong on two cores: the recipe to 18 in single and in half precision, and the standard protocol on its way."""

from benchmarks.grid import Cell, Grid, main

PONG, CORES = "ALE/Pong-v5", "runtime.threads=2"
GRID = Grid(
    "pong",
    "Pong on two cores",
    (
        Cell(PONG, "pong", 18.0, (CORES, "runtime.precision=bfloat16"), "Pong 42x42, bfloat16"),
        Cell(PONG, "pong", 18.0, (CORES, "runtime.precision=float32"), "Pong 42x42, float32"),
        Cell(
            PONG, "atari", None, ("runtime.threads=1", "until.steps=550_000"), "Pong 84x84, standard protocol, one core"
        ),
    ),
    seeds=1,
    jobs=1,
    notes=(
        "Scores are of the best checkpoint by validation, greedy, unclipped, 20 test episodes (standard: 30). "
        "The recipe has no sticky actions and pictures of 42x42; the standard protocol has sticky 0.25 and 84x84, "
        "and 550,000 steps are little more than a quarter of its default run, on a core that had other work too."
    ),
)

if __name__ == "__main__":
    main(GRID, __doc__)
