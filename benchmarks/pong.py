"""Pong on one core each: the recipe and the standard protocol, in single and in half precision."""

from benchmarks.grid import Cell, Grid, main

PONG = "ALE/Pong-v5"
CORE, FLOAT32, BFLOAT16 = "runtime.threads=1", "runtime.precision=float32", "runtime.precision=bfloat16"
GRID = Grid(
    "pong",
    "Pong, one core for each run",
    (
        Cell(PONG, "atari", 18.0, (CORE, BFLOAT16), "Pong 84x84, standard protocol, bfloat16", most_seeds=1),
        Cell(PONG, "pong", 18.0, (CORE, BFLOAT16), "Pong 42x42, bfloat16"),
        Cell(PONG, "pong", 18.0, (CORE, FLOAT32), "Pong 42x42, float32"),
    ),
    seeds=3,
    jobs=2,
    notes=(
        "Scores are of the best checkpoint by validation, greedy, unclipped, 20 test episodes (standard: 30). "
        "The recipe has no sticky actions and pictures of 42x42; the standard protocol has sticky 0.25 and 84x84."
    ),
)

if __name__ == "__main__":
    main(GRID, __doc__)
