"""Presets for environments, as functions that return settings; `catalog.py` finds presets by name.

Each docstring has three parts, a title, `Source:` and `Advice:`, which `qfleet presets` shows. Note that
`replay.samples_per_insert` is the batch size times the updates per environment step.
"""

import re
from collections.abc import Callable
from typing import TypeAlias

from qfleet.plan.presets.pieces import ATARI, Settings

Defaults: TypeAlias = Callable[[], Settings]


def general() -> Settings:
    """Cautious settings for an environment without tuned defaults.

    Source: the common ground of the published classic-control settings.
    Advice: first raise until.steps; then try optim.learning_rate one third lower or higher.
    """
    return {"algo.n_step": 3, "algo.explore.steps": 20_000, "optim.learning_rate": 5e-4}


def cartpole() -> Settings:
    """Balance a pole; solved in seconds.

    Source: own measurements (batch 256 once per 4 steps, averaged target, five-step returns).
    Advice: a steadier but slower run has algo.n_step=3 and optim.learning_rate=1e-3.
    """
    return {
        **_classic_control(),
        "optim.learning_rate": 2e-3,
        "algo.target.tau": 0.02,
        "algo.explore.steps": 10_000,
        "eval.every_steps": 2_000,
        "until.steps": 50_000,
        "until.score": 475.0,
    }


def acrobot() -> Settings:
    """Swing a two-link arm up.

    Source: own measurements (the CartPole recipe with a lower learning rate).
    Advice: it is learned well before the end; until.steps=30_000 is often enough.
    """
    return {
        **_classic_control(),
        "optim.learning_rate": 1e-3,
        "algo.target.tau": 0.01,
        "algo.explore.end": 0.1,
        "algo.explore.steps": 12_000,
        "until.steps": 60_000,
    }


def mountaincar() -> Settings:
    """Leave a valley by swinging; the reward is constant until the goal is reached.

    Source: own measurements (the CartPole recipe; the count bonus of Tang et al. 2017 on a grid instead of their hash).
    Advice: algo.bonus.type=off shows the effect of the bonus; other environments need another algo.bonus.grid.
    """
    return {
        **_classic_control(),
        "optim.learning_rate": 1e-3,
        "algo.target.tau": 0.01,
        "algo.bonus.type": "count",
        "algo.bonus.scale": 1.0,
        "algo.bonus.grid": 0.5,
        "algo.explore.steps": 10_000,
        "until.steps": 60_000,
    }


def lunarlander() -> Settings:
    """Land a module softly between two flags.

    Source: own measurements (three-step returns and an averaged target; one-step returns learned more slowly).
    Advice: 200 counts as solved; until.score=200 stops there.
    """
    return {
        **_classic_control(),
        "env.check_bounds": False,  # a lander that flies away leaves the bounds of its own space
        "algo.n_step": 3,
        "optim.learning_rate": 5e-4,
        "algo.target.tau": 0.005,
        "net.torso.sizes": (256, 256),
        "replay.capacity": 100_000,
        "algo.explore.end": 0.05,
        "algo.explore.steps": 50_000,
        "eval.every_steps": 10_000,
        "eval.episodes": 50,
        "until.steps": 300_000,
    }


def minatar() -> Settings:
    """Five Atari games on a 10x10 grid.

    Source: Young and Tian 2019; Obando-Ceron and Castro 2021.
    Advice: replay.samples_per_insert=32 (an update per step) learns more per step and runs slower.
    """
    return {
        "algo.n_step": 3,
        "algo.batch_size": 32,
        "replay.samples_per_insert": 8.0,
        "algo.learn_start_steps": 5_000,
        "algo.explore.end": 0.01,
        "algo.explore.steps": 100_000,
        "algo.target.every_updates": 1_000,
        "net.torso.type": "minatar",
        "optim.learning_rate": 2.5e-4,
        "optim.eps": 3.1e-4,
        "eval.every_steps": 50_000,
        "save.every_steps": 50_000,
        "log.every_steps": 5_000,
        "until.steps": 1_000_000,
    }


def atari() -> Settings:
    """Atari games from pictures: 84x84 grey, four frames stacked.

    Source: Mnih et al. 2015, Double and three-step returns as in Hessel et al. 2018, Adam at 1e-4 as in CleanRL.
    Advice: replay.capacity=1_000_000 as published needs 7 GB of memory.
    """
    return {
        "env.clip_reward": True,
        "algo.n_step": 3,
        "algo.batch_size": 32,
        "replay.samples_per_insert": 8.0,
        "replay.capacity": 200_000,
        "algo.learn_start_steps": 20_000,
        "algo.explore.end": 0.01,
        "algo.explore.steps": 250_000,
        "algo.target.every_updates": 1_000,
        "net.torso.type": "nature",
        "optim.learning_rate": 1e-4,
        "optim.eps": 1.5e-4,
        "eval.every_steps": 100_000,
        "eval.episodes": 10,
        "eval.test_episodes": 30,
        "save.every_steps": 100_000,
        "save.every_seconds": 600.0,
        "log.every_steps": 5_000,
        "until.steps": 2_000_000,
    }


def pong() -> Settings:
    """Pong in half an hour on two cores: 42x42 pictures, no sticky actions, small normalised convolutions.

    Source: own measurements; picture size and schedules as in RLlib's tuned Pong example (Liang et al. 2018).
    Advice: for scores to compare with publications use `atari`, or env.sticky=0.25 env.frame_size=84 here.
    """
    return {
        **atari(),
        "env.frame_size": 42,
        "env.sticky": 0.0,
        "net.torso.type": "conv",
        "net.torso.channels": (32, 32, 32),
        "net.torso.kernels": (6, 3, 3),
        "net.torso.strides": (3, 2, 1),
        "net.layer_norm": True,
        "net.dueling": True,
        "replay.capacity": 100_000,
        "algo.learn_start_steps": 5_000,
        "algo.explore.steps": 60_000,
        "algo.target.every_updates": 500,
        "optim.learning_rate": 2.5e-4,
        "optim.eps": 1e-5,
        "eval.every_steps": 50_000,
        "eval.test_episodes": 20,
        "until.steps": 1_000_000,
        "until.score": 19.0,
    }


def _classic_control() -> Settings:
    return {
        "algo.n_step": 5,
        "algo.batch_size": 256,
        "replay.samples_per_insert": 64.0,
        "replay.capacity": 50_000,
        "algo.target.type": "average",
        "net.torso.type": "mlp",
        "net.torso.sizes": (128, 128),
    }


ENVIRONMENTS: tuple[tuple[re.Pattern[str], Defaults], ...] = (
    (re.compile(r"^CartPole-v\d+$"), cartpole),
    (re.compile(r"^Acrobot-v\d+$"), acrobot),
    (re.compile(r"^MountainCar-v\d+$"), mountaincar),
    (re.compile(r"^LunarLander-v\d+$"), lunarlander),
    (re.compile(r"^MinAtar/"), minatar),
    (ATARI, atari),
    (re.compile(r""), general),
)
# Used only when named.
RECIPES: tuple[Defaults, ...] = (pong,)


def defaults_for(env_id: str) -> tuple[str, Settings]:
    """The name and settings of the defaults that fit an environment id."""
    preset = next(preset for pattern, preset in ENVIRONMENTS if pattern.search(env_id))
    return preset.__name__, preset()
