"""Prepares a data set with processes, as a process that a test can kill: SOURCE TARGET JOBS."""

import sys

from qfleet.datasets.format import open_dataset
from qfleet.datasets.prepare import PreparePlan, prepare_dataset
from qfleet.distributed.preparing.choosing import make_engine

if __name__ == "__main__":
    source, target, jobs = sys.argv[1:]
    prepare_dataset(open_dataset(source), target, PreparePlan(file_bytes=4_000), make_engine("local", int(jobs)))
