"""Making worlds: native vector environments where they exist, otherwise single environments, one per lane."""

from qfleet.envs.env_checker import EnvCheck, check_env
from qfleet.envs.env_id import absolute_id, module_file
from qfleet.envs.episodes import TEST, TRAIN, VALIDATION, episode_seed
from qfleet.envs.make import is_native, make_world, time_env
from qfleet.envs.workers.pool import EnvFault
from qfleet.envs.workers.vector import ProcessVectorEnv

__all__ = [
    "TEST",
    "TRAIN",
    "VALIDATION",
    "EnvCheck",
    "EnvFault",
    "ProcessVectorEnv",
    "absolute_id",
    "check_env",
    "episode_seed",
    "is_native",
    "make_world",
    "module_file",
    "time_env",
]
