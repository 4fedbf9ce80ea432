"""The engine of Spark in local mode: Spark only says which process does which order."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.datasets.prepare import Work
from qfleet.errors import QfleetError, UsageError
from qfleet.install import install_command

ATTEMPTS = 5  # at one order
ORDERS_PER_CORE = 4  # in one job: the answers of a job come together
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class SparkEngine:
    """Orders are the elements of an RDD, each a partition of its own."""

    jobs: int

    def map(self, work: Work, orders: Sequence[bytes]) -> Iterator[bytes]:
        """The answers, in the order of the orders."""
        with spark_context(self.jobs) as context:
            step = self.jobs * ORDERS_PER_CORE
            for begin in range(0, len(orders), step):
                some = list(orders[begin : begin + step])
                yield from run_job(context, work, some)


def run_job(context: Any, work: Work, orders: list[bytes]) -> list[bytes]:
    """The answers to some orders."""
    try:
        return [bytes(each) for each in context.parallelize(orders, len(orders)).map(work).collect()]
    except Exception as error:  # py4j has many kinds
        raise QfleetError(
            f"Spark gave up after {ATTEMPTS} attempts",
            " ".join(str(getattr(error, "java_exception", None) or error).split())[:400],
            "If memory is short, use fewer processes: --jobs 1. The same command goes on with the same result.",
        ) from error


@contextmanager
def spark_context(jobs: int) -> Iterator[Any]:
    """Spark in local mode, on loopback, for the time of a preparation."""
    pyspark = require_spark()
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
    }
    with environment():
        conf = pyspark.SparkConf(loadDefaults=False).setAll(list(settings.items()))
        conf = conf.setMaster(f"local[{jobs},{ATTEMPTS}]").setAppName("qfleet data prepare")
        try:
            context = pyspark.SparkContext(conf=conf)
        except Exception as error:
            raise UsageError(
                "Spark does not start",
                f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
                "It needs Java 17 or newer: install it, and set JAVA_HOME if `java` is not found.",
            ) from error
        try:
            yield context
        finally:
            context.stop()


def require_spark() -> Any:
    """The module `pyspark`."""
    try:
        import pyspark
    except ImportError as error:
        raise UsageError(
            "--engine spark needs the package pyspark",
            f"It cannot be imported: {error}.",
            f"Run: {install_command('spark')}",
        ) from error
    return pyspark


@contextmanager
def environment() -> Iterator[None]:
    """Spark's processes use this Python and this qfleet, and one thread each."""
    source = str(Path(__file__).parents[3])
    values = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": LOOPBACK, "OMP_NUM_THREADS": "1"}
    values["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
