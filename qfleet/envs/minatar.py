"""MinAtar's five games as Gymnasium environments with channel-first observations."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from qfleet.data import Array
from qfleet.envs.options import Option, checked_options
from qfleet.errors import UsageError
from qfleet.install import install_command
from qfleet.plan.part import Fraction

GAMES = {
    "Asterix": "asterix",
    "Breakout": "breakout",
    "Freeway": "freeway",
    "Seaquest": "seaquest",
    "SpaceInvaders": "space_invaders",
}
OPTIONS = {"difficulty_ramping": Option(bool, True), "sticky_action_prob": Option(Fraction, 0.1)}
IDS = {f"MinAtar/{game}-v{version}": (rom, version == 1) for game, rom in GAMES.items() for version in (0, 1)}


class MinAtar(gym.Env[Array, Any]):
    """One MinAtar game; bool planes [C, 10, 10]. Ids of version 1 have only the actions that the game uses."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  (as gymnasium declares it)

    def __init__(self, game: str, *, minimal: bool, render_mode: str | None = None, **options: Any) -> None:
        try:
            from minatar import Environment
        except ImportError as error:
            raise UsageError(
                "MinAtar environments need the package MinAtar.",
                f"Importing it failed: {error}.",
                f"Install it: {install_command('minatar')}",
            ) from error
        self.render_mode = render_mode
        self._game = Environment(game, **checked_options(options, OPTIONS, "MinAtar"))
        self._actions = self._game.minimal_action_set() if minimal else list(range(self._game.num_actions()))
        height, width, channels = self._game.state_shape()
        self.action_space = spaces.Discrete(len(self._actions))
        self.observation_space = spaces.Box(0, 1, (channels, height, width), np.bool_)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin a game; the previous game's sticky action is cleared, so that the seed decides everything."""
        super().reset(seed=seed)
        self._game.seed(seed)
        self._game.last_action = 0
        self._game.reset()
        return self._planes(), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Play one frame."""
        reward, over = self._game.act(self._actions[action])
        return self._planes(), float(reward), bool(over), False, {}

    def render(self) -> Any:
        """The planes as one coloured image."""
        planes = self._planes()
        colours = 64 + 191 * np.array([[(i >> k) & 1 for k in range(3)] for i in range(1, 1 + len(planes))])
        image = (planes[..., None] * colours[:, None, None, :]).max(axis=0).astype(np.uint8)
        return image.repeat(32, axis=0).repeat(32, axis=1)

    def _planes(self) -> Array:
        return np.ascontiguousarray(np.moveaxis(self._game.state(), -1, 0).astype(bool))
