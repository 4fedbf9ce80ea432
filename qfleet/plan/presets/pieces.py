"""Shared by presets: patterns of environment ids, and settings that several algorithms have."""

import re
from typing import Any, TypeAlias

Settings: TypeAlias = dict[str, Any]

ATARI = re.compile(r"^ALE/|NoFrameskip-v4$")
CARTPOLE = re.compile(r"^CartPole-v\d+$")
MINATAR = re.compile(r"^MinAtar/")
# Discounted returns that a categorical head must cover.
SUPPORTS: tuple[tuple[re.Pattern[str], tuple[float, float]], ...] = (
    (ATARI, (-10.0, 10.0)),
    (CARTPOLE, (0.0, 100.0)),
    (re.compile(r"^(Acrobot|MountainCar)-v\d+$"), (-100.0, 0.0)),
    (MINATAR, (-10.0, 10.0)),
    (re.compile(r""), (-100.0, 100.0)),
)


def only_atari(env_id: str, settings: Settings) -> Settings:
    """The settings if the environment is an Atari game, else none."""
    return settings if ATARI.search(env_id) else {}


def only_minatar(env_id: str, settings: Settings) -> Settings:
    """The settings if the environment is a MinAtar game, else none."""
    return settings if MINATAR.search(env_id) else {}


def with_atoms(env_id: str, atoms: int) -> Settings:
    """A categorical head over the range of this environment's returns."""
    low, high = next(support for pattern, support in SUPPORTS if pattern.search(env_id))
    return {"net.head.type": "categorical", "net.head.atoms": atoms, "net.head.low": low, "net.head.high": high}


def with_priorities(alpha: float, beta_start: float, beta_end: float) -> Settings:
    """Prioritised replay (Schaul et al. 2016)."""
    return {
        "replay.sampler.type": "prioritized",
        "replay.sampler.alpha": alpha,
        "replay.sampler.beta_start": beta_start,
        "replay.sampler.beta_end": beta_end,
    }


def atari_beta(env_id: str, updates: int) -> Settings:
    """On Atari beta reaches its end with the last update of the default run, as published."""
    return only_atari(env_id, {"replay.sampler.beta_updates": updates})


def distributional(settings: Settings) -> Settings:
    """The settings without `algo.loss`: a distributional head has a loss of its own."""
    return {path: value for path, value in settings.items() if path != "algo.loss"}


def with_adam(env_id: str, learning_rate: float, eps: float, clip_norm: float | None = 10.0) -> Settings:
    """Adam as published; for MinAtar all agents share one learning rate (Obando-Ceron and Castro 2021)."""
    if MINATAR.search(env_id):
        learning_rate = 2.5e-4
        eps = 3.125e-4
    return {"optim.type": "adam", "optim.learning_rate": learning_rate, "optim.eps": eps, "optim.clip_norm": clip_norm}


def batches_of_64() -> Settings:
    """An update per four steps, as in the tuned defaults, with a smaller batch for expensive heads."""
    return {"algo.batch_size": 64, "replay.samples_per_insert": 16.0}


def recorded(env_id: str, settings: Settings) -> Settings:
    """The settings for a data set; without a simulator's pace a small environment affords many more updates."""
    learned = {path: value for path, value in settings.items() if not path.startswith("replay.")}
    large = ATARI.search(env_id) or MINATAR.search(env_id)
    pace = {} if large else {"algo.batch_size": 64, "until.steps": 2_000_000, "eval.every_steps": 100_000}
    return {**learned, "replay.type": "dataset", "algo.bonus.type": "off", **pace}


def no_epsilon() -> Settings:
    """No random actions: exploration comes from elsewhere."""
    return {"algo.explore.type": "constant", "algo.explore.epsilon": 0.0}


def epsilon_until(steps: int) -> Settings:
    """Epsilon falls to 0 over the first `steps`."""
    return {"algo.explore.type": "linear", "algo.explore.end": 0.0, "algo.explore.steps": steps}


def epsilon_ladder() -> Settings:
    """An epsilon per environment (Horgan et al. 2018)."""
    return {"algo.explore.type": "ladder", "algo.explore.base": 0.4, "algo.explore.power": 7.0}
