"""Running plans: the wiring, the inline runtime, and what users call."""

from qfleet.run.api import Run, estimate, load, resume, train
from qfleet.run.group import Group, resume_group, train_group

__all__ = ["Group", "Run", "estimate", "load", "resume", "resume_group", "train", "train_group"]
