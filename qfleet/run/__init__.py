"""Running plans: the wiring, the inline runtime, and what users call."""

from qfleet.run.api import Run, estimate, load, rehearse, resume, train
from qfleet.run.group import Group, resume_group, train_group

__all__ = ["Group", "Run", "estimate", "load", "rehearse", "resume", "resume_group", "train", "train_group"]
