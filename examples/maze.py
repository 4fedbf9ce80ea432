"""Tabular Q-learning on a maze: the smallest complete example of what qfleet does with networks.

A mouse looks for the goal G. Every step costs 1, reaching the goal pays 10 and ends the episode. Episodes begin
anywhere, so that the whole maze is learned; what is shown in the end is the way from S.
The table q[state, action] estimates the return: rewards from here on, each step discounted by gamma. After
every step the estimate moves a little (alpha) towards what was seen: reward + gamma * best value of the next cell.

    python examples/maze.py --png maze.png
"""

import argparse
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAZE = """
#############
#S  #       #
# # # ##### #
# #   #   # #
# ##### # # #
#   #   # # #
### # ### # #
#   #   #   #
# ##### ### #
#         #G#
#############
"""
STEP_REWARD, GOAL_REWARD = -1.0, 10.0
GAMMA, ALPHA = 0.9, 0.1
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
ARROWS = "↑→↓←"

Cell = tuple[int, int]
Table = NDArray[np.float64]

GRID = MAZE.split("\n")[1:-1]
CELLS = [(row, column) for row, line in enumerate(GRID) for column, mark in enumerate(line) if mark != "#"]
START = next(cell for cell in CELLS if GRID[cell[0]][cell[1]] == "S")
GOAL = next(cell for cell in CELLS if GRID[cell[0]][cell[1]] == "G")


def step(cell: Cell, action: int) -> tuple[Cell, float, bool]:
    """One move: the next cell, the reward, and whether the episode is over. Walls leave the mouse where it is."""
    row, column = cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]
    if GRID[row][column] != "#":
        cell = (row, column)
    return (cell, GOAL_REWARD, True) if cell == GOAL else (cell, STEP_REWARD, False)


def learn(episodes: int = 2_000, seed: int = 0) -> Table:
    """Q-learning with epsilon-greedy exploration; the table is [rows, columns, actions]."""
    rng = np.random.default_rng(seed)
    q = np.zeros((len(GRID), len(GRID[0]), len(MOVES)))
    for episode in range(episodes):
        epsilon = max(0.1, 1.0 - episode / (0.5 * episodes))  # explore first, then follow what was learned
        cell, over = CELLS[rng.integers(len(CELLS))], False
        while not over:
            action = int(rng.integers(len(MOVES))) if rng.random() < epsilon else int(q[cell].argmax())
            following, reward, over = step(cell, action)
            target = reward if over else reward + GAMMA * q[following].max()  # nothing comes after the goal
            q[cell][action] += ALPHA * (target - q[cell][action])
            cell = following
    return q


def greedy_path(q: Table) -> list[Cell]:
    """The cells a mouse passes that always takes the best-valued action, from start to goal."""
    path = [START]
    while path[-1] != GOAL and len(path) <= len(CELLS):  # a bad table might send it in circles
        path.append(step(path[-1], int(q[path[-1]].argmax()))[0])
    return path


def draw(q: Table) -> str:
    """The maze as text, twice: the learned policy as arrows, and the value of each cell."""
    policy, values = [], []
    for row, line in enumerate(GRID):
        marks = ["██" if mark == "#" else f"{ARROWS[q[row, column].argmax()]} " for column, mark in enumerate(line)]
        numbers = ["████" if mark == "#" else f"{q[row, column].max():4.1f}" for column, mark in enumerate(line)]
        if row == GOAL[0]:
            marks[GOAL[1]], numbers[GOAL[1]] = "G ", "  G "
        policy.append("".join(marks))
        values.append("".join(numbers))
    return "\n".join(["policy", *policy, "", "values", *values])


def picture(q: Table, file: str) -> None:
    """The same as a PNG: colour is the value, arrows are the policy, the line is the greedy path."""
    from matplotlib.figure import Figure

    values = np.full(q.shape[:2], np.nan)
    for cell in CELLS:
        values[cell] = q[cell].max()
    values[GOAL] = np.nan
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("black")
    figure.colorbar(axes.imshow(values, cmap="viridis"), label="value of the best action")
    axes.plot([column for _, column in greedy_path(q)], [row for row, _ in greedy_path(q)], color="white", alpha=0.4)
    for row, column in CELLS:
        mark = "G" if (row, column) == GOAL else ARROWS[q[row, column].argmax()]
        colour = "black" if values[row, column] > 5 else "white"
        axes.text(column, row, mark, ha="center", va="center", color=colour)
    axes.set(title=f"Q-learning on a maze: {len(greedy_path(q)) - 1} steps to the goal", xticks=[], yticks=[])
    figure.savefig(file, dpi=120, format="png")


def main(argv: Sequence[str] | None = None) -> None:
    """Learn, then show what was learned."""
    parser = argparse.ArgumentParser(description="tabular Q-learning on a maze")
    parser.add_argument("--episodes", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", metavar="FILE", help="also draw a picture (needs matplotlib)")
    options = parser.parse_args(argv)
    q = learn(options.episodes, options.seed)
    print(draw(q))
    print(f"\nsteps from S to G: {len(greedy_path(q)) - 1}")
    if options.png:
        picture(q, options.png)
        print(f"picture: {options.png}")


if __name__ == "__main__":
    main()
