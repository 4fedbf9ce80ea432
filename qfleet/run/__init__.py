"""Running plans: the wiring, the inline runtime, and what users call."""

from qfleet.run.api import Run, estimate, load, resume, train

__all__ = ["Run", "estimate", "load", "resume", "train"]
