"""In which order the transitions of a data set are learned from."""

from qfleet.datasets.epochs.order import EpochOrder, owners_by_shard

__all__ = ["EpochOrder", "owners_by_shard"]
