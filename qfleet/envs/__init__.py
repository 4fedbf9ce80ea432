"""Making worlds: native vector environments where they exist, single environments side by side otherwise."""

from qfleet.envs.episodes import TEST, TRAIN, VALIDATION, episode_seed
from qfleet.envs.find import absolute_id, module_file
from qfleet.envs.make import make_world
from qfleet.envs.probe import Check, check_env

__all__ = [
    "TEST",
    "TRAIN",
    "VALIDATION",
    "Check",
    "absolute_id",
    "check_env",
    "episode_seed",
    "make_world",
    "module_file",
]
