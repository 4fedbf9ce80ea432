"""The maze example learns what breadth-first search and value iteration say is true."""

import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from examples import maze

FILE = Path(maze.__file__)


@pytest.fixture(scope="module")
def learned() -> maze.Table:
    return maze.learn(seed=1)


def shortest_steps() -> int:
    distance = {maze.START: 0}
    waiting = deque([maze.START])
    while waiting:
        row, column = waiting.popleft()
        for near in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if near in maze.CELLS and near not in distance:
                distance[near] = distance[row, column] + 1
                waiting.append(near)
    return distance[maze.GOAL]


def true_values() -> dict[maze.Cell, float]:
    """Value iteration: step -1, goal +10, gamma 0.9, nothing after the goal."""
    value = dict.fromkeys(maze.CELLS, 0.0)
    for _ in range(300):
        for cell in maze.CELLS:
            if cell != maze.GOAL:
                nexts = [near for near in maze.CELLS if abs(near[0] - cell[0]) + abs(near[1] - cell[1]) == 1]
                value[cell] = max(10.0 if near == maze.GOAL else -1.0 + 0.9 * value[near] for near in nexts)
    return value


def test_the_reward_is_minus_one_per_step_and_ten_at_the_goal() -> None:
    above = (maze.GOAL[0] - 1, maze.GOAL[1])
    assert maze.step(above, 2) == (maze.GOAL, 10.0, True)
    assert maze.step(above, 1) == (above, -1.0, False)  # a wall


def test_greedy_path_is_a_shortest_path(learned: maze.Table) -> None:
    path = maze.greedy_path(learned)
    assert path[-1] == maze.GOAL
    assert len(path) - 1 == shortest_steps()


def test_values_match_value_iteration(learned: maze.Table) -> None:
    truth = true_values()
    on_path = maze.greedy_path(learned)[:-1]
    np.testing.assert_allclose([learned[cell].max() for cell in on_path], [truth[cell] for cell in on_path], atol=0.05)


def test_the_seed_decides_everything() -> None:
    np.testing.assert_array_equal(maze.learn(20, seed=3), maze.learn(20, seed=3))
    assert not np.array_equal(maze.learn(20, seed=3), maze.learn(20, seed=4))


def test_an_untrained_table_does_not_walk_for_ever() -> None:
    path = maze.greedy_path(np.zeros((len(maze.GRID), len(maze.GRID[0]), 4)))
    assert path[-1] != maze.GOAL


def test_the_program_draws_policy_values_and_png(tmp_path: Path) -> None:
    png = tmp_path / "maze.png"
    done = subprocess.run(
        [sys.executable, str(FILE), "--seed", "2", "--png", str(png)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    assert f"steps from S to G: {shortest_steps()}" in done.stdout
    assert all(arrow in done.stdout for arrow in maze.ARROWS)
    assert "10.0" in done.stdout  # the cell before the goal
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_it_stands_alone() -> None:
    assert "import qfleet" not in FILE.read_text()
    assert "from qfleet" not in FILE.read_text()
