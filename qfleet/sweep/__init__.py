"""Several runs of one plan side by side."""

from qfleet.sweep.sweep import Group, resume_group, train_group

__all__ = ["Group", "resume_group", "train_group"]
