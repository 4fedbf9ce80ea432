"""In which order the transitions of a data set are learned from."""

from qfleet.datasets.epochs.order import EpochOrder, learner_positions

__all__ = ["EpochOrder", "learner_positions"]
