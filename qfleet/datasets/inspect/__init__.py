"""Looking at a data set: what is in it, and whether it keeps every rule of the format."""

from qfleet.datasets.inspect.coverage import coverage_summary
from qfleet.datasets.inspect.plot import plot_dataset
from qfleet.datasets.inspect.summary import summarize_dataset
from qfleet.datasets.inspect.validation import Problem, validate_dataset

__all__ = ["Problem", "coverage_summary", "plot_dataset", "summarize_dataset", "validate_dataset"]
