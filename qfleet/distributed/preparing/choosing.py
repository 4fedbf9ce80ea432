"""The engine that a command names."""

import importlib
from typing import Literal, TypeAlias, get_args

from qfleet.datasets.prepare import Engine, LocalEngine
from qfleet.distributed.preparing.processes import ProcessEngine
from qfleet.distributed.preparing.spark import SparkEngine, require_spark
from qfleet.errors import UsageError
from qfleet.install import install_command
from qfleet.system.cores import usable_cores

EngineName: TypeAlias = Literal["local", "ray", "spark"]
MAX_JOBS = 1_000


def make_engine(name: str, jobs: int | None = None, address: str | None = None) -> Engine:
    """The engine of this name with `jobs` processes, by default one per core; `address` is that of a Ray cluster."""
    if name not in get_args(EngineName):
        raise UsageError(
            f"--engine {name} is not known",
            f"The engines are {', '.join(get_args(EngineName))}; the result is the same on each.",
            "Example: --engine local --jobs 4",
        )
    if address is not None and name != "ray":
        raise UsageError(
            f"--address does not go with --engine {name}", "It is that of a Ray cluster.", "Add: --engine ray"
        )
    if jobs is not None and jobs > MAX_JOBS:
        raise UsageError(f"--jobs {jobs} is too many", f"{MAX_JOBS:,} are the most.", "Example: --jobs 4")
    if name == "ray":
        return _ray_engine(jobs, address)
    num = jobs or usable_cores()
    if name == "spark":
        require_spark()
        return SparkEngine(num)
    return LocalEngine() if num == 1 else ProcessEngine(num)


def _ray_engine(jobs: int | None, address: str | None) -> Engine:
    require_ray_engine()
    engine: Engine = importlib.import_module("qfleet.distributed.ray.preparing").RayEngine(jobs, address)
    return engine


def require_ray_engine() -> None:
    """Refuse Ray where it is not installed, or without the part for data."""
    try:
        importlib.import_module("qfleet.distributed.ray.preparing")
    except ImportError as error:
        raise UsageError(
            "--engine ray needs the package ray",
            f"It cannot be imported: {error}.",
            f"Run: {install_command('ray')}",
        ) from error
