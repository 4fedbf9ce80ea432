"""One agent's view of a PettingZoo game. `qfleet train examples/pettingzoo_view.py:tictactoe --steps 20_000`"""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

Opponent = Callable[[Any, Any], int]  # (observation, mask) -> action


class OneAgentView(gym.Env[Any, int]):
    """The game as `agent` sees it. `opponent` chooses for all others; without one they play at random."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  Gymnasium's own way

    def __init__(self, game: Any, agent: str, opponent: Opponent | None = None) -> None:
        self.game = game
        self.agent = agent
        self.opponent = opponent or self.random_action
        self.render_mode = game.render_mode
        self.observation_space = game.observation_space(agent)["observation"]
        self.action_space = game.action_space(agent)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game, up to the agent's first turn."""
        super().reset(seed=seed)
        self.game.reset(seed=seed)
        seen, _, _, _, info = self.next_turn()
        return seen, info

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take the agent's turn."""
        self.game.step(action)
        return self.next_turn()

    def next_turn(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Let the others play until it is the agent's turn, or its game is over."""
        while self.game.agent_selection != self.agent:
            seen, _, terminated, truncated, _ = self.game.last()
            playing = not (terminated or truncated)  # those whose game is over take a last step without an action
            self.game.step(self.opponent(seen["observation"], seen["action_mask"]) if playing else None)
        seen, reward, terminated, truncated, _ = self.game.last()
        return seen["observation"], float(reward), terminated, truncated, {"action_mask": seen["action_mask"]}

    def random_action(self, observation: Any, mask: Any) -> int:
        """Any allowed action, by the seed of the reset."""
        return int(self.np_random.choice(np.flatnonzero(mask)))

    def render(self) -> Any:
        """A picture of the game."""
        return self.game.render()


def tictactoe(agent: str = "player_1", render_mode: str | None = None) -> OneAgentView:
    """Tic-tac-toe against a random opponent; `env.options.agent=player_2` moves second."""
    from pettingzoo.classic import tictactoe_v3

    return OneAgentView(tictactoe_v3.env(render_mode=render_mode), agent)
