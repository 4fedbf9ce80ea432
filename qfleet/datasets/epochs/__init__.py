"""In which order the transitions of a data set are learned from, and by which learner."""

from qfleet.datasets.epochs.order import EpochOrder
from qfleet.datasets.epochs.owners import owners_of, queue_groups

__all__ = ["EpochOrder", "owners_of", "queue_groups"]
