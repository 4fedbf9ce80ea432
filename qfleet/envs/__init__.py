"""Making worlds: native vector environments where they exist, otherwise single environments, one per lane."""

from qfleet.envs.env_checker import check_env
from qfleet.envs.env_id import absolute_env, absolute_id
from qfleet.envs.episodes import TEST, TRAIN, VALIDATION
from qfleet.envs.lookup.user_code import module_file
from qfleet.envs.lookup.wrappers import absolute_wrappers, wrapper_files
from qfleet.envs.make import is_native, make_world, render_modes, time_env
from qfleet.envs.single_env import AnyEnv
from qfleet.envs.workers.pool import EnvFault
from qfleet.envs.workers.vector import ProcessVectorEnv

__all__ = [
    "TEST",
    "TRAIN",
    "VALIDATION",
    "AnyEnv",
    "EnvFault",
    "ProcessVectorEnv",
    "absolute_env",
    "absolute_id",
    "absolute_wrappers",
    "check_env",
    "is_native",
    "make_world",
    "module_file",
    "render_modes",
    "time_env",
    "wrapper_files",
]
