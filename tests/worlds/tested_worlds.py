"""The environments of other packages that the suite trains on; docs/worlds.md has a row for each."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUMO_NET = "{site}/sumo_rl/nets/single-intersection/single-intersection"  # {site} is the venv's site-packages
SUMO = (
    f"env.options.net_file={SUMO_NET}.net.xml",
    f"env.options.route_file={SUMO_NET}.rou.xml",
    "env.options.num_seconds=1000",
    "env.options.sumo_warnings=false",
    "env.options.additional_sumo_cmd=--no-step-log",
)


@dataclass(frozen=True)
class TestedWorld:
    """An id to type, the packages that it needs beside qfleet, and settings of its own."""

    __test__ = False  # for pytest: not a class of tests
    id: str
    packages: tuple[str, ...] = ()
    env: tuple[str, ...] = ()  # also for `env check`
    train: tuple[str, ...] = ()
    exact: bool = True  # False: `env check` must say that it cannot be repeated

    def __str__(self) -> str:
        return self.id.rpartition("/")[2]


# The slowest come first, so that two workers end at about the same time.
WORLDS = (
    TestedWorld("highway_env:highway-fast-v0", ("highway-env",), train=("env.num=2",)),
    TestedWorld("sumo_rl:sumo-rl-v0", ("sumo-rl", "eclipse-sumo"), SUMO, ("env.num=2",)),
    TestedWorld("minigrid:MiniGrid-Empty-5x5-v0", ("minigrid",)),
    TestedWorld("gym_anytrading:stocks-v0", ("gym-anytrading",), train=("env.normalize=obs",)),
    TestedWorld("examples/pettingzoo_view.py:tictactoe", ("pettingzoo", "pygame-ce")),
    TestedWorld("FrozenLake-v1"),
    TestedWorld("Taxi-v4"),
    TestedWorld("Blackjack-v1"),
    TestedWorld("CliffWalking-v1", train=("eval.max_steps=200",)),
    TestedWorld("CartPole-v1"),
    TestedWorld("Acrobot-v1"),
    TestedWorld("MountainCar-v0"),
    TestedWorld("MountainCarContinuous-v0"),
    TestedWorld("Pendulum-v1"),
    TestedWorld("LunarLander-v3"),
    TestedWorld("BipedalWalker-v3", train=("--preset", "decqn", "env.bins=3"), exact=False),
    TestedWorld("InvertedPendulum-v5"),
    TestedWorld("Reacher-v5"),
    TestedWorld("HalfCheetah-v5", train=("--preset", "decqn", "env.bins=3", "eval.max_steps=200")),
)
PACKAGES = tuple(dict.fromkeys(package for world in WORLDS for package in world.packages))
